"""An engine failure at any stage: the step is eager's, and one warning says why."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

import torch_ort
from tests.injection import at_place, into_backward, into_forward
from torch_ort import _C
from torch_ort.capture.graphs import GraphCompiler
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning
from torch_ort.read.fx_reader import FxReader

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("captures are made to fail")]

REASON = "injected by a test"


def network() -> nn.Module:
    """A model with running statistics and dropout: what a step run twice would spoil."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def fail(*_args, **_kwargs):
    raise _C.InternalError(REASON)


def unsupported(*_args, **_kwargs):
    raise _C.Unsupported(REASON)


def fails_once(function):
    """Give a function that fails on its first call only."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return fail() if len(calls) == 1 else function(*args, **kwargs)

    return wrapped


INJECTIONS = {
    "capture": lambda patch: patch.setattr(GraphCompiler, "compile_joint", unsupported),
    "convert": lambda patch: patch.setattr(FxReader, "add_nodes", unsupported),
    "pass": lambda patch: patch.setattr(compiler._C, "run_pipeline", fail),
    "plan": lambda patch: patch.setattr(compiler, "compile_session", fail),
    "forward": lambda patch: into_forward(patch, fails_once),
    "backward": lambda patch: into_backward(patch, fails_once),
}


def train(model: nn.Module, call, steps: int = 3) -> list[torch.Tensor]:
    """Train by plain gradient descent; give the losses."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = call(torch.randn(5, 6)).square().mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return losses


@pytest.mark.parametrize("stage", INJECTIONS)
class TestInjectedFailure:
    def test_steps_are_those_of_eager(self, stage, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        model = network()
        expected = copy.deepcopy(model)
        expected_losses = train(expected, expected)
        INJECTIONS[stage](monkeypatch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = train(model, torch.compile(model, backend="ort"))
        torch.testing.assert_close(losses, expected_losses)
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        ours = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        assert len(ours) == 1
        assert ours[0].startswith(f"torch_ort: {stage}: {REASON}")
        assert torch_ort.counters()["fallbacks"] == 1
        assert torch_ort.counters()[f"fallbacks_{stage}"] == 1

    def test_strict_raises(self, stage, monkeypatch):
        model = network()
        INJECTIONS[stage](monkeypatch)
        with pytest.raises(Exception, match=REASON):
            train(model, torch.compile(model, backend="ort"))


def test_a_later_shape_that_cannot_be_planned(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = network().eval()
    compiled = torch.compile(model, backend="ort", dynamic=True)
    inputs = [torch.randn(n, 6) for n in (4, 7)]
    torch.testing.assert_close(compiled(inputs[0]), model(inputs[0]))
    at_place("plan", fail)
    with pytest.warns(FallbackWarning, match=f"plan: {REASON}"):
        result = compiled(inputs[1])
    torch.testing.assert_close(result, model(inputs[1]))


def test_an_error_of_the_program_is_raised_as_eager_raises_it(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    table = nn.Embedding(4, 3)
    compiled = torch.compile(table.forward, backend="ort")
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([7]))
    assert torch_ort.counters()["fallbacks"] == 0
    torch.testing.assert_close(compiled(torch.tensor([1])), table(torch.tensor([1])))


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_first_run_that_fails_late_updates_statistics_once(grad, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = network()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort")
    x = torch.randn(5, 6)
    written = []

    def fails_late(run):
        def wrapped(*args):
            run(*args)
            written.append(model[1].running_mean.clone())
            fail()

        return wrapped

    into_forward(monkeypatch, fails_late)
    with torch.set_grad_enabled(grad):
        torch.manual_seed(1)
        with pytest.warns(FallbackWarning, match=f"forward: {REASON}"):
            result = compiled(x)
        torch.manual_seed(1)
        torch.testing.assert_close(result, expected(x))
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert len(written) == 1
    assert written[0].abs().sum() > 0, "the failing run was meant to write"


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_first_run_copies_only_what_it_writes_into(grad, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = network()
    compiled = torch.compile(model, backend="ort")
    with (
        torch.set_grad_enabled(grad),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile,
    ):
        compiled(torch.randn(5, 6))
    assert torch_ort.counters()["forward_runs"] == 1
    clones = [event.input_shapes[0] for event in profile.events() if event.name == "aten::clone"]
    assert [8] in clones, "running statistics"
    assert [5, 6] not in clones, "the batch"


@pytest.mark.parametrize("is_first", [True, False])
def test_tensors_without_data_run_in_eager(is_first, monkeypatch):
    """Tools give these to a model, to learn the sizes of its results."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    compiled = torch.compile(model, backend="ort")
    x = torch.randn(5, 6)
    if not is_first:
        compiled(x)
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.simplefilter("ignore")
        results = [compiled(mode.from_tensor(x)) for _ in range(2)]
    for result in results:
        assert type(result) is FakeTensor
        assert result.shape == (5, 3)
    torch.testing.assert_close(compiled(x), model(x))
    counters = torch_ort.counters()
    # Dynamo sometimes captures such a graph twice, "unexpectedly", as it says itself.
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 2 <= num_graphs <= 3
    assert (counters["fallbacks"], counters["forward_runs"]) == (
        num_graphs - 1, 1 if is_first else 2,
    )  # fmt: skip
