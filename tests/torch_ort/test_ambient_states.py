"""States of PyTorch around a program: whose each is, and that numbers are those of eager PyTorch.

Each test trains in eager PyTorch and through the engine, in the same states of forward and of
backward. The table of states is in docs/states.md.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ort
from tests.roads import ROADS
from torch_ort import DebugOptions, ORTModule
from torch_ort.fallback import FallbackWarning

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("takes both roads by itself")]

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
EAGERS_BITS = {"enable_compute_optimizer": False}
WITH_EAGERS_BITS: dict[str, Callable] = {
    "compile": lambda module: torch.compile(module, backend="ort", options=EAGERS_BITS),
    "ortmodule": lambda module: ORTModule(module, DebugOptions(config=EAGERS_BITS)),
}


def autocast(dtype: torch.dtype | None, **settings: bool) -> contextlib.AbstractContextManager:
    """Give autocast to a dtype; None: off."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None, **settings)


class Block(nn.Module):
    """What autocast lowers, keeps and widens, with a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.norm(self.first(x))))
        return x + self.first(x).sigmoid()


class Mixed(nn.Module):
    """A block in full precision between blocks under the autocast around the module."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.exact, self.after = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        return self.after(x)


class AllExact(nn.Module):
    """A block in full precision alone, whose numbers therefore are those of eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.exact(x)


class Lowered(nn.Module):
    """A block under autocast of its own in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.low, self.after = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with torch.autocast("cpu", BFLOAT16):
            x = self.low(x)
        return self.after(x.float())


class Dropping(nn.Module):
    """A mixed block that draws random numbers and writes into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return self.last(x)


class TimesWeight(torch.autograd.Function):
    """A product with products in its backward, which run in the state of the caller."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.to(x.dtype) @ weight.to(x.dtype).t(), x.t() @ gradient.to(x.dtype)


class WithFunction(nn.Module):
    """A block with a torch.autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = TimesWeight.apply(torch.tanh(x.float()), self.weight)
        return self.first(x)


MODELS = [Block, Mixed, AllExact, Lowered, Dropping]


class Run:
    """Three steps of Adam in some states; losses, gradients and parameters of all."""

    def __init__(
        self, model: nn.Module, call: Callable, forward: Callable, backward: Callable,
        scale: float = 1.0, steps: int = 3,
    ) -> None:  # fmt: skip
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        self.found: list[Tensor] = []
        for _ in range(steps):
            x = torch.randn(6, 8)
            with forward():
                loss = call(x).float().square().mean()
            scaled = loss * scale
            with backward():
                scaled.backward()
            self.found.append(loss.detach())
            for parameter in model.parameters():
                parameter.grad = parameter.grad / scale
                self.found.append(parameter.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        self.found += [value.detach().clone() for value in model.state_dict().values()]


def compare(
    make: Callable[[], nn.Module], wrap: Callable, forward: Callable, backward: Callable,
    is_exact: bool, **settings: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    want = Run(model, model, forward, backward, **settings).found
    got = Run(other, wrap(other), forward, backward, **settings).found
    assert len(want) == len(got)
    for one, two in zip(got, want, strict=True):
        assert torch.isfinite(two).all()
        if is_exact:
            assert torch.equal(one, two)
        else:
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# What forward runs under, and backward.
STATES = {
    "off": (None, None),
    "forward": (BFLOAT16, None),
    "both": (BFLOAT16, BFLOAT16),
    "float16": (FLOAT16, None),
    "both float16": (FLOAT16, FLOAT16),
}
# No graph is recorded for these: eager PyTorch runs such a step, and says so.
UNFORESEEN = {"backward": (None, BFLOAT16), "another": (BFLOAT16, FLOAT16)}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_autocast_gives_eagers_bits(road, make, state):
    around, inside = (lambda dtype=dtype: autocast(dtype) for dtype in STATES[state])
    scale = 2.0**10 if state == "float16" else 1.0
    compare(make, WITH_EAGERS_BITS[road], around, inside, is_exact=True, scale=scale)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["recordings_handed_over"] == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("road", ROADS)
def test_what_autocast_leaves_in_full_precision_is_exact(road, state):
    around, inside = (lambda dtype=dtype: autocast(dtype) for dtype in STATES[state])
    is_lowered = state.startswith("both")  # backward rounds where eager's does, and adds elsewhere
    torch.manual_seed(0)
    compare(
        AllExact, WITH_EAGERS_BITS[road] if is_lowered else ROADS[road], around, inside,
        is_exact=is_lowered,
    )  # fmt: skip


@pytest.mark.parametrize("state", UNFORESEEN)
@pytest.mark.parametrize("make", [Mixed, Dropping])
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_a_state_that_no_graph_is_recorded_for_is_eagers(road, make, state, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    around, inside = (lambda dtype=dtype: autocast(dtype) for dtype in UNFORESEEN[state])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(make, WITH_EAGERS_BITS[road], around, inside, is_exact=True)
    told = [str(each.message) for each in caught if each.category is FallbackWarning]
    assert len(told) == 1
    name = UNFORESEEN[state][1]
    assert f"backward() is called under {name} on cpu, for which its graph was not" in told[0]
    assert torch_ort.counters()["fallbacks_backward"] == 1


@pytest.mark.parametrize("road", ROADS)
def test_strict_raises_for_a_state_that_no_graph_is_recorded_for(road):
    model = Mixed()
    loss = ROADS[road](model)(torch.randn(6, 8)).sum()
    with (
        autocast(BFLOAT16),
        pytest.raises(torch_ort.Unsupported, match=r"called under torch\.bfloat16 on cpu"),
    ):
        loss.backward()


# Random numbers of the first step alone can be drawn again.
ALTERNATING = [(Mixed, (None, BFLOAT16, None)), (Dropping, (BFLOAT16, BFLOAT16, BFLOAT16))]


@pytest.mark.parametrize(("make", "pattern"), ALTERNATING)
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_states_of_backward_that_alternate(road, make, pattern):
    """The first step is run again from what is kept of it, later ones from their inputs."""
    states = itertools.cycle(pattern)
    compare(
        make, WITH_EAGERS_BITS[road], lambda: autocast(BFLOAT16), lambda: autocast(next(states)),
        is_exact=True,
    )  # fmt: skip
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ROADS)
def test_a_call_that_cannot_run_again_is_refused_and_the_next_one_runs(road):
    torch.manual_seed(0)
    model = Dropping()
    call = ROADS[road](model)

    def step(inside):
        with autocast(BFLOAT16):
            loss = call(torch.randn(6, 8)).float().sum()
        with autocast(inside):
            loss.backward()

    step(None)
    with pytest.raises(torch_ort.Unsupported, match=r"draws random numbers.*run the step again"):
        step(BFLOAT16)
    step(BFLOAT16)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("inside", [None, BFLOAT16])
def test_backward_of_a_function_runs_in_the_state_of_the_caller(inside):
    compare(
        WithFunction, WITH_EAGERS_BITS["ortmodule"], lambda: autocast(BFLOAT16),
        lambda: autocast(inside), is_exact=True,
    )  # fmt: skip
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("a Function under torch.compile")
class TestCapturedByAOTAutograd:
    def test_backward_outside(self):
        around = lambda: autocast(BFLOAT16)  # noqa: E731
        compare(
            WithFunction, WITH_EAGERS_BITS["compile"], around, contextlib.nullcontext, is_exact=True
        )

    def test_backward_inside_is_refused_where_it_may_differ(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        torch.manual_seed(0)
        model = WithFunction()
        want, call = copy.deepcopy(model), ROADS["compile"](model)
        x = torch.randn(6, 8)

        def step(call):
            with autocast(BFLOAT16):
                call(x).float().square().mean().backward()

        with pytest.raises(torch_ort.Unsupported, match=r"bfloat16 on cpu.*run the step again"):
            step(call)
        step(call)  # in eager PyTorch
        step(want)
        assert torch.equal(model.weight.grad, want.weight.grad)


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_the_cache_of_autocast(road, caches):
    """With it, what two uses of a weight add to its gradient is added in the lower precision."""
    around = lambda: autocast(BFLOAT16, cache_enabled=caches)  # noqa: E731
    compare(Block, WITH_EAGERS_BITS[road], around, contextlib.nullcontext, is_exact=True)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def matmul_precision():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def flush_denormal():
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


AROUND = {
    "enable_grad": torch.enable_grad,
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "matmul precision": matmul_precision,
    "one thread": one_thread,
    "flush denormal": flush_denormal,
    "attention in words": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash attention": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.clone(), lambda saved: saved
    ),
}
AROUND_BACKWARD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Attending(nn.Module):
    """What any of these states may change: attention, products, numbers of a default dtype."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of keys has no gradient but rounding.
        self.project, self.last = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(6, 8)
        return self.last(x) * torch.full((), 1.1) + x.std() + torch.arange(8) * 0.3


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_other_states(road, where, name):
    around, inside = [
        AROUND[name] if where in (half, "both") else contextlib.nullcontext
        for half in ("forward", "backward")
    ]
    compare(Attending, WITH_EAGERS_BITS[road], around, inside, is_exact=True)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("name", AROUND_BACKWARD)
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_states_of_backward_alone(road, name):
    compare(
        Attending, WITH_EAGERS_BITS[road], contextlib.nullcontext, AROUND_BACKWARD[name],
        is_exact=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_other_states_that_alternate(road, name):
    """A graph that was captured in one state is not used in another that its numbers depend on."""
    states = itertools.cycle([contextlib.nullcontext, AROUND[name]])
    # Dynamo does not ask which kernels of attention are allowed.
    is_exact = (road, name) != ("compile", "attention in words")
    compare(
        Attending, WITH_EAGERS_BITS[road], lambda: next(states)(), contextlib.nullcontext,
        is_exact=is_exact, steps=4,
    )  # fmt: skip
    assert torch_ort.counters()["fallbacks"] == 0


class Critic(nn.Module):
    """Uses each weight once, so that nothing is added in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.second(self.first(x).tanh()).sum()


@pytest.mark.parametrize("states", itertools.product([None, BFLOAT16], repeat=3), ids=str)
@pytest.mark.parametrize("road", WITH_EAGERS_BITS)
def test_gradients_of_gradients(road, states, monkeypatch):
    """Forward, its backward, and the backward of that each run in the state of their caller."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    around, inside, second = states
    torch.manual_seed(0)
    model = Critic()
    x = torch.randn(6, 8, requires_grad=True)
    runs = []
    for wrap in (lambda module: module, WITH_EAGERS_BITS[road]):
        copied = copy.deepcopy(model)
        call = wrap(copied)
        found = []
        for _ in range(2):  # by another graph than the first one, or in eager PyTorch
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                with autocast(around):
                    loss = call(x)
                with autocast(inside):
                    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                with autocast(second):
                    gradient.norm().backward()
            found += [gradient.detach(), copied.first.weight.grad, copied.second.weight.grad]
            copied.zero_grad()
        runs.append(found)
    for got, want in zip(*runs, strict=True):
        assert torch.equal(got, want)
