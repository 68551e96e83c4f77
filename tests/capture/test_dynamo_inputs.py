"""Sizes of Dynamo's graphs as symbols of a recording, and what it is told of them in turn."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_ort
from torch_ort import _C
from torch_ort.core.refusals import HandOver
from torch_ort.dynamo.inputs import DynamoInputs
from torch_ort.rules.numbers import Conditions


def dynamo_tensor(env: ShapeEnv, *shape: int) -> torch.Tensor:
    """Make a tensor whose sizes are symbols of a trace of Dynamo's."""
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return mode.from_tensor(torch.empty(shape), symbolic_context=context)


@pytest.fixture
def given():
    """Give an environment, inputs of a graph with symbolic sizes, and sizes of the recording."""
    env = ShapeEnv(duck_shape=False)
    x, y = dynamo_tensor(env, 6, 4), dynamo_tensor(env, 6, 3)
    inputs = DynamoInputs([*x.shape, *y.shape, x, y])
    return env, inputs, [*inputs.inputs[4].spec.sizes, *inputs.inputs[5].spec.sizes]


def test_sizes_and_strides_are_those_of_dynamo():
    env = ShapeEnv()
    x = dynamo_tensor(env, 6, 4)
    n, m = x.shape
    view = x.unsqueeze(0).expand(3, n, m)[:, 1:].transpose(1, 2)
    inputs = DynamoInputs([n, m, view, 7, 0.5, None]).inputs
    assert inputs[3:] == [7, 0.5, None]
    texts = [str(size.node.expr) for size in (n, m)]
    assert [_C.size_text(size) for size in inputs[:2]] == texts
    assert [_C.size_value(size) for size in inputs[2].spec.sizes] == [3, 4, 5]
    assert [_C.size_value(stride) for stride in inputs[2].spec.strides] == [0, 1, 4]


def test_what_dynamo_knows_is_no_guard(given):
    env, inputs, (n, m, _, _) = given
    assert n > 1
    assert n * m >= 4
    inputs.tell_guards(Conditions())
    assert env.guards == []


def test_what_dynamo_has_guarded_is_not_guarded_again(given):
    env, inputs, (n, *_) = given
    theirs = next(iter(inputs._theirs.values()))
    assert theirs > 5
    count = len(env.guards)
    assert n > 5
    assert n > 3
    inputs.tell_guards(Conditions())
    assert len(env.guards) == count


@pytest.mark.parametrize(
    ("ask", "want"),
    [
        (lambda n, m, k, p: n == k, "Eq({n}, {k})"),
        (lambda n, m, k, p: n > 3, "{n} > 3"),
        (lambda n, m, k, p: (n * m) % 8 == 0, "Eq(Mod({n}*{m}, 8), 0)"),
        (lambda n, m, k, p: torch.sym_max(n, m) != p, "Ne({p}, Max({n}, {m}))"),
    ],
)
def test_a_condition_is_guarded_by_dynamo(given, ask, want):
    env, inputs, sizes = given
    assert ask(*sizes)
    assert env.guards == []
    inputs.tell_guards(Conditions())
    (guard,) = env.guards
    names = dict(zip("nmkp", inputs._theirs, strict=True))
    values = {name: 6 if i in (0, 2) else 4 - i // 2 for i, name in enumerate(inputs._theirs)}
    scope = {"Eq": lambda a, b: a == b, "Ne": lambda a, b: a != b, "Mod": lambda a, b: a % b,
             "Max": max}  # fmt: skip
    for change in (0, 1, 2):  # the same condition, however it is written
        numbers = {name: n + change * i for i, (name, n) in enumerate(values.items())}
        expected = eval(want.format(**names), scope, numbers)
        symbols = {symbol: numbers[symbol.name] for symbol in guard.expr.free_symbols}
        assert bool(guard.expr.subs(symbols)) == expected


def test_a_size_that_has_to_be_constant_is_left_to_aotautograd(given):
    env, inputs, (n, m, _, _) = given
    assert n > 3
    assert int(m) == 4
    with pytest.raises(HandOver, match=r"a size has to be constant: \(s\d+ == 4\)"):
        inputs.tell_guards(Conditions())
    assert env.guards == []


def test_sizes_that_are_no_inputs_hand_over():
    x = dynamo_tensor(ShapeEnv(), 6)
    with pytest.raises(HandOver, match=r"size s\d+ is no input of the graph"):
        DynamoInputs([x])


def test_sizes_of_data_hand_over():
    env = ShapeEnv()
    with pytest.raises(HandOver, match=r"size u\d+ is known from data alone"):
        DynamoInputs([env.create_unbacked_symint()])


def compiled_calls(function, calls: list[tuple], dims: tuple = ()) -> dict[str, int]:
    """Compile a function and call it; compare with eager; give the counters."""
    torch.compiler.reset()
    torch_ort.reset_counters()
    compiled = torch.compile(function, backend="ort", fullgraph=True)
    for i, call in enumerate(calls):
        if i == 0:
            for tensor in call:
                for dim in dims:
                    torch._dynamo.mark_dynamic(tensor, dim)
        got, want = compiled(*call), function(*call)
        torch.testing.assert_close(got, want)
        if got.requires_grad:
            gradients = torch.autograd.grad(got.sum(), list(function.parameters()))
            expected = torch.autograd.grad(want.sum(), list(function.parameters()))
            torch.testing.assert_close(gradients, expected)
    return torch_ort.counters()


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y, _ = self.inner(x, x, x, need_weights=False)
        return y.flatten(1).sum(1) / x.shape[1]


class Sum(nn.Module):
    """Adds tensors whose sizes agree by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x, y):
        return (x * self.scale).sum(0) + y.mean(1)


CALLS = {
    "mlp": (Mlp, [(torch.randn(n, 4),) for n in (3, 5, 2, 9)], ()),
    "mlp, marked": (Mlp, [(torch.randn(n, 4),) for n in (3, 5, 2, 9)], (0,)),
    "mlp, empty and alone": (Mlp, [(torch.randn(n, 4),) for n in (3, 5, 1, 0, 7)], ()),
    "attention": (Attention, [(torch.randn(n, m, 8),) for n, m in ((2, 3), (4, 5), (3, 9))], ()),
    "equal by chance": (
        Sum, [(torch.randn(n, m), torch.randn(k, n)) for n, m, k in ((2, 3, 3), (4, 5, 5))], (),
    ),
    "broadcast": (Sum, [(torch.randn(3, m), torch.randn(1, 2)) for m in (5, 6, 2)], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_as_often_captured_as_by_aotautograd(name, monkeypatch):
    make, calls, dims = CALLS[name]
    torch.manual_seed(0)
    module = make()
    ours = compiled_calls(module, calls, dims)
    assert ours["recordings_handed_over"] == 0
    assert ours["graphs_recorded"] == ours["graphs_captured"]
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    theirs = compiled_calls(module, calls, dims)
    assert theirs["graphs_recorded"] == 0
    assert ours["graphs_captured"] == theirs["graphs_captured"]
    assert ours["fallbacks"] == theirs["fallbacks"] == 0


def test_a_size_that_leaves_the_graph():
    def function(x):
        return x * 2, 3 * x.shape[0] + 1

    compiled = torch.compile(function, backend="ort", fullgraph=True, dynamic=True)
    for n in (3, 5):
        y, size = compiled(torch.ones(n))
        assert (y.shape, size) == ((n,), 3 * n + 1)
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1.0 / torch.cat([x[:1], x]).shape[0]) ** 0.5,  # Dynamo adds by sym_sum
        lambda x: x / torch.sym_sum([x.shape[0], 1, x.shape[1]]) ** 0.5,
        lambda x: x * torch.sym_sum([1 / x.shape[0], 0.5]),
    ],
    ids=["one more", "three terms", "floats"],
)
def test_a_float_of_a_sum_of_sizes(function):
    compiled = torch.compile(function, backend="ort", fullgraph=True, dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), function(x))
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graphs_recorded"]) == (1, 1)


def test_a_reset_lets_go_of_symbols():
    def alive():
        gc.collect()
        return sum(isinstance(one, ShapeEnv) for one in gc.get_objects())

    model, left = nn.Linear(4, 2), []
    for _ in range(4):
        compiled = torch.compile(model, backend="ort", dynamic=True)
        for rows in (5, 7):
            compiled(torch.randn(rows, 4)).sum().backward()
        torch.compiler.reset()
        left.append(alive())
    assert len({*left[1:]}) == 1
