# An ORTModule that cannot be captured whole: its largest parts run in the engine, and numbers,
# errors, copies and hooks are eager's.
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ort
from tests.injection import into_backward, into_forward
from torch_ort import _C, DebugOptions, ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import HierarchicalORTModule

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("modules branch on data")]

REASON = "injected by a test"


@pytest.fixture(autouse=True)
def may_fall_back(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


class Branches(nn.Module):
    """Branches on a number between two parts, of which each can be captured."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), *inner, nn.Tanh(), nn.Linear(8, 6))
        self.last = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x):
        y = self.first(x)
        return self.last(y * 2 if y.sum() > 0 else y * 3)


class Outer(nn.Module):
    """Branches too, around a module that does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        y = self.inner(x)
        return self.head(y if y.sum() > 0 else -y)


def pair(
    make: Callable[[], nn.Module] = Branches, kind: type[ORTModule] = ORTModule
) -> tuple[nn.Module, ORTModule]:
    torch.manual_seed(0)
    eager = make()
    return eager, kind(copy.deepcopy(eager))


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(5 + step, 6, generator=torch.Generator().manual_seed(step))


def train(module: nn.Module, steps: Sequence[int] = range(4)) -> list[torch.Tensor]:
    """Train a module; give its outputs, gradients and buffers."""
    seen = []
    for step in steps:
        torch.manual_seed(step)
        module.zero_grad()
        y = module(rows(step))
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in module.parameters())]
        seen += [buffer.clone() for buffer in module.buffers()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
    return seen


def in_parts(make: Callable[[], nn.Module] = Branches) -> tuple[nn.Module, ORTModule]:
    """Give a module, and an ORTModule whose parts run in the engine."""
    eager, module = pair(make)
    with pytest.warns(FallbackWarning, match="those parts of the module that can be captured"):
        train(module, range(2))
    train(eager, range(2))
    torch_ort.reset_counters()
    return eager, module


def assert_in_engine(runs: int) -> None:
    counters = torch_ort.counters()
    assert (counters["forward_runs"], counters["fallbacks"]) == (runs, 0)


MODULES = {
    "plain": Branches,
    "dropout": lambda: Branches(nn.Dropout(0.3)),
    "batch norm": lambda: Branches(nn.BatchNorm1d(8)),
    "nested": Outer,
}


@pytest.mark.parametrize("name", MODULES)
def test_trains_like_eager(name):
    eager, module = pair(MODULES[name])
    with pytest.warns(FallbackWarning) as caught:
        got = train(module)
    torch.testing.assert_close(got, train(eager))
    (said,) = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert "data-dependent: Python asks for a number in a tensor" in said
    assert "; those parts of the module that can be captured run in the engine, the rest in" in said
    counters = torch_ort.counters()
    runs = 3 * (3 if name == "nested" else 2)  # the first step shows what backward is like
    assert (counters["forward_runs"], counters["backward_runs"]) == (runs, runs)
    assert counters["fallbacks"] == 1


@pytest.mark.parametrize("kind", [ORTModule, HierarchicalORTModule])
@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_calls_before_and_after_may_share_a_backward(kind):
    """The batch norms of PyTorch save their running statistics, which the engine writes next."""

    def overlap(module: nn.Module) -> list[torch.Tensor]:
        losses = [module(rows(step)).square().mean() for step in range(2)]
        losses[0].backward()
        losses.append(module(rows(2)).square().mean())
        sum(losses[1:]).backward()
        return [*(p.grad for p in module.parameters()), *module.buffers()]

    eager, module = pair(lambda: Branches(nn.BatchNorm1d(8)), kind)
    torch.testing.assert_close(overlap(module), overlap(eager))
    assert torch_ort.counters()["forward_runs"] == 0
    torch.testing.assert_close(train(module), train(eager))
    assert torch_ort.counters()["backward_runs"] >= 8


@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_a_call_without_a_backward_keeps_nothing_back():
    eager, module = pair()
    for each in (eager, module):
        train(each, range(1))
        each(rows())
    torch.testing.assert_close(train(module), train(eager))
    assert torch_ort.counters()["forward_runs"] == 10


def test_evaluation_needs_no_backward():
    eager, module = pair()
    eager.eval()
    module.eval()
    with torch.no_grad():
        want = [eager(rows(step)) for step in range(3)]
        with pytest.warns(FallbackWarning, match="those parts"):
            got = [module(rows(step)) for step in range(3)]
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["forward_runs"] == 4


@pytest.mark.parametrize("inner", [(), (nn.Dropout(0.3),)], ids=["plain", "dropout"])
@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_gradients_of_gradients_are_eagers(inner):
    def penalize(module: nn.Module) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            torch.manual_seed(step)
            x = rows(step).requires_grad_()
            (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            module.zero_grad()
            slope.square().sum().backward()
            # Of the last bias a second gradient is None.
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return seen

    eager, module = pair(lambda: Branches(*inner))
    torch.testing.assert_close(penalize(module), penalize(eager))
    assert torch_ort.counters()["forward_runs"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_checkpointed_parts_run_again_as_they_ran(use_reentrant):
    class Checkpointed(Branches):
        def forward(self, x):
            y = checkpoint(self.first, x.requires_grad_(), use_reentrant=use_reentrant)
            return self.last(y * 2 if y.sum() > 0 else y * 3)

    eager, module = pair(Checkpointed)
    torch.testing.assert_close(train(module), train(eager))
    assert torch_ort.counters()["backward_runs"] > 0


@pytest.mark.parametrize("into", [into_forward, into_backward])
def test_a_part_that_fails_at_first_runs_in_pytorch(into, monkeypatch):
    def fail(*_args, **_kwargs):
        raise _C.InternalError(REASON)

    eager, module = pair(lambda: Branches(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got = train(module, range(1))
    with monkeypatch.context() as patch:
        into(patch, lambda run: fail)
        with pytest.warns(FallbackWarning, match=REASON) as caught:
            got += train(module, range(1, 4))
    torch.testing.assert_close(got, train(eager))
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(said) == 2  # one of each part
    if into is into_forward:
        for message in said:
            assert "; a part of the module, Sequential, runs from now on in plain" in message


def test_an_error_of_the_users_leaves_parts_usable():
    eager, module = in_parts()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            module(torch.randn(5, 7))
    torch.testing.assert_close(train(module), train(eager))
    assert_in_engine(8)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_copies(duplicate, is_wrapped):
    eager, module = in_parts()
    copied = duplicate(module if is_wrapped else module.module)
    assert b"torch_ort" not in pickle.dumps(module.module)
    torch.testing.assert_close(train(copied), train(eager))
    assert torch_ort.counters()["forward_runs"] == (6 if is_wrapped else 0)


def test_a_copy_keeps_a_forward_of_the_instance():
    _, module = pair()
    module.module.first.forward = nn.Linear(6, 6).forward
    with pytest.warns(FallbackWarning):
        module(rows())
    copied = copy.deepcopy(module.module)
    torch.testing.assert_close(copied(rows()), module.module(rows()))


def test_the_wrapped_module_serves_by_itself():
    eager, module = in_parts()
    assert [*module.state_dict()] == [*eager.state_dict()]
    part, original = module.module.first, eager.first
    assert inspect.signature(part.forward) == inspect.signature(original.forward)
    assert part.forward.__func__ is type(part).forward
    torch.testing.assert_close(train(module.module), train(eager))
    assert_in_engine(8)


def test_traces_of_others_see_the_modules_own_forward():
    eager, module = in_parts()
    x, parameters = rows(), dict(eager.named_parameters())
    exported = torch.export.export(module.module.first, (x,)).module()
    torch.testing.assert_close(exported(x), eager.first(x))
    traced = torch.jit.trace(module.module, x, check_trace=False)
    torch.testing.assert_close(traced(x), eager(x))
    called = torch.func.functional_call(module.module, parameters, (x,))
    torch.testing.assert_close(called, eager(x))


@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_recapture_puts_the_module_together_again():
    eager, module = in_parts()
    module.recapture()
    assert all("forward" not in vars(part) for part in module.module.modules())
    torch.testing.assert_close(train(module), train(eager))
    assert torch_ort.counters()["forward_runs"] == 6


@pytest.mark.filterwarnings("ignore::torch_ort.fallback.FallbackWarning")
def test_scripts_need_the_modules_own_forward():
    eager, module = in_parts()
    words = "forward of Sequential is one that runs it in the engine.*recapture.* puts the module's"
    with pytest.raises(AttributeError, match=words):
        torch.jit.script(module.module.first)
    module.recapture()
    scripted = torch.jit.script(module.module.first)
    torch.testing.assert_close(scripted(rows()), eager.first(rows()))


def test_hooks_of_parts_are_called():
    eager, module = in_parts()
    seen: dict[nn.Module, list[torch.Tensor]] = {}
    for root in (eager, module.module):
        seen[root] = kept = []
        for part in (root.last, root.last[0]):
            part.register_forward_hook(lambda part, args, y, kept=kept: kept.append(y.detach()))
        root.last.register_full_backward_hook(lambda part, gi, go, kept=kept: kept.append(go[0]))
    torch.testing.assert_close(train(module), train(eager))
    assert len(seen[eager]) == 12
    torch.testing.assert_close(seen[module.module], seen[eager])


@pytest.fixture
def sharding_hook():
    """Return a hook that counts, and passes for one of fully_shard's."""

    def gather(part, args):
        gather.calls += 1

    gather.calls = 0
    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    return gather


@pytest.mark.parametrize("kind", [ORTModule, HierarchicalORTModule])
def test_parts_that_are_sharded_run_in_the_engine(kind, sharding_hook):
    """Their hooks run around them at each call."""
    eager, module = pair(lambda: nn.Sequential(Branches().first, Branches().last), kind)
    module.module[1].register_forward_pre_hook(sharding_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train(module)
    torch.testing.assert_close(got, train(eager))
    assert sharding_hook.calls == 4
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(said) == (1 if kind is ORTModule else 0)
    for words in said:
        assert "module '1' has a forward hook, 'gather' of fully_shard, which takes an" in words
        assert "; those parts of the module that can be captured run in the engine" in words
    assert torch_ort.counters()["forward_runs"] == 2 * 3


def test_hooks_of_others_are_told_of_before_those_of_shards(sharding_hook):
    """They may be taken off again; until then calls run in PyTorch as a whole."""
    _, module = pair(lambda: nn.Sequential(Branches().first, Branches().last))
    module.module[0].register_forward_pre_hook(sharding_hook)
    seen = []
    handle = module.module[1].register_forward_hook(lambda part, args, y: seen.append(y.detach()))
    with pytest.warns(FallbackWarning, match="module '1' has a forward hook, '<lambda>'.*calls w"):
        train(module, range(2))
    assert len(seen) == 2
    handle.remove()
    with pytest.warns(FallbackWarning, match="'gather' of fully_shard.*those parts of the module"):
        train(module, range(2))
    assert torch_ort.counters()["forward_runs"] == 2


def test_parts_that_are_ortmodules_take_themselves_apart():
    torch.manual_seed(0)
    eager = Outer()
    inner = copy.deepcopy(eager)
    inner.inner = ORTModule(inner.inner)
    module = ORTModule(inner)
    with pytest.warns(FallbackWarning) as caught:
        got = train(module)
    torch.testing.assert_close(got, train(eager))
    assert len([w for w in caught if w.category is FallbackWarning]) == 2
    assert torch_ort.counters()["forward_runs"] == 9
    assert "forward" not in vars(inner.inner.module)


class TakesSet(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x, scales):
        return self.body(x) * max(scales)


def test_a_module_with_an_unknown_argument_runs_in_parts():
    module = ORTModule(TakesSet(nn.Sequential(nn.Linear(6, 6), nn.ReLU())))
    with pytest.warns(FallbackWarning, match="scales: got set.*; those parts of the module that"):
        module(rows(), {1.0}).sum().backward()
    for _ in range(2):
        module(rows(), {1.0}).sum().backward()
    assert torch_ort.counters()["forward_runs"] == 2


@pytest.mark.parametrize("body", [nn.Linear(6, 6), Outer()])
def test_small_and_foreign_failures_stay_whole(body):
    """What other modules would refuse as well does not take one apart."""
    module = TakesSet(body)
    is_small = isinstance(body, nn.Linear)
    if not is_small:
        module.register_parameter("spare", nn.Parameter(torch.empty(3, device="meta")))
    words = "scales: got set" if is_small else "on several devices"
    module = ORTModule(module)
    with pytest.warns(FallbackWarning, match=f"{words}.*; the module runs from now on in"):
        module(rows(), {1.0} if is_small else [1.0])
    assert all("forward" not in vars(part) for part in module.module.modules())


def test_a_module_in_parts_can_be_freed():
    _, module = in_parts()
    alive = weakref.ref(module.module)
    del module
    gc.collect()
    assert alive() is None


def test_parts_write_files_of_their_own(tmp_path):
    options = DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path))
    module = ORTModule(Branches(), options)
    with pytest.warns(FallbackWarning):
        train(module, range(2))
    for name in ("first", "last"):
        assert (tmp_path / f"m_{name}_execution_model_training.onnx").exists()
