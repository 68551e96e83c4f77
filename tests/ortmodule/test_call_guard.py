# The guard of a captured graph: which calls it serves, what it says of others, what it holds on to.
from __future__ import annotations

import collections
import dataclasses
import enum
import faulthandler
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import module_with
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_ort._C import CallGuard, InternalError, memory_order

from torch_ort import ORTModule
from torch_ort.guards.structure import Structure

pytestmark = pytest.mark.ort_only

Pair = collections.namedtuple("Pair", "left right")
CPU = torch.device("cpu")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Batch:
    ids: Any
    scale: Any = 1.0


class OwnDict(collections.UserDict):
    pass


class Refuses:
    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("not to be compared")

    __hash__ = object.__hash__


class OwnTensor(torch.Tensor):
    pass


def described(*args: Any, numbers: frozenset[str] = frozenset(), **kwargs: Any) -> tuple:
    """Describe a call as a capture does."""
    return Structure((args, kwargs), "", numbers=numbers).description[3]


def guard(*args: Any, state: Any = (), reads: Any = (), **kwargs: Any) -> CallGuard:
    return CallGuard(described(*args, **kwargs), list(state), list(reads))


def takes(expected: tuple) -> CallGuard:
    """Give a guard of calls with one argument that is described by hand."""
    return CallGuard((("sequence", tuple, (), (expected,)), ("named", dict, (), ())), [], [])


def of_read(container: Any, key: Any, how: str, value: Any) -> CallGuard:
    return guard(reads=[(container, key, how, value, "what was read")])


def matrix(rows: int = 2, columns: int = 3, **settings: Any) -> torch.Tensor:
    return torch.zeros(rows, columns, **settings)


def in_memory(*order: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give what lays the dims of a tensor in an order, outermost first."""
    inverse = [order.index(d) for d in range(len(order))]
    return lambda x: x.permute(order).contiguous().permute(inverse)


def as_part(lay: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give what lays a tensor so, with gaps."""
    return lambda x: lay(x.repeat_interleave(2, dim=2))[:, :, ::2]


LAID = {
    "row-major": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": in_memory(0, 1, 3, 2),
    "another order": in_memory(3, 0, 2, 1),
    "a row-major part": as_part(lambda x: x),
    "a part of channels last": as_part(in_memory(0, 2, 3, 1)),
    "a part of another order": as_part(in_memory(3, 0, 2, 1)),
}  # fmt: skip


class TestTensors:
    def test_gives_sizes_and_then_the_tensor_itself(self):
        x = matrix(4, 7)
        *sizes, found = guard(matrix()).match((x,), {})
        assert sizes == [4, 7]
        assert found is x

    def test_sizes_of_all_tensors_come_before_all_tensors(self):
        x, y, count = matrix(), torch.zeros(5), 9
        flat = guard(x, count, y).match((x, count, y), {})
        assert flat[:4] == [2, 3, 9, 5]
        assert [value is given for value, given in zip(flat[4:], (x, y), strict=True)] == [True] * 2

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (matrix(dtype=torch.float64), "args[0]: another dtype, device, layout or number"),
            (torch.zeros(2), "args[0]: another dtype, device, layout or number of dims"),
            (torch.zeros(2, 3, device="meta"), "args[0]: another dtype, device"),
            (matrix().to_sparse(), "args[0]: another dtype, device, layout"),
            (matrix(requires_grad=True), "args[0]: requires_grad has changed"),
            (matrix().as_subclass(OwnTensor), "args[0]: got the tensor subclass OwnTensor"),
            (3, "args[0]: got int, captured with a tensor"),
            (None, "args[0]: got NoneType, captured with a tensor"),
            ([1.0], "args[0]: got list, captured with a tensor"),
        ],
    )
    def test_another(self, other, words):
        of_matrix = guard(matrix())
        assert of_matrix.match((other,), {}) is None
        assert of_matrix.mismatch((other,), {}).startswith(words)

    @pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag])
    def test_numbers_that_mean_something_else(self, lazy):
        x = torch.zeros(2, dtype=torch.complex64)
        assert lazy(x).is_conj() or lazy(x).is_neg()
        of_plain = guard(lazy(x).resolve_conj().resolve_neg())
        assert "layout" in of_plain.mismatch((lazy(x),), {})

    def test_requires_grad_means_nothing_without_grad(self):
        with torch.no_grad():
            of_matrix = guard(matrix())
            assert of_matrix.match((matrix(requires_grad=True),), {}) is not None

    def test_a_parameter_is_a_plain_tensor(self):
        x = matrix(requires_grad=True)
        assert guard(x).match((torch.nn.Parameter(matrix()),), {}) is not None

    @pytest.mark.parametrize("name", LAID)
    def test_the_order_of_dims_is_that_of_the_capture(self, name):
        """Parts of tensors are copied to dense ones, whose dims lie in the same order."""
        values = torch.arange(96.0).view(2, 4, 3, 4)
        given, dense = LAID[name](values), values.clone()
        for other, laid in LAID.items():
            has_order = memory_order(laid(values)) == memory_order(given)
            of_other = guard(laid(values))
            if not has_order:
                assert other != name
                assert of_other.match((given,), {}) is None
                assert of_other.mismatch((given,), {}) == (
                    "args[0]: its dims lie in another order in memory"
                )
                continue
            (found,) = of_other.match((given,), {})[4:]
            torch.testing.assert_close(found, values, rtol=0, atol=0)
            like = dense.permute(memory_order(given) or (0, 1, 2, 3)).contiguous()
            assert sorted(found.stride()) == sorted(like.stride())
            assert memory_order(found) == memory_order(given)
            assert (found is given) == ("part" not in name)

    @pytest.mark.parametrize("name", LAID)
    def test_the_order_of_dims_is_that_of_an_elementwise_result(self, name):
        given = LAID[name](torch.arange(96.0).view(2, 4, 3, 4))
        assert memory_order(given) == memory_order(given * 2)

    def test_tensors_without_numbers_have_any_order(self):
        of_columns = guard(torch.zeros(3, 2).t())
        assert of_columns.match((torch.zeros(0, 2),), {})[:2] == [0, 2]

    def test_a_copy_for_the_order_carries_gradients(self):
        x = torch.arange(12.0).view(2, 6).requires_grad_()
        captured = torch.zeros(3, 2).t().contiguous().t().requires_grad_()
        (found,) = guard(captured).match((x[:, ::2].t(),), {})[2:]
        (found * torch.arange(6.0).view(3, 2)).sum().backward()
        want = torch.zeros(2, 6)
        want[:, ::2] = torch.arange(6.0).view(3, 2).t()
        torch.testing.assert_close(x.grad, want)


class TestNumbers:
    @pytest.mark.parametrize("value", [0, 1, -3, 2**70])
    def test_any_integer_is_a_number_of_the_graph(self, value):
        assert guard(5).match((value,), {}) == [value]

    @pytest.mark.parametrize("other", [True, 5.0, "5", None, matrix(), Color.RED])
    def test_no_integer(self, other):
        assert guard(5).match((other,), {}) is None
        name = type(other).__name__
        assert guard(5).mismatch((other,), {}) == f"args[0]: got {name}, captured with an integer"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_float_becomes_a_tensor(self, dtype):
        (found,) = takes(("number", dtype)).match((0.1,), {})
        torch.testing.assert_close(found, torch.tensor(0.1, dtype=dtype), rtol=0, atol=0)

    @pytest.mark.parametrize("other", [1, True, None, "1.0", matrix()])
    def test_no_float(self, other):
        of_float = takes(("number", torch.float32))
        assert of_float.match((other,), {}) is None
        words = f"args[0]: got {type(other).__name__}, captured with a float"
        assert of_float.mismatch((other,), {}) == words


CONSTANTS = [
    None, True, False, 1.5, 2j, "mean", b"raw", torch.float16, CPU, torch.channels_last,
    torch.strided, Color.RED, slice(1, None), range(3), int, ...,
]  # fmt: skip


class TestConstants:
    @pytest.mark.parametrize("value", CONSTANTS, ids=repr)
    def test_the_same(self, value):
        assert guard(value).match((value,), {}) == []
        assert guard(value).mismatch((value,), {}) == ""

    @pytest.mark.parametrize("value", CONSTANTS, ids=repr)
    def test_all_others_differ(self, value):
        for other in CONSTANTS:
            if other is not value:
                assert guard(value).match((other,), {}) is None
                words = f"args[0]: got {other!r}, captured with {value!r}"
                assert guard(value).mismatch((other,), {}) == words

    def test_equal_strings_need_not_be_one_object(self):
        other = "".join(["me", "an"])
        assert other is not CONSTANTS[5]
        assert guard("mean").match((other,), {}) == []

    @pytest.mark.parametrize(("value", "other"), [(1.0, 1), (1.0, True), (True, 1), (0.0, False)])
    def test_equal_values_of_other_types_differ(self, value, other):
        assert guard(value).match((other,), {}) is None

    @pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (-0.0, 0.0), (0j, -0j)])
    def test_zeros_of_another_sign_differ(self, value, other):
        assert guard(value).match((other,), {}) is None

    def test_an_error_of_a_comparison_comes_through(self):
        of_odd = takes(("constant", Refuses()))
        for ask in (of_odd.match, of_odd.mismatch):
            with pytest.raises(ArithmeticError, match="not to be compared"):
                ask((Refuses(),), {})


class TestInAModule:
    """What a capture bakes in shows in a module's numbers."""

    def test_zeros_of_another_sign(self):
        module = ORTModule(module_with(lambda self, x, by: x / by))
        for by in (0.0, -0.0):
            torch.testing.assert_close(module(torch.ones(2), by), torch.ones(2) / by)

    def test_numbers_of_another_type_in_a_list(self):
        class Scales(torch.nn.Module):
            def forward(self, x):
                return x * self.factors[0]

        module, x = ORTModule(Scales()), torch.ones(2, dtype=torch.int64)
        for factor in (1, 1.0):
            module.factors = [factor]
            torch.testing.assert_close(module(x), x * factor)


class TestContainers:
    @pytest.mark.parametrize(
        "value",
        [
            (), [], {}, (1,), [1, [2, (3,)]], Pair(1, 2), torch.Size([1, 2]),
            {"a": 1, 2: [3]}, collections.OrderedDict(a=1), OwnDict(a=1, b=2), Batch(1),
            Batch([1, {"x": 2}], scale=None), {"nested": Batch(Pair(1, [2]))},
        ],
        ids=repr,
    )  # fmt: skip
    def test_its_own_call(self, value):
        of_value = guard(value)
        assert of_value.mismatch((value,), {}) == ""
        assert of_value.match((value,), {}) == Structure(value, "").leaves

    @pytest.mark.parametrize(
        ("value", "other", "words"),
        [
            ([1], (1,), "args[0]: got tuple, captured with <class 'list'>"),
            ((1,), [1], "args[0]: got list, captured with <class 'tuple'>"),
            (Pair(1, 2), (1, 2), "args[0]: got tuple, captured with <class '.*Pair'>"),
            ({"a": 1}, collections.OrderedDict(a=1), "args[0]: got collections.OrderedDict"),
            (Batch(1), {"ids": 1}, "args[0]: got dict, captured with <class '.*Batch'>"),
            ([1], [1, 2], "args[0]: got 2 parts, captured with 1"),
            ([1, 2], [], "args[0]: got 0 parts, captured with 2"),
            ({"a": 1}, {"a": 1, "b": 2}, "args[0]: got 2 parts, captured with 1"),
            ({"a": 1}, {"b": 1}, "args[0]: other keys, or in another order"),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "args[0]: other keys, or in another order"),
            (OwnDict(a=1, b=2), OwnDict(b=2, a=1), "args[0]: other keys, or in another order"),
            ([1, [2]], [1, [None]], "args[0][1][0]: got NoneType, captured with an integer"),
            ({"a": {"b": 1}}, {"a": {"b": "x"}}, "args[0]['a']['b']: got str, captured with an"),
            (Batch(1), Batch(matrix()), "args[0]['ids']: got Tensor, captured with an integer"),
            (Batch(1), Batch(1, scale=2.0), "args[0]['scale']: got 2.0, captured with 1.0"),
        ],
    )
    def test_another(self, value, other, words):
        of_value = guard(value)
        assert of_value.match((other,), {}) is None
        start, _, end = words.partition(".*")
        got = of_value.mismatch((other,), {})
        assert got.startswith(start)
        assert end in got

    def test_arguments_by_position_and_by_name(self):
        of_call = guard(1, 2, name=3)
        assert of_call.match((4, 5), {"name": 6}) == [4, 5, 6]
        assert of_call.mismatch((4,), {"name": 6}) == "args: got 1 parts, captured with 2"
        assert of_call.mismatch((4, 5), {}) == "kwargs: got 0 parts, captured with 1"
        assert of_call.mismatch((4, 5), {"name": "x"}).startswith("kwargs['name']: got str")

    def test_a_missing_attribute_is_an_error(self):
        broken = Batch(1)
        del broken.ids
        with pytest.raises(AttributeError, match="ids"):
            guard(Batch(1)).match((broken,), {})

    def test_names_have_no_order(self):
        args, kwargs = described(a=1, b=2)
        of_names = CallGuard((args, ("named", *kwargs[1:])), [], [])
        assert of_names.match((), {"b": 2, "a": 1}) == [1, 2]
        assert of_names.mismatch((), {"a": 1, "c": 2}) == "kwargs: has no 'b'"

    def test_a_mapping_of_ones_own_may_lack_a_key_that_it_lists(self):
        class Lying(OwnDict):
            def __getitem__(self, key):
                raise KeyError(key)

        empty = ("constant", None)
        of_lying = takes(("mapping", Lying, ("a",), (empty,)))
        assert of_lying.match((Lying(a=None),), {}) is None
        assert of_lying.mismatch((Lying(a=None),), {}) == "args[0]: has no 'a'"


ALL_FUSED = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
]  # fmt: skip
MODES = {
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order": lambda: sdpa_kernel([SDPBackend.MATH, *ALL_FUSED], set_priority=True),
}


class TestModes:
    @pytest.mark.parametrize("mode", MODES)
    def test_noticed_both_ways(self, mode):
        outside = guard(1)
        with MODES[mode]():
            inside = guard(1)
            assert inside.match((1,), {}) == [1]
            assert outside.match((1,), {}) is None
            assert outside.mismatch((1,), {}).endswith("allowed for attention have changed")
        assert outside.match((1,), {}) == [1]
        assert inside.match((1,), {}) is None

    def test_the_dtype_of_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            inside = guard(1)
        with torch.autocast("cpu", torch.float16):
            assert inside.match((1,), {}) is None

    def test_the_default_dtype(self):
        inside = guard(1)
        torch.set_default_dtype(torch.float64)
        try:
            assert inside.match((1,), {}) is None
        finally:
            torch.set_default_dtype(torch.float32)

    def test_deterministic_algorithms(self):
        inside = guard(1)
        torch.use_deterministic_algorithms(True)
        try:
            assert inside.match((1,), {}) is None
        finally:
            torch.use_deterministic_algorithms(False)


class TestState:
    def test_the_tensors_that_hang_there_at_the_call(self):
        held, listed = {"w": matrix()}, [torch.zeros(3)]
        of_state = guard(1, torch.zeros(1), state=[(held, "w", 0), (listed, 0, 1)])
        held["w"], listed[0] = matrix() + 1, torch.ones(3)
        x = torch.zeros(5)
        flat = of_state.match((7, x), {})
        assert flat[:2] == [7, 5]
        assert flat[2] is held["w"]
        assert flat[3] is listed[0]
        assert flat[4] is x

    @pytest.mark.parametrize(
        "other",
        [
            matrix(2, 4),
            matrix(3, 2).t(),
            matrix(dtype=torch.float64),
            matrix(requires_grad=True),
            torch.zeros(2, 3, device="meta"),
        ],
    )
    def test_another_kind(self, other):
        held = {"w": matrix()}
        of_state = guard(state=[(held, "w", 0)])
        held["w"] = other
        assert of_state.match((), {}) is None
        words = "tensor 'w' of the module has another dtype, device, shape or requires_grad"
        assert of_state.mismatch((), {}) == words

    @pytest.mark.parametrize("other", [None, 3])
    def test_no_tensor_any_more(self, other):
        held = {"w": matrix()}
        of_state = guard(state=[(held, "w", 0)])
        held["w"] = other
        assert of_state.mismatch((), {}) == "tensor 'w' of the module is gone"

    def test_a_place_that_is_gone(self):
        held, listed = {"w": matrix()}, [matrix()]
        of_dict, of_list = guard(state=[(held, "w", 0)]), guard(state=[(listed, 0, 0)])
        held.clear()
        listed.clear()
        assert of_dict.mismatch((), {}) == "tensor 'w' of the module is gone"
        assert of_list.mismatch((), {}) == "tensor 0 of the module is gone"

    def test_shared_places_stay_shared(self):
        shared = matrix()
        held = {"a": shared, "b": shared}
        of_state = guard(state=[(held, "a", 0), (held, "b", 0)])
        (found,) = of_state.match((), {})
        assert found is shared
        held["b"] = shared.clone()
        assert of_state.mismatch((), {}) == "tensor 'b' of the module is shared no more"
        held["a"] = held["b"]
        assert of_state.match((), {}) is not None


LIST = [1]


class TestReads:
    def test_identity(self):
        thing = object()
        held = {"a": thing}
        of_held = of_read(held, "a", "is", thing)
        assert of_held.match((), {}) == []
        held["a"] = object()
        assert of_held.mismatch((), {}) == "what was read has changed"
        del held["a"]
        assert of_held.match((), {}) is None

    def test_equality(self):
        held = {"a": [1, "x"]}
        of_held = of_read(held, "a", "equals", [1, "x"])
        assert of_held.match((), {}) == []
        held["a"].append(2)
        words = "what was read has changed from [1, 'x'] to [1, 'x', 2]"
        assert of_held.mismatch((), {}) == words
        del held["a"]
        assert of_held.mismatch((), {}) == "what was read has changed"

    @pytest.mark.parametrize("other", [1.0, True, "1", None])
    def test_equality_tells_types_apart(self, other):
        held = {"a": other}
        words = f"what was read has changed from 1 to {other!r}"
        assert of_read(held, "a", "equals", 1).mismatch((), {}) == words

    @pytest.mark.parametrize("other", [[1.0], [True]])
    def test_equality_tells_types_apart_inside(self, other):
        assert of_read({"a": other}, "a", "equals", [1]).match((), {}) is None

    def test_absence(self):
        held = {}
        of_held = of_read(held, "a", "absent", None)
        assert of_held.match((), {}) == []
        held["a"] = None
        assert of_held.mismatch((), {}) == "what was read has changed"

    @pytest.mark.parametrize("container", [{1: 2}, [3], (4,), {5}])
    def test_size(self, container):
        assert of_read(container, None, "size", 1).match((), {}) == []
        assert of_read(container, None, "size", 2).mismatch((), {}) == "what was read has changed"

    def test_items(self):
        first, second = object(), object()
        held = {"hooks": {1: first, 2: second}}
        of_held = of_read(held, "hooks", "items", (first, second))
        assert of_held.match((), {}) == []
        held["hooks"] = {7: first, 9: second}  # by values alone
        assert of_held.match((), {}) == []
        for other in ({1: second, 2: first}, {1: first}, [first, second], None):
            held["hooks"] = other
            assert of_held.mismatch((), {}) == "what was read has changed"
        del held["hooks"]
        assert of_held.match((), {}) is None

    def test_all_have_to_hold(self):
        held = {"a": 1, "b": 2}
        rows = [(held, name, "equals", held[name], f"attribute {name}") for name in "ab"]
        of_held = guard(reads=rows)
        held["b"] = 3
        assert of_held.mismatch((), {}) == "attribute b has changed from 2 to 3"

    def test_in_a_list(self):
        held = [0, "x"]
        of_held = of_read(held, 1, "equals", "x")
        assert of_held.match((), {}) == []
        held.pop()
        assert of_held.match((), {}) is None

    def test_an_error_of_a_comparison_comes_through(self):
        with pytest.raises(ArithmeticError, match="not to be compared"):
            of_read({"a": Refuses()}, "a", "equals", Refuses()).match((), {})


NOTHING = ("sequence", tuple, (), ())
NO_NAMES = ("named", dict, (), ())
TENSOR = ("tensor", torch.float32, CPU, 2, False, [])
ONE_INTEGER = (("integer",),)


def inputs(first: Any) -> tuple:
    return (("sequence", tuple, (), (first,)), NO_NAMES)


def made(state: Any = (), reads: Any = ()) -> CallGuard:
    return CallGuard((NOTHING, NO_NAMES), list(state), list(reads))


BROKEN = {
    "inputs are None": lambda: CallGuard(None, [], []),
    "inputs are a number": lambda: CallGuard(5, [], []),
    "inputs without names": lambda: CallGuard((NOTHING,), [], []),
    "an empty description": lambda: CallGuard(((), NO_NAMES), [], []),
    "a kind that is no string": lambda: CallGuard(((3,), NO_NAMES), [], []),
    "a tensor without a device": lambda: CallGuard(inputs(TENSOR[:2]), [], []),
    "a dtype that is none": lambda: CallGuard(inputs(("tensor", "f", *TENSOR[2:])), [], []),
    "an order that is no list": lambda: CallGuard(inputs((*TENSOR[:5], "odd")), [], []),
    "an order of other dims": lambda: CallGuard(inputs((*TENSOR[:5], [0, 0])), [], []),
    "a number without a dtype": lambda: CallGuard(inputs(("number",)), [], []),
    "a constant without a value": lambda: CallGuard(inputs(("constant",)), [], []),
    "parts that are a number": lambda: CallGuard(inputs(("sequence", list, (), 5)), [], []),
    "keys that are a number": lambda: CallGuard(inputs(("mapping", dict, 5, ())), [], []),
    "state that is no list": lambda: CallGuard((NOTHING, NO_NAMES), 5, []),
    "a row of state that is none": lambda: made(state=[5]),
    "a short row of state": lambda: made(state=[({},)]),
    "a position too far on": lambda: made(state=[({"a": matrix()}, "a", 1)]),
    "a position below 0": lambda: made(state=[({"a": matrix()}, "a", -1)]),
    "a place without a tensor": lambda: made(state=[({"a": 3}, "a", 0)]),
    "a place in a number": lambda: made(state=[(3, "a", 0)]),
    "a read that is no row": lambda: made(reads=[5]),
    "a short read": lambda: made(reads=[({}, "a")]),
    "a size that is no number": lambda: made(reads=[({}, None, "size", "x", "words")]),
    "items that are a number": lambda: made(reads=[({}, "a", "items", 4, "words")]),
    "words that are no string": lambda: made(reads=[({}, "a", "is", 4, 5)]),
    "a size of a number": lambda: of_read(3, None, "size", 1).match((), {}),
    "a read in a number": lambda: of_read(3, "a", "is", 1).match((), {}),
    "a key that cannot be hashed": lambda: of_read({}, [], "is", 1).match((), {}),
    "a string as key of a list": lambda: of_read([1], "a", "is", 1).match((), {}),
    "arguments in a list": lambda: made().match([], {}),
    "names in a list": lambda: made().match((), []),
}

# Each writes or reads outside of an array, or through a null pointer.
CRASHES = {
    "names without keys": lambda: CallGuard(
        (NOTHING, ("named", dict, (), ONE_INTEGER)), [], []
    ).match((), {"a": 1}),
    "attributes without keys": lambda: CallGuard(
        inputs(("attributes", Batch, (), ONE_INTEGER)), [], []
    ).match((Batch(1),), {}),
    "state at a missing key": lambda: made(state=[({}, "a", 0)]),
    "state past the end of a list": lambda: made(state=[([matrix()], 1, 0)]),
    "state before the start of a list": lambda: made(state=[([matrix()], -(2**40), 0)]),
    "a read before the start of a list": lambda: of_read([1], -(2**40), "is", 4).match((), {}),
}
SILENT = {
    "an unknown kind": lambda: CallGuard(inputs(("bogus", tuple, (), ())), [], []),
    "an unknown comparison": lambda: made(reads=[({}, "a", "odd", (), "words")]),
}


class TestMalformed:
    @pytest.mark.parametrize("name", BROKEN)
    def test_raises(self, name):
        with pytest.raises((InternalError, IndexError, TypeError, RuntimeError, SystemError)):
            BROKEN[name]()

    @pytest.mark.parametrize("name", SILENT)
    def test_unknown_words_raise(self, name):
        with pytest.raises(Exception, match=r"bogus|odd"):
            SILENT[name]()

    @pytest.mark.parametrize("name", CRASHES)
    def test_does_not_crash(self, name):
        assert exit_status_of_child(CRASHES[name]) == RAISED


RAISED = 7


def exit_status_of_child(call: Callable[[], Any]) -> int:
    """Run something in a copy of this process; give RAISED if it raises, or minus the signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            call()
        except Exception:
            os._exit(RAISED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Marker:
    """An object of which references are counted."""


def references(things: list) -> list[int]:
    gc.collect()
    return [sys.getrefcount(thing) for thing in things]


def call_with_everything() -> tuple[CallGuard, tuple, dict, list]:
    """Give a guard that compares in all ways, a call that fits, and what these refer to."""
    x, odd, w, marker, name = matrix(), matrix(3, 2).t(), matrix(), Marker(), "n" * 50
    number = 2**80
    hooks = {1: marker}
    own = {"w": w, "hooks": hooks, "m": marker, "list": [name, 2.5]}
    args = (x, odd, number, [name, Pair(x, None)], OwnDict(k=x), Batch(number, name))
    kwargs = {"k": {"z": number}, "f": 1.5}
    reads = [
        (own, "m", "is", marker, "identity"),
        (own, "list", "equals", [name, 2.5], "equality"),
        (own, "gone", "absent", None, "absence"),
        (own, None, "size", 4, "size"),
        (own, "hooks", "items", (marker,), "items"),
    ]
    of_call = CallGuard(
        described(*args, numbers=frozenset(["[1]['f']"]), **kwargs), [(own, "w", 0)], reads
    )
    return of_call, args, kwargs, [x, odd, w, marker, name, number, own, hooks, *args, kwargs]


class TestReferences:
    def test_matches_leave_none_behind(self):
        of_call, args, kwargs, things = call_with_everything()
        assert of_call.mismatch(args, kwargs) == ""
        before = references(things)
        for _ in range(500):
            assert of_call.match(args, kwargs) is not None
            of_call.mismatch(args, kwargs)
        assert references(things) == before

    @pytest.mark.parametrize("at", [0, 3, 5])
    def test_mismatches_leave_none_behind(self, at):
        of_call, args, kwargs, things = call_with_everything()
        wrong = (*args[:at], Marker, *args[at + 1 :])
        before = references([*things, Marker])
        for _ in range(500):
            assert of_call.match(wrong, kwargs) is None
            assert of_call.mismatch(wrong, kwargs)
        assert references([*things, Marker]) == before

    def test_errors_leave_none_behind(self):
        things = [matrix(), Refuses(), Refuses()]
        of_odd = guard(things[0], reads=[({"a": things[1]}, "a", "equals", things[2], "words")])
        before = references(things)
        for _ in range(100):
            with pytest.raises(ArithmeticError):
                of_odd.match((things[0],), {})
        assert references(things) == before

    def test_what_a_match_gave_lives_on_its_own(self):
        of_call, args, kwargs, things = call_with_everything()
        before = references(things)
        flat = of_call.match(args, kwargs)
        del of_call
        assert sum(value is things[0] for value in flat) == 3
        flat.clear()
        assert all(a <= b for a, b in zip(references(things), before, strict=True))

    def test_a_guard_lets_go_of_what_it_was_made_from(self):
        marker, container = Marker(), {"w": matrix(), "m": 0}
        before = references([marker, container])
        rows = [(container, "m", "is", marker, "words")]
        made = [guard(1, state=[(container, "w", 0)], reads=rows) for _ in range(10)]
        assert references([marker, container]) > before
        made.clear()
        rows.clear()
        assert references([marker, container]) == before


class TestThreads:
    def test_matches_at_once(self):
        of_call, args, kwargs, things = call_with_everything()
        wrong = (*args[:2], None, *args[3:])
        before = references(things)
        start, failures = threading.Barrier(8), []

        def work(number: int) -> None:
            start.wait()
            for i in range(300):
                is_right = (i + number) % 2 == 0
                flat = of_call.match(args if is_right else wrong, kwargs)
                if (flat is not None) != is_right or (flat and flat[-2] is not args[0]):
                    failures.append((number, i, flat))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert references(things) == before

    def test_each_thread_has_its_own_modes(self):
        of_call, found = guard(1), []

        def ask() -> None:
            found.append(of_call.match((1,), {}))

        with torch.no_grad():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            assert of_call.match((1,), {}) is None
        assert found == [[1]]
