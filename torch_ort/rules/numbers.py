"""Numbers of the user's Python that may differ from call to call, while a graph is recorded.

A temperature, the weight of a loss or a counter of steps stands in the recorded program as a
torch.SymFloat or torch.SymInt over a `Number`: a small expression over numbers that each call
brings. So does a float that is computed from sizes, by the user's Python or by PyTorch's formula
for a gradient. Arithmetic makes new expressions. What Python or PyTorch asks of one, as a branch
does, is answered by its value in this call, and becomes a condition of the graph. Where an operator
takes a number beside its tensors, the graph gets a 0-d tensor that it computes from those of the
call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.core.refusals import HandOver, NoCapture
from torch_ort.pytorch.dispatch_compat import Leaf, is_functionalized, unwrapped
from torch_ort.pytorch.graph_compat import schema
from torch_ort.pytorch.size_compat import NodeOfSizes
from torch_ort.rules.forms import Spec, spec_of
from torch_ort.rules.pointwise import dtype_with

aten = torch.ops.aten
Value = bool | int | float


class Conditions:
    """What was asked of the numbers in one recording: expressions, and the answers."""

    def __init__(self) -> None:
        self._asked: dict[Number, Value] = {}
        self._computed: list[Number] = []  # by the graph, which knows no errors of Python's

    def add(self, number: Number) -> Value:
        """Give the value of an expression, which other calls of the graph have to share."""
        if number.is_of_data:
            raise HandOver(f"{number} depends on numbers")
        if number.is_open:
            self._asked.setdefault(number, number.value)
        return number.value

    def add_computed(self, number: Number) -> None:
        """Note an expression that the graph computes: it has to be one that Python can compute."""
        if not number.is_open or number.function is None:
            return
        if not _is_like(number.value, number.value):
            raise NoCapture(f"{number} is no integer of 64 bits")
        self._computed.append(number)
        if number.function in _DEFINED:
            number.made(_DEFINED[number.function], *number.operands).asked()

    def __bool__(self) -> bool:
        return bool(self._asked or self._computed)

    def __str__(self) -> str:
        asked = [
            str(number) if value is True else f"not {number}" if value is False
            else f"{number} == {value}"
            for number, value in self._asked.items()
        ]  # fmt: skip
        return " and ".join([*asked, *(f"{number} is computable" for number in self._computed)])

    def hold(self, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> bool:
        """Tell whether numbers give the same answers; they may be symbols of PyTorch's.

        Numbers and symbols of sizes have names. Those for which an expression is undefined give
        none. Symbols become constants where PyTorch's arithmetic on them is not Python's.
        """
        try:
            return all(
                _is_same(number.of(values, sizes, not number.is_exact), value)
                for number, value in self._asked.items()
            )
        except (ArithmeticError, ValueError):
            return False

    def hold_for(self, values: Mapping[str, Value], sizes: Mapping[str, int]) -> bool:
        """Tell whether a graph may serve a call with these numbers of Python, and these sizes.

        Python's integers have no bounds, and it raises errors where tensors have infinities.
        """
        try:
            return self.hold(values, sizes) and all(
                _is_like(number.of(values, sizes), number.value)
                for number in self._computed
                if not number.is_of_data
            )
        except (ArithmeticError, ValueError):
            return False


class _Recording(threading.local):
    conditions: Conditions | None = None


_recording = _Recording()


@contextlib.contextmanager
def conditions_collected() -> Iterator[Conditions]:
    """Collect what is asked in the block of numbers that are made in it."""
    before, _recording.conditions = _recording.conditions, Conditions()
    try:
        yield _recording.conditions
    finally:
        _recording.conditions = before


def conditions_of_recording() -> Conditions:
    """Give what collects the conditions of numbers that are made now."""
    return Conditions() if _recording.conditions is None else _recording.conditions


def _is_like(found: Any, value: Value) -> bool:
    """Tell whether a number has the type of another one, and fits into a tensor's element."""
    return type(found) is type(value) and (type(found) is not int or -(2**63) <= found < 2**63)


def _is_same(found: Any, value: Value) -> bool:
    if isinstance(value, bool):
        return bool(found) == value
    if type(found) is float and type(value) is float:  # 0.0 and -0.0 are two numbers, NaN is one
        return struct.pack("d", found) == struct.pack("d", value)
    return bool(found == value)


class Number:
    """An expression over numbers of calls, as the node of a torch.SymInt, SymFloat or SymBool.

    `value` is its value in the call that is recorded. The names of the methods that are called by
    PyTorch are PyTorch's.
    """

    def __init__(
        self, value: Value, conditions: Conditions, words: str = "",
        function: Callable[..., Value] | None = None, operands: Sequence[Number] = (),
        source: torch.Tensor | torch.SymInt | None = None,
    ) -> None:  # fmt: skip
        self.value = value
        self.conditions = conditions
        self.words = words  # the name of a number that calls bring
        self.function = function  # of Python's, that computes this from `operands`
        self.operands = operands
        self.source = source  # a number that calls bring: a 0-d tensor, or one that is a size
        # Whether the value may differ between calls.
        self.is_open = source is not None or any(each.is_open for each in operands)
        # Whether only data tells it.
        self.is_of_data = any(each.is_of_data for each in operands)
        # Whether it depends on nothing but sizes of tensors.
        self.is_of_sizes = source is None and all(each.is_of_sizes for each in operands)

    def of(
        self, values: Mapping[str, Any], sizes: Mapping[str, Any], is_constant: bool = False
    ) -> Any:  # fmt: skip
        """Compute the expression from numbers and sizes of a call, by name.

        `is_constant` asks symbols of PyTorch's for their values, which become constants.
        """
        if self.function is not None:
            return self.function(*(each.of(values, sizes, is_constant) for each in self.operands))
        value = self._brought(values, sizes) if self.is_open else self.value
        return _constant_of(value) if is_constant else value

    def _brought(self, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
        return values[self.words]

    @property
    def is_exact(self) -> bool:
        """Tell whether PyTorch's arithmetic on symbols gives the number that Python's does.

        Its floats are real numbers, whose order of operations it changes, and it rounds negative
        quotients another way. Integers, and what compares them or one quotient of theirs, are safe.
        """
        if self.function is None:
            return True
        operands = self.operands
        if self.function in _COMPARISONS:
            return all(each.is_exact or each.is_quotient for each in operands)
        is_of_integers = self.function in _OF_SIZES or self.function is torch.sym_float
        return is_of_integers and all(each.is_int() and each.is_exact for each in operands)

    @property
    def is_quotient(self) -> bool:
        """Tell whether it is a quotient of integers that are exact."""
        return self.function is operator.truediv and all(
            each.is_exact and float(each.value).is_integer() for each in self.operands
        )

    def as_size(self) -> Any:
        """Compute an integer from sizes; one that comes as a tensor is that of this call."""
        if isinstance(self.source, torch.SymInt):
            return self.source
        function = _OF_SIZES.get(self.function)
        if function is None or not all(each.is_int() for each in self.operands):
            return self.asked()
        return function(*(each.as_size() for each in self.operands))

    def __str__(self) -> str:
        if self.function is None:
            return self.words or repr(self.value)
        name = self.function.__name__.lstrip("_")
        return f"{name}({', '.join(map(str, self.operands))})"

    # ---- what PyTorch asks of a node

    def is_int(self) -> bool:
        """Tell PyTorch the type."""
        return type(self.value) is int

    def is_float(self) -> bool:
        """Tell PyTorch the type."""
        return type(self.value) is float

    def is_bool(self) -> bool:
        """Tell PyTorch the type."""
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        """Tell PyTorch that this is no size of a nested tensor."""
        return False

    def is_constant(self) -> bool:
        """Tell PyTorch that it has to ask for the value."""
        return False

    def is_symbolic(self) -> bool:
        """Tell PyTorch that the value may differ."""
        return True

    def has_hint(self) -> bool:
        """Tell PyTorch that the value in this call is known."""
        return True

    @property
    def hint(self) -> Value:
        """The value in this call."""
        return self.value

    def maybe_as_int(self) -> int | None:
        """Give the value to PyTorch where it is the same in all calls."""
        return self.value if self.is_int() and not self.is_open else None

    def str(self) -> str:
        """Give the text of the value, which other calls have to share."""
        return repr(self.asked())

    _graph_repr = str

    def clone(self) -> Number:
        """Give a node of its own to PyTorch, which never changes one."""
        return self

    def wrap_int(self, value: int) -> Number:
        """Give a node for a constant."""
        return Number(value, self.conditions)

    wrap_float = wrap_bool = wrap_int

    def asked(self, *where: Any) -> Value:
        """Give the value, which becomes a condition of the graph."""
        return self.conditions.add(self)

    guard_int = guard_float = guard_bool = guard_size_oblivious = asked
    guard_or_false = guard_or_true = expect_true = int_ = asked

    def bool_(self) -> bool:
        """Tell whether it is true, which becomes a condition of the graph."""
        return bool((self if self.is_bool() else self.made(bool, self)).asked())

    def statically_known_true(self, *where: Any) -> bool:
        """Tell PyTorch whether a condition holds in all calls."""
        return not self.is_open and bool(self.value)

    def round(self, digits: int | None = None) -> Number:
        """Compute on symbols."""
        return self.made(round, self) if digits is None else self.made(round, self, digits)

    def sym_sum(self, terms: Sequence[Any]) -> Number:
        """Compute on symbols."""
        return functools.reduce(lambda a, b: self.made(operator.add, a, b), terms)

    def made(self, function: Callable[..., Value], *operands: Any) -> Number:
        """Compute on symbols.

        Where Python raises an error, no graph may serve the call: another one has to raise it.
        """
        numbers = [_number(each, self.conditions) for each in operands]
        try:
            value = function(*(each.value for each in numbers))
        except (ArithmeticError, ValueError) as error:
            raise NoCapture(f"Python raises {type(error).__name__}: {error}") from error
        if isinstance(value, complex):
            raise NoCapture("a complex number is computed of numbers of the call")
        return Number(value, self.conditions, function=function, operands=numbers)

    def __getattr__(self, name: str) -> Callable[..., Number]:
        if name not in _FUNCTIONS:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return lambda *others: self.made(_FUNCTIONS[name], self, *others)


class _Size(Number):
    """An expression over symbols of sizes. Its words are its text in Python."""

    source: torch.SymInt

    def __init__(self, size: torch.SymInt, conditions: Conditions) -> None:
        text = _C.python_text(size)
        super().__init__(_C.size_value(size), conditions, text, source=size)
        self.is_of_data = _C.depends_on_data(size)
        self.is_of_sizes = True
        self._code = compile(text, "<size>", "eval")

    def _brought(self, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
        return eval(self._code, {"min": torch.sym_min, "max": torch.sym_max}, sizes)


def _constant_of(value: Any) -> Value:
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value


def of_size(size: torch.SymInt, is_float: bool = False) -> Number:
    """Give the number that a size of a recording is."""
    number = _Size(size, conditions_of_recording())
    return number.made(torch.sym_float, number) if is_float else number


def computed(method: str, *operands: Number | Value) -> Number:
    """Compute on numbers, of which one depends on sizes, by the name of a method of a node."""
    first, *rest = (_number(each, conditions_of_recording()) for each in operands)
    return first.made(_FUNCTIONS[method], first, *rest)


def _number(value: Any, conditions: Conditions) -> Number:
    if isinstance(value, Number):
        return value
    if isinstance(value, bool | int | float):
        return Number(value, conditions)
    if not isinstance(value, NodeOfSizes):
        raise HandOver("a size and a number of the call are combined outside of tensors")
    number = _C.number_in(value)
    if number is not None:
        return number
    if value.is_int():
        return of_size(torch.SymInt(value))
    known = _C.known_float(torch.SymFloat(value))
    return (
        of_size(torch.SymInt(value.floor()), True) if known is None else Number(known, conditions)
    )


def _both(a: bool, b: bool) -> bool:
    return a and b


def _either(a: bool, b: bool) -> bool:
    return a or b


def _is_integer(value: float) -> bool:
    return value.is_integer()


def _has_quotient(a: float, b: float) -> bool:
    return b != 0


def _has_power(a: float, b: float) -> bool:
    return not (a == 0 and b < 0) and not (a < 0 and b % 1 != 0)


def _has_root(a: float) -> bool:
    return not a < 0


def _has_logarithm(a: float) -> bool:
    return not a <= 0


def _has_angle(a: float) -> bool:
    return not (a < -1 or a > 1)


def _is_angle(a: float) -> bool:
    return abs(a) != math.inf


def _has_exponential(a: float) -> bool:
    return not a > _LARGEST_EXPONENT


def _has_hyperbolic(a: float) -> bool:
    return not abs(a) > _LARGEST_EXPONENT  # a little less than what Python allows


_LARGEST_EXPONENT = math.log(sys.float_info.max)
# Where Python computes numbers; elsewhere it raises errors, or gives complex numbers.
_DEFINED: dict[Any, Callable[..., bool]] = {
    operator.truediv: _has_quotient, operator.floordiv: _has_quotient,
    operator.mod: _has_quotient, operator.pow: _has_power, math.sqrt: _has_root,
    math.log: _has_logarithm, math.log2: _has_logarithm, math.asin: _has_angle,
    math.acos: _has_angle, math.sin: _is_angle, math.cos: _is_angle, math.tan: _is_angle,
    math.exp: _has_exponential, math.sinh: _has_hyperbolic, math.cosh: _has_hyperbolic,
}  # fmt: skip
_MATH = (
    "sqrt", "exp", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos",
    "atan",
)  # fmt: skip
# By the names of PyTorch's nodes.
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "pos": operator.pos, "abs": operator.abs, "mod": operator.mod,
    "floordiv": operator.floordiv, "int_floordiv": operator.floordiv,
    "truediv": operator.truediv, "int_truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "pow": operator.pow, "float_pow": operator.pow, "pow_by_natural": operator.pow,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
    "sym_min": min, "sym_max": max, "sym_float": torch.sym_float, "sym_int": int,
    "sym_not": operator.not_, "sym_and": _both, "sym_or": _either, "is_integer": _is_integer,
    "and_": operator.and_, "or_": operator.or_, "bitwise_and": operator.and_,
    "bitwise_or": operator.or_, "bitwise_xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
    **{f"sym_{name}": getattr(math, name) for name in _MATH},
}  # fmt: skip


def number_for(
    value: int | float, name: str, source: torch.Tensor | torch.SymInt, conditions: Conditions
) -> Any:
    """Give what stands for a number that each call brings, as a 0-d tensor or as a symbol."""
    number = Number(value, conditions, name, source=source)
    return torch.SymFloat(number) if type(value) is float else torch.SymInt(number)


def number_tensor(value: Any) -> torch.Tensor | None:
    """Give a 0-d tensor of a number that a recorded function returns; None for all other values."""
    number = node_of_number(value)
    if number is None:
        return None
    dtype = torch.float64 if number.is_float() else torch.int64
    if number.is_bool():
        return torch.scalar_tensor(number.asked(), dtype=torch.bool)
    return torch.scalar_tensor(value, dtype=dtype)


def node_of_number(value: Any) -> Number | None:
    """Give the expression behind a number of the recorded program; None for all other values."""
    if type(value) not in _SYMBOLIC:
        return None
    node = value.node
    return node if isinstance(node, Number) else _C.number_in(node)


_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)


def has_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of an operator has numbers among its arguments."""
    return any(map(_has_number, args)) or any(map(_has_number, kwargs.values()))


def _has_number(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_number, value))
    return node_of_number(value) is not None


def answered(
    answer: Callable[[Any, tuple, dict], Any], form: Callable[[Any, tuple, dict], Any], func: Any,
    args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Answer a call of an operator that has numbers as arguments.

    `answer` answers one that has none, `form` gives the form of its result. Where the operator, or
    an equal one, takes tensors in place of the numbers, it gets 0-d tensors, and gives what it
    would give for numbers of Python; elsewhere the graph is one for these numbers alone.
    """
    if func in _FILLED:
        return _filled(answer, form, func, args, kwargs)
    plain, named = _plain(args), _plain(kwargs)
    form_of_tensors = _FORMS.get(func, _same if torch.Tag.pointwise in func.tags else None)
    call = form_of_tensors(func, args, kwargs) if form_of_tensors else None
    if call is None:
        return answer(func, _asked(args), _asked(kwargs))
    func_of_tensors, given, rest = call
    if "alpha" in rest:
        factor = rest.pop("alpha")
        given = (given[0], answer(aten.mul.Tensor, (given[1], factor), {}))
    result = form(func, plain, named)
    operands = [_spec(each) for each in given if isinstance(each, torch.Tensor)]
    values = [each for each in plain if isinstance(each, int | float)]
    dtype = _dtype_of_operands(operands, values, result)

    def tensor(value: Any) -> Any:
        number = node_of_number(value)
        if number is None and not (isinstance(value, int | float) and func in _FORMS):
            return value
        made = _tensor_of(answer, number) if number else _constant(answer, value, dtype)
        return _as_dtype(answer, made, dtype)

    made = answer(func_of_tensors, tuple(map(tensor, given)), _asked(rest))
    return _as_dtype(answer, made, result.dtype)


def _dtype_of_operands(
    operands: Sequence[Spec], values: Sequence[Value], result: Spec
) -> torch.dtype:
    """Give the dtype in which PyTorch's kernels take numbers beside tensors."""
    dtype = result.dtype
    if dtype == torch.bool and operands:  # of a comparison
        widest = next((x for x in operands if x.dtype != torch.bool), operands[0])
        dtype = dtype_with(widest, values)
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32  # which kernels of short floats compute in
    return dtype.to_real() if dtype.is_complex else dtype


def _tensor_of(answer: Callable[[Any, tuple, dict], Any], number: Number) -> torch.Tensor:
    """Give a 0-d tensor of an expression's value, of float64 or int64."""
    if not number.is_open:
        return _constant(answer, number.value, torch.float64 if number.is_float() else torch.int64)
    source = number.source
    if isinstance(source, torch.SymInt):
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        return answer(aten.scalar_tensor.default, (source,), options)
    if source is not None:
        return unwrapped(source) if is_functionalized(source) else source
    func = _OPERATORS.get(number.function)
    if func is None:
        return _constant(answer, number.asked(), torch.float64)
    number.conditions.add_computed(number)
    dtype = torch.float64 if number.is_float() else torch.int64
    operands = [_as_dtype(answer, _tensor_of(answer, each), dtype) for each in number.operands]
    return _as_dtype(answer, answer(func, tuple(operands), {}), dtype)


def _as_dtype(
    answer: Callable[[Any, tuple, dict], Any], tensor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if _spec(tensor).dtype == dtype:
        return tensor
    return answer(aten._to_copy.default, (tensor,), {"dtype": dtype})


_OPERATORS: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, min: aten.minimum.default, max: aten.maximum.default,
    operator.pow: aten.pow.Tensor_Tensor, operator.mod: aten.remainder.Tensor,
    operator.floordiv: aten.floor_divide.default, torch.sym_float: aten.clone.default,
    **{getattr(math, name): getattr(aten, name).default for name in _MATH},
}  # fmt: skip


_COMPARISONS: frozenset[Callable[..., Any]] = frozenset(
    (
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, bool,
        operator.not_, _both, _either, *_DEFINED.values(),
    )
)  # fmt: skip
# Of integers, that are integers.
_OF_SIZES: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add, operator.sub: operator.sub, operator.mul: operator.mul,
    operator.floordiv: operator.floordiv, operator.mod: operator.mod, operator.neg: operator.neg,
    min: torch.sym_min, max: torch.sym_max,
}  # fmt: skip


_FILLED = {aten.scalar_tensor.default: 0, aten.full.default: 1}  # with the number's position


def _filled(
    answer: Callable[[Any, tuple, dict], Any], form: Callable[[Any, tuple, dict], Any], func: Any,
    args: tuple, kwargs: dict,
) -> Any:  # fmt: skip
    """Answer a call that makes a tensor of one number."""
    before, value = args[: _FILLED[func]], args[_FILLED[func]]
    number = node_of_number(value)
    if number is None:  # a size is one
        return answer(func, _asked(args), _asked(kwargs))
    result = form(func, (*_asked(before), number.value), _asked(kwargs))
    options = {"dtype": result.dtype, "device": result.device}
    made = answer(aten._to_copy.default, (_tensor_of(answer, number),), options)
    if not result.sizes:
        return made
    wide = answer(aten.expand.default, (made, list(result.sizes)), {})
    return answer(aten.clone.default, (wide,), {"memory_format": torch.contiguous_format})


def _constant(
    answer: Callable[[Any, tuple, dict], Any], value: Value, dtype: torch.dtype
) -> torch.Tensor:
    return answer(aten.full.default, ([], value), {"dtype": dtype, "device": torch.device("cpu")})


def _spec(tensor: torch.Tensor) -> Spec:
    return tensor.spec if isinstance(tensor, Leaf) else spec_of(tensor)


def _plain(value: Any) -> Any:
    """Put values in the recorded call in place of numbers."""
    return _mapped(value, lambda number: number.value)


def _asked(value: Any) -> Any:
    """Put sizes in place of integers of sizes, and values, which other calls have to share."""
    return _mapped(value, _size_or_value)


def _size_or_value(number: Number) -> Any:
    return number.as_size() if number.is_int() and number.is_of_sizes else number.asked()


def _mapped(value: Any, function: Callable[[Number], Value]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    if type(value) is dict:
        return {name: _mapped(each, function) for name, each in value.items()}
    number = node_of_number(value)
    return value if number is None else function(number)


# ---- the forms of operators that take tensors; each gives the operator, what may be numbers among
# its arguments, and its other arguments by name

_Call = tuple[Any, tuple, dict] | None


def _same(func: Any, args: tuple, kwargs: dict) -> _Call:
    """Take an operator whose schema has a tensor where the number is."""
    arguments = schema(func).arguments
    for argument, value in zip(arguments, args, strict=False):
        if _has_number(value) and not isinstance(argument.type, torch.TensorType):
            return None
    is_sum = func in (aten.add.Tensor, aten.sub.Tensor) and isinstance(args[1], torch.Tensor)
    if any(map(_has_number, kwargs.values())) and not is_sum:
        return None
    return func, args, dict(kwargs)


def _by(func_of_tensors: Any) -> Callable[[Any, tuple, dict], _Call]:
    """Take another overload of the same arguments."""

    def call(func: Any, args: tuple, kwargs: dict) -> _Call:
        return func_of_tensors, args, kwargs

    return call


def _of_two(func_of_tensors: Any) -> Callable[[Any, tuple, dict], _Call]:
    """Take an overload of two operands, where there is no factor for the second one."""

    def call(func: Any, args: tuple, kwargs: dict) -> _Call:
        is_plain = len(args) == 2 and not kwargs
        return (func_of_tensors, args, {}) if is_plain else None

    return call


def _swapped(func: Any, args: tuple, kwargs: dict) -> _Call:
    is_plain = len(args) == 2 and not kwargs
    return (aten.sub.Tensor, (args[1], args[0]), {}) if is_plain else None


def _clamped(func: Any, args: tuple, kwargs: dict) -> _Call:
    bounds = [*args[1:], *[None] * (3 - len(args))]
    bounds = [kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True)]
    return aten.clamp.Tensor, (args[0], *bounds), {}


_FORMS: dict[Any, Callable[[Any, tuple, dict], _Call]] = {
    aten.clamp.default: _clamped,
    aten.clamp_min.default: _by(aten.clamp_min.Tensor),
    aten.clamp_max.default: _by(aten.clamp_max.Tensor),
    aten.rsub.Scalar: _swapped,
    aten.lerp.Scalar: _by(aten.lerp.Tensor),
    aten.masked_fill.Scalar: _by(aten.masked_fill.Tensor),
    **{
        getattr(aten, name).Scalar: _by(getattr(aten, name).Tensor)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod")
    },
    **{getattr(aten, name).Scalar: _of_two(getattr(aten, name).Tensor) for name in ("add", "sub")},
    **{getattr(aten, name).Scalar: _by(getattr(aten, name).Tensor) for name in ("mul", "div")},
    aten.pow.Tensor_Scalar: _by(aten.pow.Tensor_Tensor),
    aten.pow.Scalar: _by(aten.pow.Tensor_Tensor),
}
