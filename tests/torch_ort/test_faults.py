"""Any error, at any place between a call and its result: the step is eager's, with one warning."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import module_with
from torch import nn

import torch_ort
from tests.injection import at_place
from tests.roads import ROADS
from torch_ort import _C
from torch_ort.capture import captured_module, graphs
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning
from torch_ort.read.fx_reader import FxReader
from torch_ort.record import recorder

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("captures are made to fail")]

REASON = "injected by a test"
ERRORS = {
    "AssertionError": AssertionError,
    "IndexError": IndexError,
    "InternalError": _C.InternalError,
    "KeyError": KeyError,
    "MemoryError": MemoryError,
    "NameError": NameError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "Unsupported": _C.Unsupported,
    "UserError": _C.UserError,
    "ZeroDivisionError": ZeroDivisionError,
}
Inject = Callable[[pytest.MonkeyPatch, Callable[[], BaseException]], None]


class Network(nn.Module):
    """Steps of every kind, running statistics and dropout: what a step run twice would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        y = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        sums = x.t()[:5].sort(0)[0].cumsum(0)
        return self.last(y) + sums.mean()


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.from_numpy(x.detach().numpy()).tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


tanh = torch_ort.python_op(Tanh)


class OtherNetwork(nn.Module):
    """Steps of the kinds that `Network` lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1)
        self.inner, self.up = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(10, 2, 3, padding=1)

    def forward(self, x):
        skip = torch.tanh(self.down(x.view(-1, 1, 2, 3))).sigmoid()
        y = torch.cat([skip, self.inner(skip).tanh().exp()], 1)
        return tanh(self.up(y)).square()


def raising(make_error: Callable[[], BaseException]) -> Callable[..., Any]:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise make_error()

    # Where an error comes from tells the program's own from those of ours.
    fail.__code__ = fail.__code__.replace(co_filename=recorder.__file__)
    return fail


def method(owner: Any, name: str) -> Inject:
    """Raise in a function of ours."""
    return lambda patch, make_error: patch.setattr(owner, name, raising(make_error))


def place(name: str, passes: int = 0) -> Inject:
    """Raise at a place of csrc/base/failpoint.h."""
    return lambda patch, make_error: at_place(name, make_error, passes)


PYTHON_PLACES = {
    "capture": method(graphs.GraphCompiler, "capturing"),
    "convert": method(FxReader, "add_nodes"),
    "passes": method(compiler._C, "run_pipeline"),
    "key": method(compiler, "_key"),
    "session": method(compiler, "compile_session"),
    "layout": method(graphs, "JointLayout"),
}
# Tests draw eager's random numbers, for which passes are left out.
PASSES = {
    f"pass {each.name}": place(each.name) for each in _C.passes() if each.not_with != "exact_random"
}
BINDING = {name: place(name) for name in ("lower", "plan", "bind", "memory")}
FORMS = ("view", "out", "functional", "mutation", "region", "product")
FORWARD = {name: place(name) for name in (*FORMS, "results")}
OTHER_FORMS = ("placed", "parts", "python_op")
FIRST = PYTHON_PLACES | BINDING | FORWARD


def steps(model: nn.Module, call: Any, before_backward: Callable[[], None] | None = None) -> list:
    """Train by Adam, whose steps are as large for small gradients; give losses and gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seen = []
    for step in range(4):
        loss = call(torch.randn(5, 6, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        if step == 0 and before_backward is not None:
            before_backward()
        loss.backward()
        seen.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
    return [*seen, torch.rand(2)]


@pytest.fixture
def train_with_fault(monkeypatch, live_contexts):
    """Return a function that trains with a fault and compares with eager; it gives the warnings."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setattr(compiler, "_sessions", {})  # one of another test would know the sizes

    def train(
        road: str, inject: Inject, error: type, in_backward: bool = False,
        make: Callable[[], nn.Module] = Network,
    ) -> list[str]:  # fmt: skip
        # In float32 Adam would make as much of rounding where a gradient is zero in truth, as that
        # of a bias before a norm is.
        model = make().double()
        expected = copy.deepcopy(model)
        want = steps(expected, expected)
        fault = lambda: inject(monkeypatch, lambda: error(REASON))  # noqa: E731
        if not in_backward:
            fault()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = steps(model, ROADS[road](model), fault if in_backward else None)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        assert live_contexts() == 0
        alive = weakref.ref(model)
        del model
        monkeypatch.undo()
        torch._dynamo.reset()
        gc.collect()
        assert alive() is None, "the failure keeps the model"
        return [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]

    logging.disable(logging.CRITICAL)  # records would keep the errors, and frames with them
    yield train
    logging.disable(logging.NOTSET)


def assert_said_once(messages: list[str], stages: tuple[str, ...] = ()) -> None:
    assert len(messages) == 1, messages
    assert REASON in messages[0]
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 1
    assert not stages or sum(counters[f"fallbacks_{stage}"] for stage in stages) == 1


def with_errors(places: Iterable[str]) -> list:
    """Give each place and road an error, of all types in turn; one road of each is slow."""
    return [
        pytest.param(
            road, name, error, id=f"{road}-{name}-{error}",
            marks=[pytest.mark.slow] if (i + j) % 2 else [],
        )
        for j, road in enumerate(ROADS)
        for i, (name, error) in enumerate(zip(places, itertools.cycle(ERRORS), strict=False))
    ]  # fmt: skip


@pytest.mark.parametrize(("road", "name", "error"), with_errors(FIRST))
def test_every_place_of_a_first_step(road, name, error, train_with_fault):
    assert_said_once(train_with_fault(road, FIRST[name], ERRORS[error]))


@pytest.mark.parametrize(("road", "name", "error"), with_errors(PASSES))
def test_every_pass(road, name, error, train_with_fault):
    assert_said_once(train_with_fault(road, PASSES[name], ERRORS[error]))


@pytest.mark.parametrize(("road", "name", "error"), with_errors(["out"] * len(ERRORS)))
def test_every_error_of_a_first_run(road, name, error, train_with_fault):
    assert_said_once(train_with_fault(road, FORWARD[name], ERRORS[error]))


BACKWARD = {
    name: place(name) for name in ("view", "out", "region", "functional", "product", "gradients")
}


@pytest.mark.parametrize(("road", "name", "error"), with_errors(BACKWARD))
def test_every_place_of_a_first_backward(road, name, error, train_with_fault):
    messages = train_with_fault(road, BACKWARD[name], ERRORS[error], in_backward=True)
    assert_said_once(messages, ("backward",))


@pytest.mark.parametrize(("road", "name", "error"), with_errors(OTHER_FORMS))
def test_other_places_of_a_first_step(road, name, error, train_with_fault):
    messages = train_with_fault(road, place(name), ERRORS[error], make=OtherNetwork)
    assert_said_once(messages, ("forward",))


@pytest.mark.parametrize(("road", "name", "error"), with_errors(("placed", "python_op")))
def test_other_places_of_a_first_backward(road, name, error, train_with_fault):
    messages = train_with_fault(road, place(name), ERRORS[error], True, OtherNetwork)
    assert_said_once(messages, ("backward",))


@pytest.mark.parametrize("road", ROADS)
def test_faults_are_put_into_every_form_of_a_kernel_call(road):
    """Those of `If` and `Loop` and of calls without a schema are in no training graph."""
    reached = set()
    for make in (Network, OtherNetwork):
        _C.set_failpoint(reached.add)
        ROADS[road](make())(torch.randn(5, 6)).mean().backward()
    tested = {*FORMS, *OTHER_FORMS, *BACKWARD, *FORWARD, *BINDING}
    assert reached - set(_C.pass_names()) == tested


@pytest.mark.parametrize(("road", "error"), zip(itertools.cycle(ROADS), ERRORS, strict=False))
def test_a_recorder_that_fails_is_only_slower(road, error, train_with_fault):
    messages = train_with_fault(road, method(recorder._Recorder, "_write_back"), ERRORS[error])
    assert messages == []
    is_meant = ERRORS[error] is _C.Unsupported
    assert torch_ort.counters()["recordings_handed_over"] == 1
    assert torch_ort.counters()["recorder_bugs"] == (0 if is_meant else 1)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("error", ["KeyError", "InternalError", "UserError"])
def test_strict_raises_a_bug_of_the_recorder(road, error, monkeypatch):
    monkeypatch.setattr(recorder._Recorder, "_write_back", raising(lambda: ERRORS[error](REASON)))
    with pytest.raises(Exception, match=REASON):
        ROADS[road](Network())(torch.randn(5, 6))
    assert torch_ort.counters()["recordings_handed_over"] == 0


@pytest.mark.parametrize("error", ["KeyError", "NameError", "UserError", "RuntimeError"])
def test_conditions_of_a_later_call(error, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = Network().eval()
    wrapped = torch_ort.ORTModule(model)
    x = torch.randn(5, 6)
    wrapped(x)
    fail = raising(lambda: ERRORS[error](REASON))
    monkeypatch.setattr(captured_module.ModuleCapture, "match", fail)
    with pytest.warns(FallbackWarning, match=REASON):
        result = wrapped(x)
    torch.testing.assert_close(result, model(x))


class TestLaterSteps:
    """A graph that has run before: what eager would raise is raised, a plan that fails is not."""

    @pytest.mark.parametrize(("road", "name", "error"), with_errors(["plan", "bind", "memory"] * 4))
    def test_before_the_first_kernel(self, road, name, error, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        monkeypatch.setattr(compiler, "_sessions", {})  # one of another test may know the sizes
        model = Network()
        expected = copy.deepcopy(model)
        compiled = ROADS[road](model)
        if road == "compile":
            compiled = torch.compile(model, backend="ort", dynamic=True)
        for size in (4, 7):
            if size == 7:
                at_place(name, lambda: ERRORS[error](REASON))
            x = torch.randn(size, 6)
            results = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for call in (expected, compiled):
                    torch.manual_seed(size)
                    results.append(call(x))
            torch.testing.assert_close(*results)
        assert_said_once([str(w.message) for w in caught if w.category is FallbackWarning])
        torch.testing.assert_close(model.state_dict(), expected.state_dict())

    @pytest.mark.parametrize("road", ROADS)
    def test_an_error_of_a_kernel_is_raised(self, road, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        compiled = ROADS[road](Network().eval())
        x = torch.randn(5, 6)
        compiled(x)
        at_place("out", lambda: IndexError(REASON))
        with pytest.raises(IndexError, match=REASON):
            compiled(x)
        assert torch_ort.counters()["fallbacks"] == 0

    @pytest.mark.parametrize("road", ROADS)
    def test_a_bug_is_eagers_where_nothing_was_written(self, road, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        model = Network().eval()
        compiled = ROADS[road](model)
        x = torch.randn(5, 6)
        compiled(x)
        at_place("out", lambda: _C.InternalError(REASON))
        with pytest.warns(FallbackWarning, match=REASON):
            result = compiled(x)
        torch.testing.assert_close(result, model(x))

    @pytest.mark.parametrize("road", ROADS)
    def test_a_bug_is_raised_where_something_may_have_been_written(self, road, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        compiled = ROADS[road](Network())
        x = torch.randn(5, 6)
        compiled(x)
        at_place("out", lambda: _C.InternalError(REASON))
        with pytest.raises(_C.InternalError, match=REASON):
            compiled(x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", ["convert", "out"])
def test_what_ends_the_program_passes(road, name, error, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    FIRST[name](monkeypatch, lambda: error(REASON))
    with pytest.raises(error):
        ROADS[road](Network())(torch.randn(5, 6))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_device_that_is_lost_is_lost_to_eager_too(road, in_backward, is_first, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setattr(compiler, "_sessions", {})
    compiled = ROADS[road](Network())

    def step(fails=False):
        if fails and not in_backward:
            at_place("out", lambda: _C.DeviceError(REASON))
        loss = compiled(torch.randn(5, 6)).mean()
        if fails and in_backward:
            at_place("out", lambda: _C.DeviceError(REASON))
        loss.backward()

    if not is_first:
        step()
    with pytest.raises(torch_ort.DeviceError, match=REASON):
        step(fails=True)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ROADS)
def test_files_that_cannot_be_written_are_the_users(road, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setenv("TORCH_ORT_DUMP", "ir")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_ORT_DUMP_DIR", str(tmp_path / "file"))
    with pytest.raises(Exception, match="File exists"):
        ROADS[road](Network())(torch.randn(5, 6))
    assert torch_ort.counters()["fallbacks"] == 0


class Reversible(torch.autograd.Function):
    """Computes its layers again in backward, from what they gave."""

    @staticmethod
    def forward(ctx, x, layers):
        for layer in layers:
            x = x + layer(x).detach()
        ctx.save_for_backward(x.detach())
        ctx.layers = layers
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        for layer in reversed(ctx.layers):
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                torch.autograd.backward(layer(given), gradient)
            gradient = gradient + given.grad
        return gradient, None


def test_a_backward_that_adds_to_gradients_of_the_module():
    model = module_with(
        lambda self, x: Reversible.apply(self.first(x), self.layers),
        first=nn.Linear(6, 6),
        layers=nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]),
    )
    expected = copy.deepcopy(model)
    wrapped = torch_ort.ORTModule(model)
    for _ in range(3):  # the second adds to gradients that are there
        x = torch.randn(4, 6)
        for call in (wrapped, expected):
            call(x).square().sum().backward()
    gradients = [[p.grad for p in each.parameters()] for each in (model, expected)]
    torch.testing.assert_close(*gradients)
    assert torch_ort.counters()["fallbacks"] == 0
