"""Layers that eager PyTorch computes by one operator where no gradient is asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort

pytestmark = pytest.mark.ort_only
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "large_epsilon": {"layer_norm_eps": 0.1, "norm_first": True, "activation": "gelu"},
}


def layer_of(form: str, dtype: torch.dtype = torch.float32) -> nn.TransformerEncoderLayer:
    """Give a layer all of whose weights and biases matter."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **FORMS[form])
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.eval().to(dtype)


def operators(model: nn.Module, x: torch.Tensor) -> set[str]:
    with torch.no_grad():
        result = torch_ort.profile(model, x, steps=1)
    return {step.op for step in result.steps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_encoder_layers(form: str, mode: Any, dtype: torch.dtype) -> None:
    layer = layer_of(form, dtype)
    exact = copy.deepcopy(layer).double()
    call = torch.compile(layer, backend="ort", fullgraph=True)
    with mode():
        for batch, length in [(3, 7), (3, 9), (2, 5)]:
            x = torch.randn(batch, length, 32).to(dtype)
            x = x.transpose(0, 1) if length == 9 else x
            got, theirs, want = call(x), layer(x), exact(x.double())
            assert (got.dtype, got.stride()) == (theirs.dtype, theirs.stride())
            error, of_theirs = ((y.double() - want).abs().max() for y in (got, theirs))
            assert error <= 2 * of_theirs + 16 * torch.finfo(dtype).eps
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_their_parts_are_the_engines(form: str) -> None:
    assert not any("encoder_layer" in op for op in operators(layer_of(form), torch.randn(2, 5, 32)))


@pytest.mark.hands_over(reason="what is one operator has no shape rule")
def test_masks_and_open_widths_leave_them_whole() -> None:
    layer, x = layer_of("plain"), torch.randn(2, 6, 32)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[0, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    with torch.no_grad():
        call = torch.compile(layer, backend="ort", fullgraph=True)
        padded = {"src_key_padding_mask": hidden}
        torch.testing.assert_close(call(x, **padded)[:, :4], layer(x, **padded)[:, :4])
        torch.testing.assert_close(call(x, causal), layer(x, causal))
        torch.compiler.reset()
        call = torch.compile(layer, backend="ort", fullgraph=True, dynamic=True)
        for length in (6, 4):
            torch.testing.assert_close(call(x[:, :length]), layer(x[:, :length]))
    assert torch_ort.counters()["fallbacks"] == 0


def test_gradients_follow_inference() -> None:
    layer, x = layer_of("norm_first"), torch.randn(2, 5, 32)
    call = torch.compile(layer, backend="ort", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(call(x), layer(x))
    results = []
    for each in (call, layer):
        layer.zero_grad()
        each(x).square().sum().backward()
        results.append([parameter.grad for parameter in layer.parameters()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_an_encoder_in_an_ortmodule() -> None:
    encoder = nn.TransformerEncoder(layer_of("gelu"), 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch_ort.ORTModule(copy.deepcopy(encoder))(x), encoder(x))
