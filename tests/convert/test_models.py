"""Whole models in inference: standard nodes only, eager's bits, onnxruntime's numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conversion import NEWEST, assert_onnx_agrees, convert, floats, ops_of, run
from torch import nn

from torch_ort import _C


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        heads = [part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.before_feed_forward(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(EncoderBlock(16, 2, True), EncoderBlock(16, 2, True))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x))).log_softmax(-1)


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
        nn.Softmax(-1),
    )
    with torch.no_grad():
        for norm in (model[1], model[5]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


def mlp() -> nn.Module:
    layers = [nn.Linear(6, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 4), nn.Sigmoid())


MODELS = {
    "MLP": (mlp, floats(5, 6)),
    "CNN": (cnn, floats(2, 3, 8, 8)),
    "encoder block": (lambda: EncoderBlock(16, 4, False), floats(2, 7, 16)),
    "causal language model": (LanguageModel, torch.arange(18).reshape(2, 9)),
}


def converted(
    name: str, opset: int = NEWEST, dynamic: bool = False
) -> tuple[_C.Graph, list[torch.Tensor], torch.Tensor]:
    """Give the graph of a model, its inputs (parameters last), and eager's result."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def function(given: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(state, values, strict=True)), (given,))

    inputs = [x, *state.values()]
    return convert(function, *inputs, opset=opset, dynamic=dynamic), inputs, model(x)


@pytest.mark.parametrize("name", MODELS)
def test_standard_nodes_alone(name: str) -> None:
    graph, inputs, want = converted(name)
    assert [op for op in ops_of(graph) if op.startswith("aten::")] == []
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert_onnx_agrees(graph, inputs)


@pytest.mark.parametrize("opset", [12, 14, 17, 20])
@pytest.mark.parametrize("name", MODELS)
def test_older_opsets(name: str, opset: int) -> None:
    graph, inputs, want = converted(name, opset)
    assert _C.required_opset(graph) <= opset
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["MLP", "encoder block", "causal language model"])
def test_symbolic_sizes(name: str) -> None:
    graph, inputs, want = converted(name, dynamic=True)
    (got,) = run(graph, inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
