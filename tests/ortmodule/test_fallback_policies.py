"""Every fallback policy with every cause: the step is eager's, or the cause is raised."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort
from tests.injection import at_place, into_backward, into_forward
from torch_ort import _C, DebugOptions, ORTModule
from torch_ort.capture.graphs import GraphCompiler
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import (
    FallbackPolicy,
    ORTModuleDeviceException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from torch_ort.read.fx_reader import FxReader

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("captures are made to fail")]

REASON = "injected by a test"
STEPS = 3


class Network(nn.Module):
    """Running statistics and dropout: what a step run twice would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x):
        return self.body(x)


class OnTwoDevices(Network):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.empty(3, device="meta"))


class TakesSet(Network):
    def forward(self, x, scales):
        return self.body(x) * max(scales)


class Branches(Network):
    def forward(self, x):
        y = self.body(x)
        return y * 2 if y.sum() > 0 else y * 3


class Assigns(Network):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.body(x) * self.calls


class Replaces(Network):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        y = self.body(x)
        self.last = y.detach().mean(0)
        return y * 2


def fail(*_args, **_kwargs):
    raise _C.InternalError(REASON)


def unsupported(*_args, **_kwargs):
    raise _C.Unsupported(REASON)


def fail_to_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiler, "_sessions", {})  # an equal graph of another test would be shared
    patch.setattr(compiler, "compile_session", fail)


def fail_to_plan_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiler, "_sessions", {})  # one of another test would know the sizes
    at_place("plan", lambda: _C.InternalError(REASON), passes=1)


@dataclass
class Cause:
    """One way to fail: the module and its arguments, what is injected, what is said."""

    kind: type[Exception]
    words: str
    stage: str = "capture"
    make: Callable[[], nn.Module] = Network
    extra: tuple = ()
    inject: Callable[[pytest.MonkeyPatch], None] = field(default=lambda patch: None)
    cause: type[Exception] | None = _C.Unsupported
    first: int = 0  # the step at which it shows
    has_parts: bool = False  # that another module may do without what fails


def injected(stage: str, inject: Callable, cause: type = _C.InternalError, **more: Any) -> Cause:
    kind = ORTModuleONNXModelException
    return Cause(kind, REASON, stage, inject=inject, cause=cause, **more)


CAUSES = {
    "device": Cause(ORTModuleDeviceException,
        "the parameters and buffers of the module are on several devices: got cpu, meta, want one",
        make=OnTwoDevices, cause=None),
    "data": Cause(ORTModuleIOError, "scales: got set, want tensors, numbers", make=TakesSet,
        extra=({1.0, 2.0}, ), cause=TypeError, has_parts=True),
    "torch model": Cause(
        ORTModuleTorchModelException,
        "ORTModule is not compatible with torch.nn.DataParallel; "
        "please use torch.nn.parallel.DistributedDataParallel instead",
        make=lambda: nn.DataParallel(Network()),
        cause=None,
    ),
    "control flow": Cause(ORTModuleONNXModelException, "Python asks for a number in a tensor",
        make=Branches, has_parts=True),
    "assigned attribute": Cause(ORTModuleONNXModelException, "forward assigns 'seen' of the module",
        make=Assigns, has_parts=True),
    "capture": injected("capture",
        lambda patch: patch.setattr(GraphCompiler, "compile_joint", unsupported), _C.Unsupported,
        has_parts=True),
    "convert": injected("capture", lambda patch: patch.setattr(FxReader, "add_nodes", unsupported),
        _C.Unsupported),
    "pass": injected("capture", lambda patch: patch.setattr(compiler._C, "run_pipeline", fail)),
    "plan": injected("capture", fail_to_plan),
    "forward": injected("forward", lambda patch: into_forward(patch, lambda run: fail)),
    "backward": injected("backward", lambda patch: into_backward(patch, lambda run: fail)),
    "later plan": injected("plan", fail_to_plan_later, first=1),
}  # fmt: skip

DEVICE, DATA = ORTModuleDeviceException, ORTModuleIOError
TORCH, ONNX = ORTModuleTorchModelException, ORTModuleONNXModelException
ALLOWED = {
    "FALLBACK_DISABLE": (),
    "FALLBACK_FORCE_TORCH_FORWARD": (DEVICE, DATA, TORCH, ONNX),
    "FALLBACK_FORCE_TORCH_BACKWARD": (DEVICE, DATA, TORCH, ONNX),
    "FALLBACK_UNSUPPORTED_DEVICE": (DEVICE,),
    "FALLBACK_UNSUPPORTED_DATA": (DATA,),
    "FALLBACK_UNSUPPORTED_TORCH_MODEL": (TORCH,),
    "FALLBACK_UNSUPPORTED_ONNX_MODEL": (ONNX,),
    "FALLBACK_BAD_INITIALIZATION": (TORCH, ORTModuleInitException),
    None: (DEVICE, DATA, TORCH, ONNX),  # the variable is not set
}
PAIRS = list(itertools.product(ALLOWED, CAUSES))
FALLING = [(p, c) for p, c in PAIRS if CAUSES[c].kind in ALLOWED[p]]
RETRIED = [(p, c) for p, c in FALLING if c != "torch model"]
RAISING = [(p, c) for p, c in PAIRS if CAUSES[c].kind not in ALLOWED[p]]


def known(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason)


def parameters(pairs: list[tuple], whole: str | None = None) -> list:
    """Give parameters of (policy, cause): all causes for one policy, one of each kind for others.

    What a policy allows depends on the kind alone; all that is left is slow.
    """
    chosen = {
        (policy, names[turn % len(names)])
        for turn, policy in enumerate(ALLOWED)
        for kind in (DEVICE, DATA, TORCH, ONNX)
        if (names := [c for p, c in pairs if p == policy and CAUSES[c].kind is kind])
    }
    return [
        pytest.param(
            policy, cause, id=f"{policy or 'default'}-{cause}",
            marks=[] if policy == whole or (policy, cause) in chosen else [pytest.mark.slow],
        )
        for policy, cause in pairs
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    for name in ("POLICY", "RETRY"):
        monkeypatch.delenv(f"ORTMODULE_FALLBACK_{name}", raising=False)


@pytest.fixture
def choose(monkeypatch):
    """Return a function that puts a policy into the environment."""

    def set_policy(policy: str | None, retry: bool = False) -> None:
        if policy is not None:
            monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
        monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", str(int(retry)))

    return set_policy


def batch(step: int) -> torch.Tensor:
    # Sizes differ from step to step, so that each step needs a plan.
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5 + step, 6, generator=generator)


def train(module: nn.Module, call: Callable, extra: tuple = ()) -> list:
    """Train by plain gradient descent; give outputs, losses and gradients of all steps."""
    torch.manual_seed(1)
    seen: list = []
    for step in range(STEPS):
        output = call(batch(step), *extra)
        loss = output.square().mean()
        module.zero_grad()
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        seen.append((output.detach(), loss.detach(), copy.deepcopy(gradients)))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in gradients:
                    parameter -= 0.1 * parameter.grad
    return seen


def state_of(module: nn.Module) -> dict:
    tensors = {k: v for k, v in module.state_dict().items() if v.device.type != "meta"}
    return copy.deepcopy({**tensors, "calls": getattr(module, "calls", None)})


def train_both(cause: Cause, patch: pytest.MonkeyPatch, steps: Callable = train) -> list[str]:
    """Train in eager and as ORTModule, compare; give what the FallbackWarnings say."""
    module = cause.make()
    expected = copy.deepcopy(module)
    want = steps(expected, expected, cause.extra)
    cause.inject(patch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = steps(module, ORTModule(module), cause.extra)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state_of(module), state_of(expected))
    return [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]


IN_PARTS = "those parts of the module that can be captured run in the engine, the rest"


def assert_said(
    messages: list[str], cause: Cause, retry: bool, count: int, policy: str | None = None
) -> None:  # fmt: skip
    in_parts = cause.has_parts and not retry and "FORCE" not in (policy or "")
    assert len(messages) == count
    for message in messages:
        assert cause.words in message
        if cause.stage == "backward":  # of one graph, not of the module
            assert message.startswith(f"torch_ort: backward: {REASON}")
            assert "; this graph runs in eager PyTorch" in message
        else:
            until = "this call runs" if retry else "the module runs from now on"
            until = IN_PARTS if in_parts else until
            assert message.startswith(f"ORTModule: {cause.kind.__name__}: ")
            assert f"; {until} in plain PyTorch (set ORTMODULE_FALLBACK_POLICY=" in message
    assert torch_ort.counters()["fallbacks"] == count
    assert torch_ort.counters()[f"fallbacks_{cause.stage}"] == count


class TestFallsBack:
    @pytest.mark.parametrize(("policy", "name"), parameters(FALLING))
    def test_for_good(self, policy, name, choose, monkeypatch):
        choose(policy)
        messages = train_both(CAUSES[name], monkeypatch)
        assert_said(messages, CAUSES[name], retry=False, count=1, policy=policy)

    # A DataParallel has failed before the first call. What a policy allows does not depend on
    # retries, so the default one stands for all unless there is time.
    @pytest.mark.parametrize(
        ("policy", "name"),
        [
            *parameters([pair for pair in RETRIED if not pair[0]]),
            *(
                pytest.param(*pair, id="-".join(pair), marks=pytest.mark.slow)
                for pair in RETRIED
                if pair[0]
            ),
        ],
    )
    def test_at_every_call(self, policy, name, choose, monkeypatch):
        choose(policy, retry=True)
        messages = train_both(CAUSES[name], monkeypatch)
        assert_said(messages, CAUSES[name], retry=True, count=STEPS - CAUSES[name].first)


class TestRaises:
    def check(self, name: str, patch: pytest.MonkeyPatch) -> None:
        cause = CAUSES[name]
        module = cause.make()
        before = state_of(module)
        cause.inject(patch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            with pytest.raises(Exception, match=cause.words) as caught:
                train(module, ORTModule(module), cause.extra)
        if name == "backward":  # no call of the module's, so autograd passes on the engine's own
            assert type(caught.value) is _C.InternalError
        else:
            assert type(caught.value) is cause.kind
        if cause.cause is None or name == "backward":
            assert caught.value.__cause__ is None
        else:
            assert isinstance(caught.value.__cause__, cause.cause)
        assert torch_ort.counters()["fallbacks"] == 0
        if cause.stage not in ("backward", "plan"):  # nothing has run
            torch.testing.assert_close(state_of(module), before)

    @pytest.mark.parametrize("retry", [False, True], ids=["for good", "every call"])
    @pytest.mark.parametrize(("policy", "name"), parameters(RAISING, "FALLBACK_DISABLE"))
    def test_where_the_policy_forbids(self, policy, name, retry, choose, monkeypatch):
        choose(policy, retry)
        self.check(name, monkeypatch)

    @pytest.mark.parametrize(("policy", "name"), parameters(FALLING))
    def test_where_strict(self, policy, name, choose, monkeypatch):
        choose(policy)
        monkeypatch.setenv("TORCH_ORT_STRICT", "1")
        self.check(name, monkeypatch)


@pytest.mark.parametrize(
    ("policy", "environment"), [(None, "1"), ("FALLBACK_DISABLE", "0")], ids=["strict", "disabled"]
)
def test_a_failing_backward_may_raise(policy, environment, choose, monkeypatch):
    choose(policy)
    monkeypatch.setenv("TORCH_ORT_STRICT", environment)
    module = Network()
    wrapped = ORTModule(module)
    CAUSES["backward"].inject(monkeypatch)
    loss = wrapped(batch(0)).sum()
    with pytest.raises(Exception, match=REASON):
        loss.backward()
    assert torch_ort.counters()["fallbacks"] == 0
    assert all(parameter.grad is None for parameter in module.parameters())


def with_retries(names: Iterable[str]) -> list:
    """Give parameters of (cause, retry); slow are those that capture at every call, several times.

    TestFallsBack has them in training.
    """
    captured_anew = {"assigned attribute", "capture", "convert", "pass", "plan"}
    return [
        pytest.param(
            name, retry, id=f"{name}-{'every call' if retry else 'for good'}",
            marks=[pytest.mark.slow] if retry and name in captured_anew else [],
        )
        for name in names
        for retry in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "retry"), with_retries(CAUSES))
def test_gradients_accumulate_over_calls_that_overlap(name, retry, choose, monkeypatch):
    def two_calls(module, call, extra):
        torch.manual_seed(1)
        outputs = [call(batch(step), *extra) for step in range(2)]
        sum(output.square().mean() for output in outputs).backward()
        return [p.grad for p in module.parameters() if p.device.type != "meta"]

    choose(None, retry)
    assert train_both(CAUSES[name], monkeypatch, two_calls)


@pytest.mark.parametrize(
    ("name", "retry"), with_retries(n for n in CAUSES if n not in ("backward", "torch model"))
)
def test_inference_falls_back_too(name, retry, choose, monkeypatch):
    def evaluate(module, call, extra):
        module.eval()
        with torch.no_grad():
            return [call(batch(step), *extra) for step in range(STEPS)]

    choose(None, retry)
    if name == "capture":
        monkeypatch.setattr(GraphCompiler, "compile_inference", unsupported)
    messages = train_both(CAUSES[name], monkeypatch, evaluate)
    assert_said(messages, CAUSES[name], retry, STEPS - CAUSES[name].first if retry else 1)


def test_a_replaced_tensor_is_no_cause(monkeypatch):
    """A graph gives the new tensor back, and it hangs where forward hung it."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    cause = Cause(ORTModuleONNXModelException, "", make=Replaces)
    assert train_both(cause, monkeypatch) == []
    assert torch_ort.counters()["backward_runs"] == STEPS


class TestDataParallel:
    def wrap(self) -> tuple[nn.Module, ORTModule]:
        module = nn.DataParallel(Network())
        with pytest.warns(FallbackWarning, match="ORTModuleTorchModelException: .*DataParallel"):
            return module, ORTModule(module)

    @pytest.mark.parametrize("retry", [False, True], ids=["for good", "every call"])
    @pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
    def test_stays_in_pytorch(self, retry, choose):
        choose(None, retry)
        module, wrapped = self.wrap()
        expected = copy.deepcopy(module)
        torch.testing.assert_close(train(module, wrapped), train(expected, expected))
        assert torch_ort.counters()["graphs_captured"] == 0
        assert torch_ort.counters()["forward_runs"] == 0

    @pytest.mark.parametrize("policy", [p for p in ALLOWED if TORCH not in ALLOWED[p]])
    def test_raises_when_made(self, policy, choose):
        choose(policy)
        with pytest.raises(ORTModuleTorchModelException, match=r"use .*DistributedDataParallel"):
            ORTModule(nn.DataParallel(Network()))

    def test_an_ortmodule_in_one_raises(self):
        with pytest.raises(TORCH, match=r"not compatible with torch\.nn\.DataParallel") as caught:
            ORTModule(Network())._replicate_for_data_parallel()
        assert isinstance(caught.value.__cause__, NotImplementedError)


@pytest.mark.parametrize("name", ["device", "data", "control flow", "forward", "later plan"])
def test_the_warning_names_the_line_of_the_call(name, monkeypatch):
    cause = CAUSES[name]
    wrapped = ORTModule(cause.make())
    cause.inject(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            wrapped(batch(step), *cause.extra)
    assert [w.filename for w in caught if w.category is FallbackWarning] == [__file__]


class TestRetry:
    def test_the_engine_serves_calls_that_it_can(self, choose):
        """With retry, a failing call says nothing about the next one."""
        choose(None, retry=True)
        module = TakesSet()
        wrapped = ORTModule(module.eval())
        with pytest.warns(FallbackWarning, match="scales: got set"):
            wrapped(batch(0), {1.0, 2.0})
        result = wrapped(batch(0), [1.0, 2.0])
        torch.testing.assert_close(result, module(batch(0), [1.0, 2.0]))
        assert torch_ort.counters()["forward_runs"] == 1
        assert torch_ort.counters()["fallbacks"] == 1

    def test_without_it_no_call_is_served(self):
        module = TakesSet()
        wrapped = ORTModule(module.eval())
        with pytest.warns(FallbackWarning, match="scales: got set"):
            wrapped(batch(0), {1.0, 2.0})
        wrapped(batch(0), [1.0, 2.0])
        assert torch_ort.counters()["forward_runs"] == 0
        assert torch_ort.counters()["fallbacks"] == 1

    @pytest.mark.parametrize("stage", ["capture", "pass", "plan", "forward", "backward"])
    def test_the_engine_comes_back(self, stage, choose, monkeypatch):
        choose(None, retry=True)
        module = Network()
        wrapped = ORTModule(module)
        with monkeypatch.context() as patch:
            CAUSES[stage].inject(patch)
            with pytest.warns(FallbackWarning, match=REASON):
                wrapped(batch(0)).sum().backward()
        expected = copy.deepcopy(module)
        torch_ort.reset_counters()
        torch.testing.assert_close(train(module, wrapped), train(expected, expected))
        assert torch_ort.counters()["backward_runs"] == STEPS
        assert torch_ort.counters()["fallbacks"] == 0

    def test_recapture_tries_again(self, monkeypatch):
        wrapped = ORTModule(Network())
        with monkeypatch.context() as patch:
            CAUSES["forward"].inject(patch)
            with pytest.warns(FallbackWarning, match=REASON):
                wrapped(batch(0))
        wrapped.recapture()
        wrapped(batch(0))
        assert torch_ort.counters()["forward_runs"] == 1


class TestGivenByName:
    def wrap(self, **config) -> ORTModule:
        return ORTModule(TakesSet(), DebugOptions(config=config))

    @pytest.mark.parametrize(
        "policy",
        [
            FallbackPolicy.FALLBACK_UNSUPPORTED_DATA,
            "FALLBACK_UNSUPPORTED_DATA",
            ["FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_DATA"],
        ],
        ids=["member", "name", "list"],
    )
    def test_one_that_allows(self, policy):
        with pytest.warns(FallbackWarning, match="ORTModuleIOError: scales: got set"):
            self.wrap(fallback_policy=policy)(batch(0), {1.0})

    @pytest.mark.parametrize(
        "policy",
        [
            FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE,
            "FALLBACK_DISABLE",
            # To disable wins over whatever stands beside it.
            ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"],
        ],
        ids=["member", "name", "list"],
    )
    def test_one_that_forbids(self, policy):
        with pytest.raises(ORTModuleIOError, match="scales: got set"):
            self.wrap(fallback_policy=policy)(batch(0), {1.0})

    def test_retry(self):
        wrapped = self.wrap(fallback_retry=True)
        for _ in range(2):
            with pytest.warns(FallbackWarning, match="; this call runs in plain PyTorch"):
                wrapped(batch(0), {1.0})
        assert torch_ort.counters()["fallbacks"] == 2


class Picky(Network):
    def forward(self, x):
        if x.shape[1] != 6:
            raise ValueError(f"want 6 columns, got {x.shape[1]}")
        return self.body(x)


class TestErrorOfForward:
    """What the user's own forward raises belongs to the user."""

    @pytest.mark.parametrize("policy", [p for p in ALLOWED if ONNX in ALLOWED[p]])
    @pytest.mark.parametrize("retry", [False, True], ids=["for good", "every call"])
    def test_comes_through_unchanged(self, policy, retry, choose):
        choose(policy, retry)
        wrapped = ORTModule(Picky())
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"^want 6 columns, got 4$") as caught:
                    wrapped(torch.randn(5, 4))
                assert type(caught.value) is ValueError
        assert torch_ort.counters()["fallbacks"] == 0

    @pytest.mark.parametrize("bad_first", [True, False], ids=["first call", "later call"])
    def test_does_not_make_the_module_fall_back(self, bad_first):
        module = Picky().eval()
        wrapped = ORTModule(module)
        if not bad_first:
            wrapped(batch(0))
        with pytest.raises(ValueError, match="want 6 columns, got 4"):
            wrapped(torch.randn(5, 4))
        torch_ort.reset_counters()
        torch.testing.assert_close(wrapped(batch(1)), module(batch(1)))
        assert torch_ort.counters()["forward_runs"] == 1
        assert torch_ort.counters()["fallbacks"] == 0

    @pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA"])
    def test_where_the_policy_forbids_it_is_in_the_chain(self, policy, choose):
        choose(policy)
        with pytest.raises(ORTModuleONNXModelException, match="want 6 columns, got ") as caught:
            ORTModule(Picky())(torch.randn(5, 4))
        error: BaseException | None = caught.value
        while error is not None and type(error) is not ValueError:
            error = error.__cause__
        # A number of columns that is a symbol at that time.
        assert str(error).startswith("want 6 columns, got ")

    def test_of_a_kernel(self):
        table = nn.Embedding(4, 3)
        wrapped = ORTModule(table)
        with pytest.raises(IndexError, match="out of range"):
            wrapped(torch.tensor([7]))
        assert torch_ort.counters()["fallbacks"] == 0
        torch.testing.assert_close(wrapped(torch.tensor([1])), table(torch.tensor([1])))
        assert torch_ort.counters()["forward_runs"] > 0


@pytest.mark.parametrize(
    ("policy", "value"),
    [
        ("FALLBACK_DISABLE", 1),
        ("FALLBACK_FORCE_TORCH_FORWARD", 2),
        ("FALLBACK_FORCE_TORCH_BACKWARD", 4),
        ("FALLBACK_UNSUPPORTED_DEVICE", 8),
        ("FALLBACK_UNSUPPORTED_DATA", 16),
        ("FALLBACK_UNSUPPORTED_TORCH_MODEL", 32),
        ("FALLBACK_UNSUPPORTED_ONNX_MODEL", 64),
        ("FALLBACK_BAD_INITIALIZATION", 128),
    ],
)
def test_bits(policy, value):
    assert FallbackPolicy[policy] == value
    assert len(FallbackPolicy) == 8


@pytest.mark.parametrize("policy", ALLOWED)
def test_what_is_no_module_always_raises(policy, choose):
    choose(policy)
    with pytest.raises(ORTModuleTorchModelException, match=r"only supports .*, got int") as caught:
        ORTModule(3)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_failure_matches_by_its_exact_class():
    class Special(ORTModuleIOError):
        pass

    policy = FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    assert policy.allows(ORTModuleIOError)
    assert not policy.allows(Special)
    assert not policy.allows(ValueError)
