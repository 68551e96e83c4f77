# What calls of an ORTModule may bring and give, and which differences make a new graph.
from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import pytest
import torch
from models import module_with
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import (
    ORTModuleDeviceException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
)


class Both:
    """An eager copy and a wrapped copy of a module, called with equal arguments."""

    def __init__(self, module: nn.Module) -> None:
        self.eager = copy.deepcopy(module)
        self.ours = ORTModule(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call both, go backward where possible, compare all; give the engine's result."""
        ran = torch_ort.counters()["forward_runs"]
        want_args, got_args = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        want = self.eager(*want_args[0], **want_args[1])
        got = self.ours(*got_args[0], **got_args[1])
        assert torch_ort.counters()["forward_runs"] == ran + 1
        assert_same(got, want, "output")
        backward(want)
        backward(got)
        assert_same(got_args, want_args, "arguments")
        for (name, a), b in zip(self.ours.named_parameters(), self.eager.parameters(), strict=True):
            assert_same(a.grad, b.grad, f"gradient of {name}")
        self.eager.zero_grad()
        self.ours.zero_grad()
        return got


def backward(outputs: Any) -> None:
    tensors = [leaf for _, leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    terms = [t.pow(2).sum() + t.sum() for t in tensors if t.requires_grad]
    if terms:
        torch.stack(terms).sum().backward()


def parts(value: Any) -> dict[str, Any] | None:
    """Give the parts of a container by name; None for a leaf."""
    if isinstance(value, collections.abc.Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": part for i, part in enumerate(value)}
    if dataclasses.is_dataclass(value) or isinstance(value, Holder | types.SimpleNamespace):
        return {f".{key}": part for key, part in vars(value).items()}
    return None


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    inner = parts(value)
    if inner is None:
        return [(name, value)]
    return [leaf for key, part in inner.items() for leaf in leaves(part, name + key)]


def assert_same(got: Any, want: Any, name: str) -> None:
    assert type(got) is type(want), name
    inner = parts(want)
    if inner is not None:
        assert list(parts(got)) == list(inner), name
        for key, part in parts(got).items():
            assert_same(part, inner[key], name + key)
    elif isinstance(want, torch.Tensor):
        # Sums of large numbers may cancel: as far off as their size allows.
        largest = want.abs().max().item() if want.is_floating_point() and want.numel() else 1
        near = (
            {"rtol": 1.3e-6, "atol": 1e-5 * max(1, largest)} if want.dtype == torch.float32 else {}
        )
        torch.testing.assert_close(got, want, **near, msg=lambda text: f"{name}: {text}")
        assert got.requires_grad == want.requires_grad, name
        if want.is_leaf:
            assert_same(got.grad, want.grad, f"gradient of {name}")
    else:
        assert got == want, name


def wrapped(function: Any, width: int = 4) -> Both:
    """Give a module with one linear layer whose forward is `function(linear, ...)`."""
    torch.manual_seed(0)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(self.linear, *args, **kwargs)

    return Both(Wrapped())


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed))


# Arguments by position and by name.


class Options(nn.Module):
    """Takes tensors, of which some may be left out, and values that choose what is done."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y=None, *, bias=None, flag=False, how="plus", power=2, scale=1.0):
        z = self.linear(x)
        if y is not None:
            z = z * y
        if bias is not None:
            z = z + bias if how == "plus" else z - bias
        z = z.abs() if flag else z
        return (z**power) * scale


def test_arguments_by_position_and_by_name(graphs_captured):
    both = Both(Options())
    x, y, b = rows(), rows(seed=1), rows(4, seed=2)
    both(x, y)
    both(x, y=y)
    both(x=x, y=y)
    assert graphs_captured() <= 3
    captured = graphs_captured()
    both(x=x, y=y, bias=b)
    both(bias=b, y=y, x=x)
    both(y=y, x=x, bias=b)
    assert graphs_captured() == captured + 1


def test_arguments_left_out_and_given(graphs_captured):
    both = Both(Options())
    x, y, b = rows(), rows(seed=1), rows(4, seed=2)
    for _ in range(2):
        both(x)
        both(x, y)
        both(x, bias=b)
        both(x, y, bias=b)
    assert graphs_captured() == 4


def test_none_is_something_else_than_a_tensor(graphs_captured):
    both = Both(Options())
    for y in (rows(seed=1), None, rows(seed=2), None):
        both(rows(), y)
    assert graphs_captured() == 2


@pytest.mark.parametrize(
    ("name", "values"), [("flag", (True, False, True, False)), ("how", ("plus", "minus", "plus"))]
)
def test_constants_make_a_graph_each(name, values, graphs_captured):
    both = Both(Options())
    for value in values:
        both(rows(), bias=rows(4), **{name: value})
    assert graphs_captured() == len(set(values))


def repeated(linear, x, n):
    for _ in range(n):
        x = linear(x)
    return x


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


# What forward does with a value, the values of its calls, and the most graphs that they need.
VARYING = {
    "True, 1 and 1.0": (
        lambda linear, x, n: linear(x) * n if isinstance(n, bool) else linear(x) + n,
        (1, True, 1.0, 1, True), 3,
    ),
    "integers": (lambda linear, x, n: linear(x) * n + n // 2, (3, 5, 0, 1, -4, 7, 2**40), 1),
    "integers as sizes": (
        lambda linear, x, n: (linear(x), x.new_ones(n + 1), x.repeat(n, 1)), (2, 3, 4, 1), 1
    ),
    "integers as ends of slices": (lambda linear, x, n: linear(x)[:, :n], (2, 3, 4, 1, 3, 2), 1),
    "integers that branch": (
        lambda linear, x, n: linear(x) * n if n > 2 else linear(x) - n, (3, 1, 2, 7, 5), 5
    ),
    "integers that loop": (repeated, (1, 3, 2, 3, 0), 5),
    "floats": (
        lambda linear, x, scale: linear(x) * scale + scale,
        (0.5, 2.0, 0.25, -1.0, 0.0, 1e-3, 1.0, 3e4), 2,
    ),
    "special floats": (
        lambda linear, x, top: linear(x).clamp(max=top),
        (0.5, float("inf"), 0.25, float("-inf"), 0.5), 4,
    ),
    "dtypes": (lambda linear, x, dtype: linear(x).to(dtype), (torch.float64, torch.float32) * 2, 2),
    "slices": (lambda linear, x, part: linear(x)[part], (slice(0, 2), slice(1, 3)) * 2, 2),
    "names": (lambda linear, x, names: linear(x) * len(names), (("a",), ("a", "b")) * 2, 2),
    "lists": (lambda linear, x, order: linear(x) * sum(order), ([1, 2], [2, 3, 4]) * 2, 2),
    "members": (lambda linear, x, mode: linear(x) * mode.value, (Mode.LOW, Mode.HIGH) * 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", VARYING)
def test_values_that_vary(name, graphs_captured):
    function, values, most = VARYING[name]
    both = wrapped(function)
    for value in values:
        both(rows(), value)
    assert graphs_captured() <= most


def test_floats_vary_without_loss_of_digits_in_double():
    both = wrapped(lambda linear, x, scale: linear(x) * scale)
    both.eager.double()
    both.ours.double()
    for scale in (0.1, 0.2, 0.3, 1 / 3):
        both(rows().double(), scale=scale)


def test_several_floats_vary(graphs_captured):
    both = Both(Options())
    for i in range(4):
        both(rows(), scale=0.5 + i)
    assert graphs_captured() <= 2
    both = wrapped(lambda linear, x, pairs: linear(x) * pairs["a"] + pairs["b"][0])
    for i in range(6):
        both(rows(), {"a": 0.5 * i, "b": [1.0 / (1 + i)]})
    assert graphs_captured() <= 5


@pytest.mark.hands_over("the float is tried as a number of the graph first")
def test_floats_that_only_a_constant_can_be(graphs_captured):
    both = wrapped(lambda linear, x, p: linear(x) + 1 if p > 0.5 else nn.functional.elu(x, p))
    for p in (0.25, 0.75, 0.125, 0.25, 0.75):
        both(rows(), p)


# Containers.


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None
    name: str = "data"


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any


class Holder:
    """A plain class that holds values."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def both_of(value: Any) -> tuple[Any, Any]:
    """Give the two tensors in any container of this file."""
    if isinstance(value, collections.abc.Mapping):
        return value["first"], value["second"]
    if isinstance(value, list | tuple):
        return value[0], value[1]
    return value.first, value.second


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"first": a, "second": b},
    "namedtuple": Pair,
    "OrderedDict": lambda a, b: collections.OrderedDict(first=a, second=b),
    "UserDict": lambda a, b: collections.UserDict(first=a, second=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, first=a, second=b),
    "dataclass": Data,
    "frozen dataclass": Frozen,
}


def take_both(linear, value):
    a, b = both_of(value)
    return linear(a) * b


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_come_in_and_go_out(make, graphs_captured):
    both = wrapped(lambda linear, value: (take_both(linear, value), make(linear.weight, value)))
    for count in (3, 5):
        both(make(rows(count, 4).requires_grad_(), rows(count, 4, seed=1)))
    assert graphs_captured() == 1


@pytest.mark.parametrize("kind", ["namedtuple", "UserDict", "defaultdict", "frozen dataclass"])
def test_containers_reach_forward_as_they_are(kind):
    make, seen = CONTAINERS[kind], []

    def noted(linear, value):
        seen.append(type(value))
        return take_both(linear, value)

    value = make(rows(), rows(seed=1))
    ORTModule(wrapped(noted).eager)(value)
    assert set(seen) == {type(value)}


def test_containers_in_containers(graphs_captured):
    def nested(linear, batch, *more, **named):
        a = linear(batch["x"][0]) + batch["deep"]["pair"].second
        b = a * named["scale"][0] + more[0][1][0]
        return {"out": [a, (b, None)], "name": Data(b, Pair(a, "text"))}

    both = wrapped(nested)
    for count in (3, 2):
        x = rows(count, 4)
        batch = {"x": [x, None], "deep": {"pair": Pair("name", rows(4, seed=1).requires_grad_())}}
        both(batch, (1, [rows(4, seed=2)]), scale=(rows(1, seed=3)[0], False))
    assert graphs_captured() == 1


def test_another_structure_is_another_graph(graphs_captured):
    def total(linear, values):
        values = values.values() if isinstance(values, dict) else values
        return sum(linear(value) for value in values)

    both = wrapped(total)
    x = rows()
    given = ([x], [x, x], (x, x), {"a": x}, {"b": x}, [x])
    for value in given:
        both(value)
    assert graphs_captured() == len(given) - 1


def test_order_of_keys_does_not_change_the_results():
    both = wrapped(lambda linear, values: linear(values["a"]) * values["b"])
    both({"a": rows(), "b": rows(seed=1)})
    both({"b": rows(seed=1), "a": rows()})


@pytest.mark.parametrize("is_starred", [False, True])
def test_the_order_of_keys_that_forward_sees_is_that_of_the_call(is_starred):
    def weighted(linear, values=None, **named):
        values = named if is_starred else values
        return sum(i * linear(value) for i, value in enumerate(values.values(), 1))

    both = wrapped(weighted)
    for names in ("ab", "ba"):
        values = {name: rows(seed=ord(name)) for name in names}
        both(**values) if is_starred else both(values)


def test_starred_arguments(graphs_captured):
    def total(linear, *args, **kwargs):
        return linear(sum(args)) + sum(value * len(key) for key, value in kwargs.items())

    both = wrapped(total)
    a, b, c = rows(), rows(seed=1), rows(seed=2)
    both(a)
    both(a, b)
    both(a, b, c, one=a, three=b)
    both(a, three=b, one=a)
    both(a, one=a, three=b)
    both(b, c)
    # `**kwargs` may be read in their order, so another order is another graph.
    assert graphs_captured() == 5


def test_arguments_are_not_kept_alive():
    both = wrapped(lambda linear, x: linear(x))
    x = rows()
    both.ours(x)
    count = len([r for r in gc_referrers(x) if isinstance(r, list | tuple | dict | set)])
    assert count <= 1  # the frame's or the module's dict at most


def gc_referrers(value):
    import gc

    gc.collect()
    return gc.get_referrers(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.nn.ReLU(), lambda x: x, 1 + 2j])
def test_what_is_no_data_falls_back_clearly(value, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    both = wrapped(lambda linear, x, other: linear(x))
    if isinstance(value, complex):
        both(rows(), value)
        return
    words = f"ORTModuleIOError: other: got {type(value).__name__}, want tensors, numbers"
    words = words.replace("other", r"\S+")
    with pytest.warns(FallbackWarning, match=words):
        got = both.ours(rows(), value)
    assert torch.equal(got, both.eager(rows(), value))


def test_what_is_no_data_raises_in_strict_mode():
    both = Both(Options())
    with pytest.raises(ORTModuleIOError, match="bias: got object, want tensors, numbers"):
        both.ours(rows(), bias=object())


def test_tensor_subclasses_are_named():
    class Special(torch.Tensor):
        pass

    both = Both(Options())
    with pytest.raises(ORTModuleIOError, match="x: got the tensor subclass Special"):
        both.ours(rows().as_subclass(Special))
    with pytest.raises(ORTModuleIOError, match=r"y: got a tensor of layout torch\.sparse_coo"):
        both.ours(rows(), rows().to_sparse())


# Tensors of other kinds.


def test_dtypes_and_ranks_make_a_graph_each(graphs_captured):
    both = wrapped(lambda linear, x: linear(x.to(torch.float32)))
    for _ in range(2):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16):
            both(rows().to(dtype))
        for shape in ((4,), (2, 3, 4)):
            both(rows(*shape))
    assert graphs_captured() == 7


def test_views_of_one_tensor():
    both = wrapped(lambda linear, a, b: linear(a) * b)
    x = rows(6, 4)
    both(x[:3], x[3:])
    both(x[:3], x[:3])
    both(x[1:4], x[2:5])
    both(rows(), rows(seed=1))


@pytest.mark.parametrize(
    ("change", "graphs"),
    [
        (lambda x: x.t().contiguous().t(), 3),
        (lambda x: x[::2], 2),
        (lambda x: x[:, :1].expand(-1, 4), 2),
        (lambda x: x.flip(0)[1:], 2),
        (lambda x: torch.as_strided(x, (2, 4), (1, 1)), 3),
        (lambda x: x.unsqueeze(1).transpose(0, 1).squeeze(0), 2),
    ],
)
def test_layouts_of_inputs(change, graphs, graphs_captured):
    """Each order of dims in memory has its graph; tensors with gaps have that of dense ones."""
    both = wrapped(lambda linear, x: linear(x).cumsum(0) + x)
    both(rows(6, 4))
    both(change(rows(6, 4)))
    both(change(rows(6, 4).requires_grad_()).detach().requires_grad_())
    assert graphs_captured() == graphs


@pytest.mark.parametrize(
    "function",
    [lambda x: x.contiguous(), lambda x: torch.ravel(input=x), lambda x: x[:2].contiguous()[0]],
)
def test_row_major_results_are_copies_of_what_lies_otherwise(function, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = ORTModule(module_with(lambda self, x: function(x)))
    dense, gaps = rows(4, 6), rows(4, 12)[:, ::2]
    assert module(dense).untyped_storage().data_ptr() == dense.untyped_storage().data_ptr()
    with pytest.warns(FallbackWarning, match="gives an argument back in row-major order"):
        result = module(gaps)
    want = function(gaps)
    torch.testing.assert_close(result, want, rtol=0, atol=0)
    assert result.stride() == want.stride()
    assert result.untyped_storage().data_ptr() != gaps.untyped_storage().data_ptr()


@pytest.mark.hands_over("the test is about it")
@pytest.mark.parametrize("function", [lambda x: x, lambda x: x[1:]])
def test_what_is_given_back_of_what_is_not_dense_shares_its_memory(function, traced, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = ORTModule(module_with(lambda self, x: (x / 2, function(x))))
    dense, gaps = rows(4, 6), rows(4, 12)[:, ::2]
    for x in (dense, gaps):
        if x is gaps:
            with pytest.warns(FallbackWarning, match="gives an argument back, or a view of it"):
                scaled, given = module(x)
        else:
            scaled, given = module(x)
            assert torch_ort.counters()["fallbacks"] == 0
        torch.testing.assert_close(scaled, x / 2)
        given.fill_(7)
        assert (function(x) == 7).all()


def test_writes_into_what_is_a_copy_only_of_what_lies_otherwise(monkeypatch):
    class Writes(nn.Module):
        def forward(self, x):
            y = x.double()
            y.flatten().cos_()
            return y

    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = ORTModule(Writes())
    torch.testing.assert_close(module(rows(4, 4)), Writes()(rows(4, 4)))
    assert torch_ort.counters()["fallbacks"] == 0
    torch.testing.assert_close(module(rows(4, 4).t()), Writes()(rows(4, 4).t()))
    assert torch_ort.counters()["fallbacks"] == 0
    with pytest.warns(FallbackWarning, match="forward writes into `reshape` or `contiguous`"):
        got = module(rows(4, 8)[:, ::2])
    torch.testing.assert_close(got, Writes()(rows(4, 8)[:, ::2]))


def images() -> nn.Module:
    """Give a model for images; in float32, gradients of its convolution are half rounding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()


def test_channels_last_inputs_keep_their_layout(graphs_captured):
    both = Both(images())
    x = rows(2, 3, 6, 5).double().to(memory_format=torch.channels_last)
    assert both(x).is_contiguous(memory_format=torch.channels_last)
    both(rows(4, 3, 7, 6).double().to(memory_format=torch.channels_last))
    assert graphs_captured() == 1


@pytest.mark.parametrize("formats", [("contiguous_format", "channels_last"), ("channels_last",)])
def test_images_of_each_layout_have_their_graph(formats, graphs_captured):
    both = Both(images())
    for name in (*formats, *formats[::-1]):
        x = rows(2, 3, 6, 5).double().to(memory_format=getattr(torch, name))
        assert both(x.requires_grad_()).is_contiguous(memory_format=getattr(torch, name))
    assert graphs_captured() == len(formats)


def test_unused_inputs_may_be_anything_and_get_no_gradient(graphs_captured):
    both = wrapped(lambda linear, x, unused, flag=None: linear(x))
    for count in (2, 3):
        both(rows(), rows(count, 7).requires_grad_())
        both(rows(), rows(count, 7).requires_grad_(), flag=None)
    assert graphs_captured() == 2


def test_parts_of_what_a_product_of_sizes_tells_the_number_of(graphs_captured):
    class Unbound(nn.Module):
        def forward(self, x):
            return torch.stack([x, x]).reshape(-1).unbind()[1], x.flatten().unbind()[0]

    module = ORTModule(Unbound())
    for x in (rows(2, 4), rows(4, 4), rows(2, 4)):
        for got, want in zip(module(x), Unbound()(x), strict=True):
            assert got.shape == ()
            torch.testing.assert_close(got, want)
    assert graphs_captured() == 2


def test_sizes_vary_without_a_new_graph(graphs_captured):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
            self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

        def forward(self, tokens):
            batch, length = tokens.shape
            x = self.norm(self.embed(tokens))
            q, k, v = self.mix(x).view(batch, length, 2, 12).transpose(1, 2).chunk(3, -1)
            x = x + (torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v).transpose(1, 2).flatten(2)
            return self.head(x).flatten(0, 1)

    torch.manual_seed(0)
    both = Both(Attention())
    for shape in ((2, 5), (1, 5), (3, 1), (1, 1), (7, 4)):
        both(torch.randint(11, shape, generator=torch.Generator().manual_seed(0)))
    assert graphs_captured() == 1


@pytest.mark.parametrize("first", [0, 1, 3])
def test_batches_of_nothing_and_of_one(first, graphs_captured):
    torch.manual_seed(0)
    both = Both(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2)))
    for count in (first, 0, 1, 2, 5, 0, 1):
        both(rows(count, 4))
    # No symbol stands for a size of 0: a first call with one has a graph of its own.
    assert graphs_captured() == (2 if first == 0 else 1)


def test_lengths_of_nothing_and_of_one(graphs_captured):
    both = wrapped(lambda linear, x: linear(x).sum(1))
    for length in (3, 1, 0, 5, 2):
        both(rows(2, length, 4))
    assert graphs_captured() == 1


def test_sizes_that_forward_branches_on(graphs_captured):
    def branched(linear, x):
        return linear(x) if x.shape[0] > 3 else x * 2 + linear.bias

    both = wrapped(branched)
    for count in (2, 5, 3, 4, 1, 9):
        both(rows(count, 4))
    assert graphs_captured() == 2


def test_inputs_that_broadcast_at_one(graphs_captured):
    both = wrapped(lambda linear, x, y: linear(x) * y)
    for count in (3, 1, 4, 1):
        both(rows(4, 4), rows(4 if count > 1 else 1, 4, seed=1))
    both(rows(1, 4), rows(5, 4, seed=1))


def test_masks_that_broadcast_have_one_graph_for_all_sizes(graphs_captured):
    both = wrapped(lambda linear, x, mask: linear(x) * mask)
    for batch, length in ((2, 3), (3, 5), (4, 2), (5, 6)):
        both(rows(batch, 2, length, 4), rows(batch, 1, length, 1))
    assert graphs_captured() <= 2


@pytest.mark.hands_over("PyTorch words the error")
def test_sizes_that_must_be_equal_are_checked_at_every_call(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    both = wrapped(lambda linear, x, y: linear(x) + y)
    both(rows(3, 4), rows(3, 4, seed=1))
    both(rows(5, 4), rows(5, 4, seed=1))
    with pytest.raises(RuntimeError, match="must match the size"):
        both.ours(rows(5, 4), rows(3, 4))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: x[:], lambda x: x.view(-1).view(3, 4)])
def test_inputs_changed_in_place_that_share_memory(alias, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def changing(linear, x, y):
        x.add_(1)
        return linear(x) + y

    both = wrapped(changing)
    both(rows(), rows(seed=1))
    want, got = rows(), rows()
    # A graph cannot do this; what counts are the numbers, and that nothing is silent.
    with pytest.warns(FallbackWarning, match="shares its memory"):
        y = both.ours(got, alias(got))
    torch.testing.assert_close(y, both.eager(want, alias(want)))
    torch.testing.assert_close(got, want)


# Devices.


def test_what_names_no_device_is_refused():
    ours = ORTModule(nn.Identity())
    with pytest.raises(ORTModuleDeviceException, match="a device must be specified in the module"):
        ours(3)


def test_a_module_on_two_devices_is_refused():
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")))
    with pytest.raises(ORTModuleDeviceException, match=r"several devices: got cpu, meta"):
        ours(rows())


# Outputs.


OUTPUTS = {
    "tuple": lambda y: (y, y * 2),
    "list in dict": lambda y: {"a": [y, (y * 2,)], "b": {}},
    "empty": lambda y: ([], y, ()),
    "namedtuple": lambda y: Pair(y, Pair(y * 2, None)),
    "dataclass": lambda y: Data(y, [y * 2]),
    "frozen dataclass": lambda y: Frozen(y, {"a": y * 3}),
    "plain object": lambda y: Holder(y, [Holder(y * 2, "text")]),
    "namespace": lambda y: types.SimpleNamespace(a=y, b=3),
    "OrderedDict": lambda y: collections.OrderedDict(b=y, a=y * 2),
    "UserDict": lambda y: collections.UserDict(b=y, a=y * 2),
    "constants": lambda y: (y, None, "text", 3, 2.5, True, torch.float32, 1 + 2j),
    "model output": lambda y: BaseModelOutput(last_hidden_state=y, hidden_states=(y, y * 2)),
    "partial model output": lambda y: SequenceClassifierOutput(loss=y.sum(), logits=y),
    "the same tensor twice": lambda y: (y, y),
    "a tensor and a view": lambda y: (y, y.view(-1), y[0]),
    "no gradient": lambda y: (y, y.detach() * 2, y > 0, y.argmax(-1)),
    "a scalar": lambda y: y.mean(),
    "other dtypes": lambda y: (y.double(), y.bfloat16(), y.to(torch.complex64).real),
    "a new tensor": lambda y: (y, torch.ones(2), torch.arange(3)),
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs(make, graphs_captured):
    both = wrapped(lambda linear, x: make(linear(x)))
    both(rows(3, 4).requires_grad_())
    both(rows(2, 4, seed=1).requires_grad_())
    assert graphs_captured() == 1


def test_outputs_are_new_objects_at_each_call():
    both = wrapped(lambda linear, x: {"y": linear(x), "list": [1], "data": Data([x * 2])})
    first, second = both(rows()), both(rows(seed=1))
    assert first is not second
    assert first["list"] is not second["list"]
    assert first["data"] is not second["data"]
    assert not torch.equal(first["y"], second["y"])
    first["list"].append(2)
    assert both(rows())["list"] == [1]


def test_model_outputs_keep_their_ways_of_access():
    both = wrapped(lambda linear, x: SequenceClassifierOutput(loss=linear(x).sum(), logits=x * 2))
    got = both(rows())
    assert list(got.keys()) == ["loss", "logits"]
    assert got[0] is got.loss is got["loss"]
    assert got.hidden_states is None
    assert len(got.to_tuple()) == 2


def test_sizes_and_arguments_as_outputs(graphs_captured):
    both = wrapped(lambda linear, x, n: (linear(x), x.shape[0], n, n + x.shape[0], x.shape))
    for count, n in ((3, 7), (5, 8), (1, 0), (2, -3)):
        both(rows(count, 4), n)
    assert graphs_captured() == 1


def test_constants_that_come_from_arguments():
    both = wrapped(lambda linear, x, flag, name: (linear(x), not flag, name + "!", None))
    for flag, name in ((True, "a"), (False, "a"), (True, "b"), (True, "a")):
        both(rows(), flag, name)


def test_a_float_that_varies_comes_back_as_a_float():
    both = wrapped(lambda linear, x, scale: (linear(x) * scale, scale, 1 - scale / 3))
    for scale in (0.5, 0.25, 2.0, 0.75):
        got, want = both.ours(rows(), scale), both.eager(rows(), scale)
        torch.testing.assert_close(got[0], want[0])
        assert got[1:] == want[1:]
        assert [type(each) for each in got[1:]] == [float, float]
    assert torch_ort.counters()["graphs_captured"] == 2


VIEWS = {
    "itself": lambda x: x,
    "a row": lambda x: x[1],
    "turned": lambda x: x.t(),
    "a part, turned": lambda x: x[1:].t()[:2],
    "expanded": lambda x: x.unsqueeze(0).expand(2, -1, -1),
    "detached": lambda x: x.detach(),
    "reshaped, which copies": lambda x: x.reshape(-1),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_what_is_made_of_an_argument_is_made_of_the_callers(make, mode):
    """A graph reads a dense copy of an argument; what forward gives back is no part of it."""
    both = wrapped(lambda linear, x: (make(x), linear(x)))
    of_leaf = rows(4, 4).requires_grad_()
    arguments = (rows(4, 4).t(), of_leaf.t(), (of_leaf * 2).t(), rows(4, 8)[:, ::2], rows(4, 4))
    for x in arguments:
        with mode():
            (got, a), (want, b) = both.ours(x), both.eager(x)
        torch.testing.assert_close(a, b)
        assert torch.equal(got, want)
        assert (got is x) == (want is x)
        assert got.requires_grad == want.requires_grad
        assert got.is_leaf == want.is_leaf
        assert got.stride() == want.stride()
        assert (got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (
            want.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        )
        if want.requires_grad and mode is torch.enable_grad:
            of_got, of_want = (
                torch.autograd.grad(y.square().sum(), of_leaf, retain_graph=True)[0]
                for y in (got, want)
            )
            torch.testing.assert_close(of_got, of_want)
    assert torch_ort.counters()["fallbacks"] == 0


def test_parameters_and_buffers_as_outputs():
    def forward(self, x):
        self.count.add_(1)
        return self.linear(x), self.linear.weight, self.count, self.linear.bias[1:]

    both = Both(module_with(forward, linear=nn.Linear(4, 4), count=torch.zeros(1)))
    both(rows())
    both(rows())
    assert both.ours.count == 2


def no(value):
    return None


def test_nothing_as_an_output():
    both = wrapped(lambda linear, x, seen: no(seen.copy_(linear(x).detach())))
    want, got = torch.zeros(3, 4), torch.zeros(3, 4)
    assert both.ours(rows(), got) is None
    assert both.eager(rows(), want) is None
    torch.testing.assert_close(got, want)


def test_objects_without_tensors_come_back_as_they_are():
    thing = object()
    both = wrapped(lambda linear, x: (linear(x), thing, {1, 2}))
    assert both.ours(rows())[1] is thing
    assert both.ours(rows())[1:] == (thing, {1, 2})


@pytest.mark.hands_over("numbers read from tensors")
@pytest.mark.parametrize(
    "read", [lambda x: x.argmax().item(), lambda x: x.sum().item(), lambda x: (x.sum() > 0).item()]
)
def test_numbers_read_from_tensors_come_back_as_numbers(read, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    both = wrapped(lambda linear, x: (linear(x), read(x)))
    for x in (rows(), -rows(), rows(seed=1)):
        assert_same(both.ours(x), both.eager(x), "output")


@pytest.mark.hands_over("numbers read from tensors")
def test_numbers_that_forward_computes_with():
    both = wrapped(lambda linear, x: linear(x) * x.sum().item() + x.argmax().item())
    for x in (rows(), -rows(), rows(seed=1)):
        both(x)


@pytest.mark.hands_over("numbers read from tensors")
def test_numbers_that_forward_turns_into_python_fall_back_clearly(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    both = wrapped(lambda linear, x: (linear(x), float(x.sum())))
    with pytest.warns(FallbackWarning, match="ORTModuleONNXModelException"):
        got = both.ours(rows())
    assert_same(got, both.eager(rows()), "output")


@pytest.mark.hands_over("forward branches on data")
def test_branches_on_numbers_raise_in_strict_mode():
    with pytest.raises(ORTModuleONNXModelException, match="data-dependent"):
        wrapped(lambda linear, x: linear(x) if x.sum() > 0 else x).ours(rows())


@pytest.mark.hands_over("forward branches on data")
@pytest.mark.parametrize("value", [-0.1, 0.2])
def test_a_single_flag_that_indexes_is_data(value, monkeypatch):
    """PyTorch's own C++ reads the flag, as an index is a branch on it there."""

    def flagged(linear, x):
        y = linear(x).exp()
        y[(x > value).all()] = value
        return y

    with pytest.raises(ORTModuleONNXModelException, match="data-dependent"):
        wrapped(flagged).ours(rows())
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    both = wrapped(flagged)
    with pytest.warns(FallbackWarning, match="data-dependent"):
        got = both.ours(rows())
    assert_same(got, both.eager(rows()), "output")


def test_a_softmax_over_no_numbers_after_one_over_some():
    both = wrapped(lambda linear, x: linear(x).flatten().softmax(0))
    for count in (3, 0, 2, 0):
        both(torch.ones(count, 4))


class Applies(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


AS_IT_LIES = {
    "read": lambda x: x.as_strided((3, 2), (1, 2)) * 2,
    "given-back": lambda x: x.as_strided((3, 2), (1, 2)),
    "of-a-view": lambda x: x[1:].as_strided((2, 2), (1, 1), 1).exp(),
    "dropout": lambda x: nn.functional.dropout(x.exp(), 0.5),
    "like": lambda x: torch.rand_like(x) + x,
}


@pytest.mark.parametrize("name", sorted(AS_IT_LIES))
def test_an_argument_whose_order_in_memory_matters(name, monkeypatch):
    """Where it is dense the engine runs, and where a copy would stand for it, PyTorch."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = Applies(AS_IT_LIES[name])
    ours = ORTModule(module)
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    why = "draws numbers in the memory order" if name in ("dropout", "like") else "as_strided"
    for given, warns in ((x, None), (x.t(), None), (x[:, ::2], FallbackWarning)):
        results = []
        for call in (module, ours):
            torch.manual_seed(3)
            if warns is not None and call is ours:
                with pytest.warns(warns, match=why):
                    results.append(call(given))
            else:
                results.append(call(given))
        torch.testing.assert_close(results[1], results[0])
    assert torch_ort.counters()["forward_runs"] == 2


def test_a_copy_may_stand_for_what_is_drawn_in_another_order():
    module = Applies(lambda x: nn.functional.dropout(x @ x.new_ones(4, 3), 0.5))
    ours = ORTModule(module)
    x = torch.linspace(-1, 1, 24).reshape(4, 6).t()
    torch.manual_seed(3)
    want = module(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x), want)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("disabled", ["", "recorder"], ids=["recorder", "AOTAutograd"])
def test_sizes_of_views_do_not_lie_in_memory(disabled, monkeypatch):
    """They are inputs of the graph, as what is drawn for is, and no copy stands for them."""
    monkeypatch.setenv("TORCH_ORT_DISABLE", disabled)
    module = Applies(lambda x: nn.functional.dropout(x.exp().view(x.shape[0], 3, -1), 0.5))
    ours = ORTModule(module)
    for rows in (4, 5):
        x = torch.linspace(-1, 1, 6 * rows).reshape(rows, 6)
        torch.manual_seed(3)
        want = module(x)
        torch.manual_seed(3)
        torch.testing.assert_close(ours(x), want)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["graphs_captured"]) == (0, 1)
