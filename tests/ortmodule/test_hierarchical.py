# Modules that cannot be captured whole: which parts run in the engine, and that nothing else shows.
from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from models import module_with
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.core.policy import ORTModuleONNXModelException
from torch_ort.ortmodule import HierarchicalORTModule

pytestmark = [pytest.mark.ort_only, pytest.mark.hands_over("modules branch on data")]


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def branched(x: torch.Tensor) -> torch.Tensor:
    """Do what no graph can: decide by a number."""
    return x * 2 if x.sum() > 0 else x * 3


class Uncapturable(nn.Module):
    """Branches on numbers between its parts, of which each can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(branched(self.first(x)))


class Branches(nn.Module):
    """Has a parameter and no parts, and cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return branched(x * self.weight)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = branched(layer(x))
        return x + self.layers[1](x) + len(self.layers[1:])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = branched(layer(x)) + len(name)
        return self.layers["a"](x)


class Nested(nn.Module):
    """Lists in dicts in lists."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"x": nn.ModuleList([nn.Linear(4, 4)]), "y": nn.Linear(4, 4)})
        self.layers = nn.ModuleList([inner, nn.Linear(4, 4)])

    def forward(self, x):
        x = branched(self.layers[0]["x"][0](x))
        return self.layers[1](branched(self.layers[0]["y"](x)))


class Shared(nn.Module):
    """Calls one part under two names, and at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.again = self.one
        self.inner = nn.ModuleList([self.one])

    def forward(self, x):
        x = branched(self.one(x))
        x = branched(self.again(x))
        return self.inner[0](x)


class Deep(nn.Module):
    """Has a part that has to be taken apart in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Uncapturable()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(branched(self.inner(x)))


class Mixed(nn.Module):
    """Has a part that stays in PyTorch, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = Branches(), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.good(self.bad(x)) * self.scale


class InSequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), Branches())


class Norms(nn.Module):
    """Writes into buffers, and calls a part with inputs of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        y = branched(self.linear(self.norm(x)))
        return y + self.linear(y[0])


# How often the engine runs in a call, once the module has been taken apart.
RUNS = {
    Uncapturable: 2, Listed: 4, Named: 3, Nested: 3, Deep: 3, Mixed: 1, InSequence: 3, Norms: 3,
    Shared: 3,
}  # fmt: skip


def pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, HierarchicalORTModule]:
    torch.manual_seed(0)
    eager = kind()
    return eager, HierarchicalORTModule(copy.deepcopy(eager))


def train(module: nn.Module, steps: int) -> list[torch.Tensor]:
    """Train a module; give its outputs and gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        x = rows(step).requires_grad_()
        y = module(x)
        y.pow(2).mean().backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
    return seen


def take_apart(module: nn.Module, calls: int = 3) -> None:
    """Call a module until all its parts have been taken apart, or captured."""
    for step in range(calls):
        module(rows(step))
    torch_ort.reset_counters()


@pytest.mark.parametrize("kind", RUNS)
def test_trains_like_eager(kind):
    eager, module = pair(kind)
    torch.testing.assert_close(train(module, 4), train(eager, 4))
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("kind", RUNS)
def test_the_parts_run_in_the_engine(kind):
    _, module = pair(kind)
    take_apart(module)
    train(module, 2)
    counters = torch_ort.counters()
    runs = 2 * RUNS[kind]
    assert (counters["forward_runs"], counters["backward_runs"]) == (runs, runs)


@pytest.mark.parametrize("kind", RUNS)
def test_names_and_parameters_do_not_change(kind):
    eager, module = pair(kind)
    parameters = list(module.parameters())
    for _ in range(2):
        assert list(module.state_dict()) == list(eager.state_dict())
        for names in ("named_parameters", "named_buffers"):
            ours, theirs = getattr(module, names)(), getattr(eager, names)()
            assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        with torch.no_grad():
            take_apart(module)


@pytest.mark.parametrize("kind", [Listed, Deep, Mixed])
def test_checkpoints_go_both_ways(kind):
    eager, module = pair(kind)
    take_apart(module)
    train(eager, 2)
    assert not module.load_state_dict(eager.state_dict()).missing_keys
    torch.testing.assert_close(module(rows()), eager(rows()))
    train(module, 1)
    eager.load_state_dict(module.state_dict(), strict=True)
    torch.testing.assert_close(module(rows()), eager(rows()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    eager, module = pair(InSequence)
    take_apart(module)
    eager.load_state_dict(module.state_dict())
    module.eval()
    eager.eval()
    with mode():
        for step in range(2):
            torch.testing.assert_close(module(rows(step)), eager(rows(step)))
    assert torch_ort.counters()["forward_runs"] == 2 * RUNS[InSequence]


def test_the_first_call_runs_in_pytorch():
    eager, module = pair(Uncapturable)
    torch.testing.assert_close(module(rows()), eager(rows()), rtol=0, atol=0)
    assert torch_ort.counters()["forward_runs"] == 0


def test_what_can_be_captured_is_one_graph(graphs_captured):
    eager, module = pair(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    torch.testing.assert_close(train(module, 3), train(eager, 3))
    assert graphs_captured() == 1
    assert torch_ort.counters()["forward_runs"] == 3


def test_what_has_no_parts_stays_in_pytorch(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, module = pair(Branches)
    torch.testing.assert_close(train(module, 3), train(eager, 3))
    counters = torch_ort.counters()
    assert (counters["forward_runs"], counters["fallbacks"]) == (0, 0)


def test_parts_that_are_wrapped_already_stay_as_they_are():
    torch.manual_seed(0)
    eager = Uncapturable()
    inner = copy.deepcopy(eager)
    inner.last = last = ORTModule(inner.last)
    module = HierarchicalORTModule(inner)
    torch.testing.assert_close(train(module, 3), train(eager, 3))
    assert inner.last is last


def test_parts_keep_their_own_attributes_and_methods():
    class Scales(nn.Linear):
        factor = 2.0

        def forward(self, x):
            return super().forward(x) * self.factor

        def weights(self):
            return self.weight.sum()

    def asks(self, x):
        x = branched(self.part(x)) * self.part.weights() + self.part.in_features
        self.part.factor = float(len(x))
        return self.part(x)

    eager, module = pair(lambda: module_with(asks, part=Scales(4, 4)))
    for step in range(3):
        torch.testing.assert_close(module(rows(step)), eager(rows(step)))


def test_hooks_of_parts_are_called():
    eager, module = pair(Uncapturable)
    for each in (eager, module.module):
        each.last.register_forward_hook(lambda part, args, result: result + 1)
    for step in range(3):
        torch.testing.assert_close(module(rows(step)), eager(rows(step)))


def test_parts_run_in_the_engine_within_hooks_of_their_own():
    eager, module = pair(Uncapturable)
    seen: dict[nn.Module, list[torch.Tensor]] = {}
    for each in (eager, module.module):
        seen[each] = kept = []
        each.last.register_forward_pre_hook(lambda part, args, kept=kept: kept.append(args[0]))
        each.last.register_full_backward_hook(lambda part, gi, go, kept=kept: kept.append(gi[0]))
    for step in range(3):
        for each in (eager, module):
            each(rows(step)).square().mean().backward()
    torch.testing.assert_close(seen[module.module], seen[eager])
    assert len(seen[eager]) == 6
    # But for the first call, of which it is not known yet that there are parts.
    counters = torch_ort.counters()
    assert (counters["forward_runs"], counters["fallbacks"]) == (4, 0)


class Indexed(nn.Module):
    """Reads a Sequential as the list that it is too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.layers:
            x = branched(layer(x))
        return self.layers[0](x) + len(self.layers)


class WithParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for weight in self.weights:
            x = branched(x * weight)
        return self.linear(x) * self.weights[0]


class WithParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"a": torch.ones(4)})
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(branched(x * self.weights["a"]))


class AsksForTypes(Uncapturable):
    def forward(self, x):
        assert isinstance(self.last, nn.Linear)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Indexed, WithParameterList, WithParameterDict, AsksForTypes])
def test_parts_that_are_more_than_called(kind):
    eager, module = pair(kind)
    torch.testing.assert_close(train(module, 3), train(eager, 3))


@pytest.mark.parametrize("calls_before", [0, 3])
def test_the_users_own_error_comes_through(calls_before):
    class Raises(Uncapturable):
        def forward(self, x):
            if x.shape[0] == 1:
                raise KeyError("one row is too few")
            return super().forward(x)

    eager, module = pair(Raises)
    for step in range(calls_before):
        module(rows(step))
    with pytest.raises(KeyError, match="one row is too few"):
        module(rows()[:1])
    torch.testing.assert_close(train(module, 3), train(eager, 3))


@pytest.mark.parametrize("calls_before", [0, 3])
def test_wrong_shapes_are_the_error_of_pytorch(calls_before):
    _, module = pair(Uncapturable)
    for step in range(calls_before):
        module(rows(step))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        module(torch.ones(3, 5))


def test_an_error_of_a_part_leaves_it_usable():
    eager, module = pair(Uncapturable)
    take_apart(module)
    with pytest.raises(RuntimeError):
        module(torch.ones(3, 5))
    torch_ort.reset_counters()
    torch.testing.assert_close(module(rows()), eager(rows()))
    assert torch_ort.counters()["forward_runs"] == RUNS[Uncapturable]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
@pytest.mark.parametrize("is_taken_apart", [False, True])
def test_copies_train_on_their_own(duplicate, is_taken_apart):
    eager, module = pair(Deep)
    if is_taken_apart:
        take_apart(module)
    other = duplicate(module)
    assert type(other) is HierarchicalORTModule
    torch.testing.assert_close(train(other, 3), train(eager, 3))
    torch.testing.assert_close(module.state_dict(), pair(Deep)[0].state_dict())


def test_dropout_draws_what_eager_draws():
    class Drops(Uncapturable):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))

    eager, module = pair(Drops)
    seen = []
    for each in (eager, module):
        torch.manual_seed(1)
        seen.append(train(each, 4))
    torch.testing.assert_close(*seen)


def test_repr_and_moves(graphs_captured):
    eager, module = pair(Uncapturable)
    take_apart(module)
    assert repr(module).startswith("HierarchicalORTModule(")
    assert module.double() is module
    got = module(rows().double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, eager.double()(rows().double()))
    assert graphs_captured() == RUNS[Uncapturable]


def test_a_module_that_was_taken_apart_can_be_freed():
    """Its parts hold their graphs, and the guards of these what hangs at the parts."""
    _, module = pair(Uncapturable)
    take_apart(module)
    train(module, 2)
    alive = [weakref.ref(part) for part in module.module.modules()]
    del module
    gc.collect()
    assert [part for part in alive if part() is not None] == []


class OnlyBranches(nn.Module):
    """Has parts, none of which can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Branches(), Branches())

    def forward(self, x):
        return branched(self.parts(x))


@pytest.mark.parametrize("make", [OnlyBranches, Branches])
@pytest.mark.parametrize("variable", ["TORCH_ORT_STRICT", "ORTMODULE_FALLBACK_POLICY"])
def test_calls_of_which_no_part_runs_in_the_engine_raise(make, variable, monkeypatch):
    """Where there are parts the first call runs in PyTorch, to find out that it has to."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setenv(variable, "1" if variable == "TORCH_ORT_STRICT" else "FALLBACK_DISABLE")
    module = HierarchicalORTModule(make())
    if make is OnlyBranches:
        module(rows()).sum().backward()
    for _ in range(2):
        with pytest.raises(ORTModuleONNXModelException, match="data-dependent: Python asks"):
            module(rows())


def test_calls_of_which_no_part_runs_in_the_engine_are_counted(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.delenv("ORTMODULE_FALLBACK_POLICY", raising=False)
    eager = OnlyBranches()
    module = HierarchicalORTModule(copy.deepcopy(eager))
    for step in range(3):
        torch.testing.assert_close(module(rows(step)), eager(rows(step)))
    assert torch_ort.counters()["calls_left_to_eager"] == 3
