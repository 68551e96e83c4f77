# A model and its loss in one graph.
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.ortmodule import ModuleWithLoss

pytestmark = pytest.mark.ort_only

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.linspace(0, 1, 8)
LABELS = torch.tensor([0, 3, 1, 2, -100, 1])


@dataclasses.dataclass
class Prediction:
    logits: torch.Tensor
    hidden: torch.Tensor


class Model(nn.Module):
    """Gives its prediction in one of several forms."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        hidden = F.gelu(self.first(x if mask is None else x * mask))
        logits = self.last(hidden)
        if self.form == "dict":
            return {"logits": logits, "hidden": hidden}
        if self.form == "dataclass":
            return Prediction(logits, hidden)
        return (logits, [hidden]) if self.form == "tuple" else logits


def logits_of(prediction: Any) -> torch.Tensor:
    if isinstance(prediction, dict):
        return prediction["logits"]
    if isinstance(prediction, tuple):
        return prediction[0]
    return prediction.logits if isinstance(prediction, Prediction) else prediction


def loss_of(prediction: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_of(prediction), labels)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="ort", fullgraph=True)


WRAPPERS = {"ORTModule": ORTModule, "torch.compile": compiled}
CALLS = {
    "labels last": ((X, LABELS), {}),
    "labels after several": ((X, MASK, LABELS), {}),
    "labels by name": ((X,), {"labels": LABELS}),
    "all by name": ((), {"x": X, "mask": MASK, "labels": LABELS}),
    "labels last, others by name": ((LABELS,), {"x": X}),
}
FORMS = ("tensor", "dict", "tuple", "dataclass")


def pair(wrap: str, form: str = "tensor", loss: Any = loss_of) -> tuple[ModuleWithLoss, Any, Any]:
    """Give an eager module, one for the engine, and the latter wrapped."""
    torch.manual_seed(0)
    eager = ModuleWithLoss(Model(form), loss)
    ours = copy.deepcopy(eager)
    return eager, ours, WRAPPERS[wrap](ours)


def assert_same_step(eager: nn.Module, ours: nn.Module, wrapped: Any, *args: Any, **kwargs: Any):
    want, got = eager(*args, **kwargs), wrapped(*args, **kwargs)
    assert type(got) is tuple
    assert type(got[1]) is type(want[1])
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(logits_of(got[1]), logits_of(want[1]))
    for module, result in ((eager, want), (ours, got)):
        module.zero_grad()
        result[0].backward()
    for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("call", CALLS)
def test_the_loss_of_the_models_prediction(call):
    args, kwargs = CALLS[call]
    module = ModuleWithLoss(Model(), loss_of)
    loss, prediction = module(*args, **kwargs)
    mask = MASK if "mask" in kwargs or len(args) == 3 else None
    torch.testing.assert_close(prediction, module.model(X, mask))
    torch.testing.assert_close(loss, F.cross_entropy(prediction, LABELS))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("call", CALLS)
def test_calls_in_the_engine(call, wrap):
    args, kwargs = CALLS[call]
    assert_same_step(*pair(wrap), *args, **kwargs)
    counters = torch_ort.counters()
    assert (counters["forward_runs"], counters["backward_runs"]) == (1, 1)
    assert counters["fallbacks"] == 0


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_predictions(form, wrap):
    assert_same_step(*pair(wrap, form), X, LABELS)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_loss_with_parameters_is_trained(wrap):
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, prediction, labels):
            return loss_of(prediction, labels) * self.weight

    eager, ours, wrapped = pair(wrap, loss=Weighted())
    assert "loss_fn.weight" in ours.state_dict()
    assert_same_step(eager, ours, wrapped, X, LABELS)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum", weight=torch.arange(4.0)),
        lambda prediction, labels: F.mse_loss(prediction, F.one_hot(labels.clamp(0), 4).float()),
    ],
)
def test_losses(loss):
    assert_same_step(*pair("ORTModule", loss=loss), X, LABELS)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_several_steps(wrap):
    eager, ours, wrapped = pair(wrap)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (eager, ours)
    ]
    for count in (6, 5, 6, 3):
        assert_same_step(eager, ours, wrapped, X[:count], LABELS[:count])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_other_sizes_are_one_graph(graphs_captured):
    eager, ours, wrapped = pair("ORTModule")
    for count in (6, 4, 2):
        assert_same_step(eager, ours, wrapped, X[:count], labels=LABELS[:count])
    assert graphs_captured() == 1


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_gradients_of_loss_and_prediction_together(wrap):
    eager, ours, wrapped = pair(wrap)
    for call in (eager, wrapped):
        loss, prediction = call(X, LABELS)
        (loss + prediction.pow(2).sum()).backward()
    for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_the_model_by_itself():
    eager, ours, wrapped = pair("ORTModule")
    wrapped(X, LABELS)[0].backward()
    assert isinstance(wrapped.model, Model)
    assert wrapped.model is ours.model
    torch.testing.assert_close(wrapped.model(X), eager.model(X))
    assert list(ours.state_dict()) == [f"model.{name}" for name in eager.model.state_dict()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    eager, _, wrapped = pair("ORTModule")
    wrapped.eval()
    with mode():
        torch.testing.assert_close(wrapped(X, LABELS), eager(X, LABELS))


def test_keyword_arguments_of_the_call_are_left_alone():
    kwargs = {"x": X, "labels": LABELS}
    pair("ORTModule")[2](**kwargs)
    assert list(kwargs) == ["x", "labels"]


@pytest.mark.parametrize("kwargs", [{}, {"x": X}])
def test_a_call_without_labels(kwargs):
    words = "ModuleWithLoss: want labels as the last argument or by keyword"
    with pytest.raises(TypeError, match=words):
        ModuleWithLoss(Model(), loss_of)(**kwargs)
