"""What TorchScript's interpreter computes itself on Python values: numbers, strings, containers.

Sizes are symbols here, so nothing may go through TorchScript's own functions, which take integers.
Types are counted as TorchScript counts them: dtypes, layouts and memory formats are integers.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort._C import Unsupported, script_codes
from torch_ort.pytorch.dispatch_compat import is_functionalized
from torch_ort.pytorch.trace_compat import real_tensors
from torch_ort.script.unbacked import UnbackedNumber, number_tensor, unbacked_number

# dtypes by the codes that operators are given, and codes by dtype.
DTYPES: dict[int, torch.dtype] = script_codes()
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Number:
    """A tensor without dims that `torch.jit.trace` has made of a size: the size itself is kept."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tensor(self) -> torch.Tensor:
        """Give the tensor."""
        is_float = isinstance(self.value, float | torch.SymFloat)
        return torch.scalar_tensor(self.value, dtype=torch.double if is_float else torch.int64)


class Uninitialized:
    """What a name holds where a script sets it on another way only."""


UNINITIALIZED = Uninitialized()
_UNKNOWN = object()


def number_of(value: Any) -> Any:
    """Give the number that a value holds for sure; `_UNKNOWN` where only a run could tell."""
    if isinstance(value, Number):
        return value.value
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return value
    if is_constant(value):
        with real_tensors():
            return value.item()
    return _UNKNOWN


def is_constant(value: Any) -> bool:
    """Tell whether a value is a constant tensor without dims, of a kind that Python has."""
    return (
        type(value) is torch.Tensor
        and not is_functionalized(value)
        and value.dim() == 0
        and value.dtype in (torch.int64, torch.float64, torch.bool)
        and value.device.type == "cpu"
    )


def of_numbers(kind: str, inputs: Sequence[Any]) -> Number | None:
    """Do arithmetic that a trace did on tensors made of sizes; None for anything else."""
    work = _ARITHMETIC.get(kind.removesuffix("_"))
    if work is None:
        return None
    numbers = [value if isinstance(value, str) else number_of(value) for value in inputs]
    return None if _UNKNOWN in numbers else Number(work(*numbers))


def with_numbers(kind: str, inputs: list[Any]) -> list[Any]:
    """Give a number for an operand that is a tensor without dims, where the result is the same."""
    if kind not in TAKE_NUMBERS or len(inputs) < 2:
        return inputs
    tensor, other, *rest = inputs
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or tensor.is_complex():
        return inputs
    number = number_of(other) if isinstance(other, Number | torch.Tensor) else _UNKNOWN
    is_int = not isinstance(number, float | torch.SymFloat)
    if number is _UNKNOWN or not (tensor.is_floating_point() or (is_int and _is_int(tensor))):
        return inputs
    return [tensor, number, *rest]


def _is_int(tensor: torch.Tensor) -> bool:
    return tensor.dtype is not torch.bool


def _divide(a: Any, b: Any, rounding: str | None = None) -> Any:
    if rounding is None:
        return a / b
    return a // b if rounding == "floor" else torch.sym_int(a / b)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "aten::add": lambda a, b, alpha=1: a + alpha * b,
    "aten::sub": lambda a, b, alpha=1: a - alpha * b,
    "aten::rsub": lambda a, b, alpha=1: b - alpha * a,
    "aten::mul": operator.mul,
    "aten::div": _divide,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
}

# Operators whose overload for two tensors also takes a number, as calls from Python use it.
TAKE_NUMBERS = frozenset(
    f"aten::{name}{end}" for name in ("add", "sub", "mul", "div") for end in ("", "_")
)


# A builtin gets the name of the overload, and then the arguments.


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda overload, *args: function(*args)


def _of_tensor(name: str) -> Callable[..., Any]:
    return lambda overload, tensor: getattr(tensor, name)


def _item(overload: str, value: Any) -> Any:
    known = number_of(value)
    if known is not _UNKNOWN:
        return known
    unbacked = unbacked_number(value)
    return value.item() if unbacked is None else unbacked


def _int(overload: str, value: Any) -> Any:
    value = _item("", value) if isinstance(value, torch.Tensor | Number) else value
    if isinstance(value, UnbackedNumber):
        return value.to(torch.int64)
    return torch.sym_int(value) if isinstance(value, _SYMBOLS) else int(value)


def _float(overload: str, value: Any) -> Any:
    value = _item("", value) if isinstance(value, torch.Tensor | Number) else value
    if isinstance(value, UnbackedNumber):
        return value.to(torch.float64)
    return torch.sym_float(value) if isinstance(value, _SYMBOLS) else float(value)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _bool(overload: str, value: Any) -> bool | UnbackedNumber:
    value = _item("", value) if isinstance(value, torch.Tensor | Number) else value
    return value.to(torch.bool) if isinstance(value, UnbackedNumber) else bool(value)


def _not(overload: str, value: Any) -> bool | UnbackedNumber:
    return value ^ True if isinstance(value, UnbackedNumber) else not value


def _size(overload: str, tensor: torch.Tensor, dim: int | None = None) -> Any:
    return list(tensor.shape) if dim is None else tensor.shape[dim]


def _stride(overload: str, tensor: torch.Tensor, dim: int | None = None) -> Any:
    return list(tensor.stride()) if dim is None else tensor.stride(dim)


def _power(overload: str, a: Any, b: Any) -> Any:
    return float(a**b) if overload == "int" else a**b


def _slice(overload: str, value: Any, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return value[slice(start, end, step)]


def _add_in_place(overload: str, values: list, more: list) -> list:
    values.extend(more)
    return values


def _set_item(overload: str, container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _delete(overload: str, container: Any, key: Any) -> None:
    del container[key]


def _append(overload: str, values: list, value: Any) -> list:
    values.append(value)
    return values


def _unwrap(overload: str, value: Any) -> Any:
    if value is None:
        raise Unsupported("TorchScript raises RuntimeError: Unwrapping null optional")
    return value


def _range_length(overload: str, low: Any, high: Any, step: Any) -> Any:
    if isinstance(low, UnbackedNumber) or isinstance(high, UnbackedNumber):
        rounds = -((low - high) // step)
        return UnbackedNumber(torch.clamp(rounds.tensor(), min=0))
    return len(range(int(low), int(high), int(step)))


def _tensor(
    overload: str, data: Any, dtype: int | None = None, device: Any = None,
    requires_grad: bool = False,
) -> torch.Tensor:  # fmt: skip
    kind = None if dtype is None else DTYPES[dtype]
    if isinstance(data, torch.SymInt | torch.SymFloat):
        return torch.scalar_tensor(data, dtype=kind or _dtype_of(data), device=device)
    return torch.tensor(data, dtype=kind, device=device, requires_grad=requires_grad)


def _dtype_of(value: Any) -> torch.dtype:
    return torch.int64 if isinstance(value, torch.SymInt) else torch.get_default_dtype()


def _warn(overload: str, message: str, stacklevel: int = 2) -> None:
    warnings.warn(message, stacklevel=stacklevel)


def _set_grad_enabled(overload: str, on: bool) -> None:
    torch.set_grad_enabled(on)


def _method(name: str) -> Callable[..., Any]:
    return lambda overload, value, *args: getattr(value, name)(*args)


def _shown(value: Any) -> Any:
    """Give a value for a text, which holds numbers instead of symbols: they become guards."""
    if isinstance(value, list | tuple):
        return type(value)(_shown(part) for part in value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value


def _found(name: str) -> Callable[..., Any]:
    """Give a method of strings; an end of -1 stands for the string's."""
    return lambda overload, text, part, start=0, end=-1: getattr(text, name)(
        part, start, len(text) if end == -1 else end
    )


def _indexed(name: str, overload: str) -> Callable[..., Any]:
    operator_ = getattr(getattr(torch.ops.aten, name), overload)

    def work(own: str, value: Any, *args: Any) -> Any:
        return operator_(value, *args) if isinstance(value, torch.Tensor) else value.index(*args)

    return work


def _to(overload: str, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    if overload == "prim_other":
        args = (None, None, *args)
    elif overload == "prim_dtype":
        args = (None, *args)
    device, dtype, *args = args
    kind = tensor.dtype if dtype is None else DTYPES[dtype]
    return tensor.to(device or tensor.device, kind, *args)


def _copy(overload: str, tensor: torch.Tensor, value: Any) -> torch.Tensor:
    return tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)


def _least(
    function: Callable[..., Any], symbolic: Callable[..., Any], of_tensors: Callable[..., Any]
) -> Callable[..., Any]:
    def work(overload: str, *args: Any) -> Any:
        if len(args) == 2 and any(isinstance(value, UnbackedNumber) for value in args):
            return UnbackedNumber(of_tensors(*map(number_tensor, args)))
        if len(args) == 2 and any(isinstance(value, _SYMBOLS) for value in args):
            return symbolic(*args)
        return function(*args)

    return work


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "remainder": operator.mod, "neg": operator.neg,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "__is__": operator.is_,
    "__isnot__": operator.is_not, "__and__": operator.and_, "__or__": operator.or_,
    "__xor__": operator.xor, "__lshift__": operator.lshift, "__rshift__": operator.rshift,
    "__contains__": operator.contains, "__getitem__": operator.getitem, "abs": abs,
}  # fmt: skip
_MATHS = ("sqrt", "exp", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "asin",
          "acos", "atan", "atan2", "sinh", "cosh", "erf", "isnan", "isinf", "isfinite", "fabs",
          "gcd", "factorial", "copysign", "fmod", "degrees", "radians")  # fmt: skip
_LISTS = ("extend", "insert", "pop", "remove", "reverse", "clear", "count", "copy")
_DICTS = ("keys", "values", "items", "get", "setdefault", "update", "popitem")
_STRINGS = ("capitalize", "center", "expandtabs", "isalnum", "isalpha", "isdecimal", "isdigit",
            "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
            "join", "ljust", "lower", "lstrip", "replace", "rjust", "rstrip", "splitlines", "strip",
            "swapcase", "title", "upper", "zfill", "split", "rsplit")  # fmt: skip
_OF_TENSORS = ("device", "is_cuda", "is_cpu", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps",
               "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan",
               "is_xla", "is_xpu", "itemsize", "name", "nbytes", "ndim",
               "requires_grad")  # fmt: skip
_TRANSPOSED = {"numpy_T": "T", "mT": "mT", "mH": "mH", "matrix_H": "H"}
# TorchScript has overloads of these for lists without gaps. The dispatcher's take such lists too.
_INDEXED = {"index": "Tensor", "_unsafe_index": "Tensor", "index_put": "default",
            "index_put_": "default", "_unsafe_index_put": "default",
            "_index_put_impl_": "default"}  # fmt: skip

BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": _plain(function) for name, function in _OPERATORS.items()},
    **{f"aten::{name}": _plain(getattr(math, name)) for name in _MATHS},
    **{f"aten::{name}": _method(name) for name in _LISTS},
    **{
        f"aten::{name}": lambda overload, value, *args, name=name: _listed(
            getattr(value, name)(*args)
        )
        for name in _DICTS
    },
    **{f"aten::{name}": _method(name) for name in _STRINGS},
    **{f"aten::{name}": _found(name) for name in ("startswith", "endswith", "find", "rfind")},
    **{f"prim::{name}": _of_tensor(name) for name in _OF_TENSORS},
    **{f"aten::{name}": _of_tensor(attribute) for name, attribute in _TRANSPOSED.items()},
    **{f"aten::{name}": _indexed(name, overload) for name, overload in _INDEXED.items()},
    "prim::EnumName": _of_tensor("name"),
    "prim::EnumValue": _of_tensor("value"),
    "prim::StringIndex": lambda overload, text, i: text[i],
    "aten::__not__": _not,
    "aten::cpu": _method("cpu"),
    "aten::cuda": _method("cuda"),
    "aten::to": _to,
    "aten::copy_": _copy,
    "aten::select": lambda overload, values, i: values[i],
    "aten::__interpolate": lambda overload, *args: torch.nn.functional.interpolate(*args),
    "aten::divmod": _plain(divmod),
    "prim::abs": _plain(abs),
    "prim::dtype": lambda overload, tensor: _CODES[tensor.dtype],
    "prim::layout": lambda overload, tensor: 0,  # strided, like all tensors of a capture
    "prim::data": _plain(torch.Tensor.detach),
    "prim::type": lambda overload, device: device.type,
    "prim::index": lambda overload, device: device.index,
    "prim::min": _least(min, torch.sym_min, torch.minimum),
    "prim::max": _least(max, torch.sym_max, torch.maximum),
    "prim::NumToTensor": _plain(Number),
    "prim::TupleIndex": lambda overload, value, i: value[i],
    "prim::TupleSlice": _slice,
    "prim::unchecked_cast": _plain(lambda value: value),
    "prim::unchecked_unwrap_optional": _plain(lambda value: value),
    "prim::Uninitialized": _plain(lambda: UNINITIALIZED),
    "prim::rangelist": lambda overload, count: list(range(count)),
    "prim::Print": lambda overload, *values: print(*map(_shown, values)),
    "aten::Int": _int,
    "aten::IntImplicit": _int,
    "aten::Float": _float,
    "aten::FloatImplicit": _float,
    "aten::ScalarImplicit": _item,
    "aten::item": _item,
    "aten::Bool": _bool,
    "aten::str": lambda overload, value: str(_shown(value)),
    "aten::size": _size,
    "aten::sym_size": _size,
    "aten::stride": _stride,
    "aten::dim": _plain(lambda tensor: tensor.dim()),
    "aten::numel": _plain(lambda tensor: tensor.numel()),
    "aten::storage_offset": _plain(lambda tensor: tensor.storage_offset()),
    "aten::is_contiguous": _plain(lambda tensor: tensor.is_contiguous()),
    "aten::is_floating_point": _plain(lambda tensor: tensor.is_floating_point()),
    "aten::is_complex": _plain(lambda tensor: tensor.is_complex()),
    "aten::get_device": _plain(lambda tensor: tensor.get_device()),
    "aten::requires_grad_": lambda overload, tensor, on=True: tensor.requires_grad_(on),
    "aten::len": lambda overload, value: (
        value.shape[0] if isinstance(value, torch.Tensor) else len(value)
    ),
    "aten::pow": _power,
    "aten::floor": _plain(math.floor),
    "aten::ceil": _plain(math.ceil),
    "aten::round": _plain(lambda value: float(round(value))),
    "aten::sum": _plain(sum),
    "aten::all": _plain(all),
    "aten::any": _plain(any),
    "aten::min": _least(min, torch.sym_min, torch.minimum),
    "aten::max": _least(max, torch.sym_max, torch.maximum),
    "aten::list": _plain(list),
    "aten::dict": _plain(dict),
    "aten::sorted": _plain(sorted),
    "aten::sort": lambda overload, values, reverse=False: values.sort(reverse=reverse),
    "aten::slice": _slice,
    "aten::add_": _add_in_place,
    "aten::append": _append,
    "aten::_set_item": _set_item,
    "aten::Delete": _delete,
    "aten::_unwrap_optional": _unwrap,
    "aten::__range_length": _range_length,
    "aten::__derive_index": _plain(lambda index, start, step: start + index * step),
    "aten::format": lambda overload, text, *values: text.format(*map(_shown, values)),
    "aten::percentFormat": lambda overload, text, *values: text % tuple(map(_shown, values)),
    "aten::device": lambda overload, *args: torch.device(*args),
    "aten::tensor": _tensor,
    "aten::as_tensor": _tensor,
    "aten::warn": _warn,
    "aten::is_grad_enabled": _plain(torch.is_grad_enabled),
    "aten::set_grad_enabled": _set_grad_enabled,
    "aten::is_autocast_enabled": _plain(lambda: torch.is_autocast_enabled("cuda")),
    "aten::is_autocast_cpu_enabled": _plain(lambda: torch.is_autocast_enabled("cpu")),
    "aten::is_scripting": _plain(lambda: True),
}


def _listed(result: Any) -> Any:
    is_view = isinstance(result, type({}.keys()) | type({}.values()) | type({}.items()))
    return list(result) if is_view else result
