# Under torch.inference_mode(): the numbers of eager PyTorch, and no trace of it in other modes.
from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import torch_ort
from tests.roads import ROADS
from torch_ort import ORTModule

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def encoder(**settings: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings)


class PassedThrough(nn.Module):
    """Gives what dropouts that do nothing hand on, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.alpha = nn.Linear(8, 8), nn.Dropout(0.5), nn.AlphaDropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        z = self.alpha(self.drop(y)) + 1
        return self.drop(x), self.drop(y), y.flatten(1), z, self.drop(z).transpose(1, 2)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64)
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            image_size=8, patch_size=4,
        )
    )  # fmt: skip


def words(step: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(18 + 3 * step).reshape(3, -1) % 64
    return {"input_ids": ids, "labels": ids}


def rows(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"src": torch.randn(2, 5 + step, 8, generator=generator)}


def images(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(2 + step, 3, 8, 8, generator=generator)}


MODELS = {
    "encoder layer": (encoder, rows),
    "encoder layer, norm first": (lambda: encoder(norm_first=True, activation="gelu"), rows),
    "passed through": (PassedThrough, lambda step: {"x": rows(step)["src"]}),
    "gpt2": (gpt2, words),
    "t5": (t5, words),
    "vit": (vit, images),
}


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Give the tensors among a model's outputs, whatever holds them."""
    return [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


def assert_same(model: nn.Module, ours: Any, inputs: dict, mode: AbstractContextManager) -> None:
    with mode:
        want, got = tensors(model(**inputs)), tensors(ours(**inputs))
        assert len(got) == len(want) > 0
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert a.requires_grad == b.requires_grad
            if isinstance(ours, ORTModule):  # Dynamo makes some results itself
                assert a.is_inference() == b.is_inference()


def wrapped(model: nn.Module, road: str) -> Any:
    ours = copy.deepcopy(model)
    return ORTModule(ours) if road == "module" else torch.compile(ours, backend="ort")


def dynamo_captures_for_all_sizes(model: nn.Module, inputs: dict) -> bool:
    with torch.inference_mode():
        try:
            torch.compile(model, backend="eager", dynamic=True, fullgraph=True)(**inputs)
        except torch._dynamo.exc.Unsupported:
            return False
        finally:
            torch._dynamo.reset()
    return True


@pytest.mark.parametrize(
    ("name", "road"), [*((name, "module") for name in MODELS), ("encoder layer", "compile")]
)
def test_evaluation(name, road):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    if road == "compile" and not dynamo_captures_for_all_sizes(model, inputs(0)):
        pytest.skip("Dynamo of this torch captures its operator for one size alone")
    ours = wrapped(model, road)
    for step in range(3):
        assert_same(model, ours, inputs(step), torch.inference_mode())
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["forward_runs"] >= 3


def test_evaluation_that_aotautograd_captures(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    test_evaluation("passed through", "module")


@pytest.mark.parametrize(
    ("road", "first"),
    [("module", "grad"), ("module", "no_grad"), ("module", "inference"), ("compile", "inference")],
)
def test_modes_take_turns(road, first):
    """Graphs of two modes may share what the engine has compiled."""
    torch.manual_seed(0)
    model = PassedThrough().eval()
    ours = wrapped(model, road)
    for name in (first, *MODES, *MODES):
        assert_same(model, ours, {"x": rows(0)["src"]}, MODES[name]())
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize(
    ("make", "road"), [(encoder, "module"), (gpt2, "module"), (PassedThrough, "compile")]
)
def test_training_with_validation_in_inference_mode(make, road):
    inputs = next(given for made, given in MODELS.values() if made is make)
    torch.manual_seed(0)
    model = make()
    ours = wrapped(model, road)
    runs = [(call, torch.optim.SGD(call.parameters(), lr=0.1)) for call in (model, ours)]
    for step in range(3):
        for call, optimizer in runs:
            torch.manual_seed(step)
            call.train()
            optimizer.zero_grad()
            sum(x.float().square().mean() for x in tensors(call(**inputs(0)))).backward()
            optimizer.step()
            call.eval()
        assert_same(model, ours, inputs(0), torch.inference_mode())
    for got, want in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ["module", "compile"])
def test_inference_tensors_come_in(road):
    torch.manual_seed(0)
    model = PassedThrough().eval()
    ours = wrapped(model, road)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with torch.inference_mode():
            x = torch.randn(2, 3, 8)
        assert_same(model, ours, {"x": x}, mode())
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ["module", "compile"])
def test_a_model_made_in_inference_mode(road):
    with torch.inference_mode():
        model = PassedThrough().eval()
        ours = wrapped(model, road)
    for mode in (torch.inference_mode, torch.no_grad):
        assert_same(model, ours, {"x": rows(0)["src"]}, mode())
    assert torch_ort.counters()["fallbacks"] == 0


class Writes(nn.Module):
    """Writes into what dropouts that do nothing give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.none = nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        z = self.drop(y) if not self.training else self.none(y)
        z += 1
        return y, z


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_writing_into_what_is_passed_through(training, is_recorded, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "" if is_recorded else "recorder")
    model = Writes().train(training)
    ours = ORTModule(copy.deepcopy(model))
    for mode in (torch.no_grad, torch.enable_grad):
        assert_same(model, ours, {"x": rows(0)["src"]}, mode())
    assert torch_ort.counters()["graphs_recorded"] == 2 * is_recorded


class Counts(nn.Module):
    """Writes into a buffer, and hangs a tensor into an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=0.5)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        self.last = y.detach().mean(0)
        return y


def test_state_written_in_inference_mode():
    eager = Counts()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(6, 8)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            torch.testing.assert_close(ours(x), eager(x))
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())
        torch.testing.assert_close(ours.last, eager.last)
        assert ours.last.is_inference() == eager.last.is_inference()
    assert torch_ort.counters()["fallbacks"] == 0


class BesideANorm(nn.Module):
    """Has a norm of a plain tensor run before what refuses one of inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.clone()) + self.linear(x)


BEFORE_A_NORM = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "beside": BesideANorm,
}


@pytest.mark.hands_over("the first run fails, as eager PyTorch does")
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("name", BEFORE_A_NORM)
@pytest.mark.parametrize("road", ROADS)
def test_training_on_a_tensor_of_inference_mode_changes_what_it_does_in_eager(
    road, name, has_run, monkeypatch
):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = BEFORE_A_NORM[name]()
    other = copy.deepcopy(model)
    with torch.inference_mode():
        x = torch.randn(6, 4)
    for call in (model, ROADS[road](other)):
        if has_run:
            call(x.clone())
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            call(x)
    torch.testing.assert_close(other.state_dict(), model.state_dict())
