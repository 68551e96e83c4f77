"""Answers calls of operators without running them, by tensors that have a form but no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ort import _C
from torch_ort.core.refusals import HandOver, NestedTensor, NoCapture, Refused
from torch_ort.core.user_code import Line, blame
from torch_ort.pytorch.dispatch_compat import (
    Leaf,
    WithoutNumbers,
    enable_python_dispatcher,
    fakes,
    functionalization,
    functionalized,
    is_functionalized,
    unwrapped,
    without_saved_tensor_hooks,
)
from torch_ort.pytorch.graph_compat import schema
from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import TorchDispatchMode, real_tensors
from torch_ort.rules.data_sizes import RULES_OF_DATA, NewSize
from torch_ort.rules.forms import Integer, NoRule, Spec, is_contiguous, spec_of, value
from torch_ort.rules.numbers import answered, has_numbers
from torch_ort.rules.shape_rules import find
from torch_ort.rules.symbols import is_beyond_sizes


def leaf_of(spec: Spec) -> Leaf:
    """Make a tensor without data."""
    leaf = Leaf(spec.sizes, spec.strides, spec.dtype, spec.device)
    leaf.spec = spec
    leaf.node = None
    leaf.number = None  # the integer in a 0-d tensor, if it is known without data
    return leaf


class Answers(TorchDispatchMode):
    """Answers every operator with tensors without data."""

    functions: WithoutNumbers | None = None  # what sees the functions that call operators
    # Makes the symbol of a size that only data tells; None: there can be none.
    new_size: NewSize | None = None

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # by mask
        self._asked: dict[Any, Any] = {}  # what PyTorch has said, by the forms of the arguments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:  # fmt: skip
        """Answer one call. Raises HandOver if its result depends on data."""
        try:
            return self._answer(func, args, kwargs or {})
        except Exception as error:
            blame(error, str(func), self.line())
            raise

    def _answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if has_numbers(args, kwargs):
            return answered(self._answer, self.form, func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            number = getattr(args[0], "number", None)
            if number is not None:
                return number
        if func is torch.ops.aten._assert_scalar.default and _C.known_condition(args[0]):
            return None  # a size that only data tells is none below 0
        if torch.Tag.data_dependent_output in func.tags:
            raise HandOver(f"{func} depends on numbers")
        if torch.Tag.dynamic_output_shape in func.tags and not _has_plain_indices(func, args):
            return self._answer_with_sizes_of_data(func, args, kwargs)
        if schema(func).is_mutable:
            raise HandOver(f"{func} writes into its arguments")
        if func in _PLAIN:
            return [int(size) for size in _PLAIN[func](args[0].spec)]
        if any(type(arg) is torch.SymFloat for arg in args):
            args = tuple(map(_with_known_number, args))
        if func is torch.ops.aten.resize.default and _keeps_strides(*args):
            raise NoCapture(
                "resize_: to the sizes that a tensor has, which is not row-major: eager PyTorch "
                "keeps its strides, which PyTorch's functionalization does not reproduce"
            )
        if func is torch.ops.aten._conj.default and isinstance(args[0], complex):
            # A number where the operator takes a tensor becomes a 0-d tensor.
            func, args = torch.ops.aten.scalar_tensor.default, (args[0].conjugate(),)
            kwargs = {"dtype": torch.complex128}
        operands = _operands(func, args)
        result = _leaves(self.form(func, operands, kwargs))
        self.note(func, args, kwargs, result)
        if func in _ON_INTEGERS:
            result.number = _number(func, args, kwargs)
        if operands is not args and isinstance(result, Leaf):
            # Functionalization wraps the results of wrapped tensors only.
            return functionalized(result)
        return result

    def _answer_with_sizes_of_data(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if self.new_size is not None:
            if func is torch.ops.aten.index.Tensor:
                places = [place for index in args[1] for place in self._plain_indices(index)]
                return self._answer(func, (args[0], places), {})
            if func in RULES_OF_DATA:
                rule = RULES_OF_DATA[func]
                result = _leaves(rule(self.new_size, *_specs(args), **_specs(kwargs)))
                self.note(func, args, kwargs, result)
                return result
        raise HandOver(f"{func} gives a shape that depends on numbers")

    def _plain_indices(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Give the places that a mask selects, one list for each dim, as the kernel makes them."""
        if index is None or index.dtype not in _OF_MASKS:
            return [index]
        key = self.value_key(index)
        if key not in self._places:
            places = self._answer(torch.ops.aten.nonzero.default, (index,), {})
            self._places[key] = (index, places)
        _, places = self._places[key]
        return [
            self._answer(torch.ops.aten.select.int, (places, 1, dim), {})
            for dim in range(index.dim())
        ]

    def value_key(self, tensor: torch.Tensor) -> Any:
        """Give what is equal for tensors that are known to hold the same numbers."""
        return id(tensor)

    def line(self) -> Line | None:
        """Give the user's line that runs, where it is known."""
        return None

    def form(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Give the forms of what an operator gives."""
        rule = find(func)
        if rule is None:
            return self._ask_once(func, args, kwargs)
        try:
            return rule(*_specs(args), **_specs(kwargs))
        except NoRule:
            return self._ask_once(func, args, kwargs)
        except Exception as error:
            asked = _ask_pytorch(func, args, kwargs)  # this raises if the arguments are wrong
            if is_beyond_sizes(error):
                return asked
            raise _C.InternalError(
                f"{func}: its rule raises {type(error).__name__}: {error}, where PyTorch gives a "
                "result"
            ) from error

    def _ask_once(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Ask PyTorch, which takes milliseconds, once for all layers with arguments of one form."""
        key = (func, _key(_specs(args)), _key(_specs(kwargs)))
        if key not in self._asked:
            self._asked[key] = _ask_pytorch(func, args, kwargs)
        return self._asked[key]

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Take note of a call and of its results."""


# Questions of C++ code that does not support symbols. The graph is then for the numbers of this
# call.
_PLAIN = {
    torch.ops.aten.size.default: lambda spec: spec.sizes,
    torch.ops.aten.stride.default: lambda spec: spec.strides,
}


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[WithoutNumbers]:
    """Run code on functionalized tensors without data; what arrives below is answered."""
    with functionalization(), enable_python_dispatcher(), answers, WithoutNumbers() as tensors:
        answers.functions = tensors
        yield tensors


@contextlib.contextmanager
def rehearsal() -> Iterator[Callable[[Spec], torch.Tensor]]:
    """Run code that neither a recording nor a checkpoint may see; gives what makes its tensors."""
    with real_tensors(), without_saved_tensor_hooks(), answering(Answers()):
        yield lambda spec: functionalized(leaf_of(spec))


def form_of(tensor: torch.Tensor) -> Spec:
    """Give the form of a tensor, functionalized or not, as the operator that made it gave it."""
    if is_functionalized(tensor):
        tensor = unwrapped(tensor)
    return _specs(tensor)


def _has_plain_indices(func: Any, args: tuple) -> bool:
    """Tell whether an operator is an indexing without masks, whose shape is known."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(
        isinstance(index, torch.Tensor) and index.dtype in _OF_MASKS for index in args[1]
    )


_OF_MASKS = (torch.bool, torch.uint8)


def _with_known_number(arg: Any) -> Any:
    """Give the number that a quotient of sizes is, where it is the same for all of them."""
    number = _C.known_float(arg) if type(arg) is torch.SymFloat else None
    return arg if number is None else number


def _operands(func: Any, args: tuple) -> tuple:
    """Give the arguments of an operator that gets numbers in place of all its tensors.

    The numbers become the 0-d tensors that PyTorch would make. Other arguments are as they were.
    """
    if any(isinstance(arg, torch.Tensor) for arg in args):
        return args
    of_number = [
        isinstance(argument.type, torch.TensorType) and type(arg) in _DTYPES
        for argument, arg in zip(schema(func).arguments, args, strict=False)
    ]
    if not any(of_number):
        return args
    return tuple(
        leaf_of(Spec([], [], _DTYPES[type(arg)](), torch.device("cpu"))) if is_number else arg
        for arg, is_number in zip(args, of_number, strict=True)
    )


# The dtypes of tensors that PyTorch makes of numbers.
_DTYPES: dict[type, Callable[[], torch.dtype]] = {
    bool: lambda: torch.bool,
    int: lambda: torch.int64,
    torch.SymInt: lambda: torch.int64,
    float: torch.get_default_dtype,
    complex: lambda: torch.get_default_dtype().to_complex(),
}


def _number(func: Any, args: tuple, kwargs: dict) -> int | torch.SymInt | None:
    """Give the integer in the result of an operator on integers, if it follows from sizes."""
    numbers = [arg.number if isinstance(arg, Leaf) else arg for arg in args]
    if any(type(number) not in (int, torch.SymInt) for number in numbers):
        return None
    return _ON_INTEGERS[func](*numbers, **kwargs)


def _quotient(
    a: int | torch.SymInt, b: int | torch.SymInt, rounding_mode: str | None
) -> int | torch.SymInt | None:
    """Divide integers whose quotient is rounded down, or towards zero if none is negative."""
    are_natural = a >= 0 and b > 0
    return a // b if rounding_mode is not None and are_natural else None


# Operators that compute integers from integers, such as numbers of chunks from sizes.
_ON_INTEGERS: dict[Any, Callable[..., int | torch.SymInt | None]] = {
    torch.ops.aten.add.Tensor: lambda a, b, alpha=1: a + b * alpha,
    torch.ops.aten.sub.Tensor: lambda a, b, alpha=1: a - b * alpha,
    torch.ops.aten.mul.Tensor: lambda a, b: a * b,
    torch.ops.aten.floor_divide.default: lambda a, b: _quotient(a, b, "floor"),
    torch.ops.aten.div.Tensor_mode: lambda a, b, rounding_mode: _quotient(a, b, rounding_mode),
}


def _keeps_strides(tensor: torch.Tensor, sizes: Any) -> bool:
    spec = _specs(tensor)
    return [*map(value, spec.sizes)] == [*map(value, sizes)] and not is_contiguous(spec)


def _specs(value: Any) -> Any:
    if isinstance(value, Leaf):
        return value.spec
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise NestedTensor("an operator is called with a nested tensor")
        return spec_of(value)
    if isinstance(value, tuple | list):
        return type(value)(map(_specs, value))
    if isinstance(value, dict):
        return {name: _specs(item) for name, item in value.items()}
    return value


_COMPARED = (
    int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(None),
)  # fmt: skip


def _key(value: Any) -> Any:
    """Give what is equal for equal forms and numbers; what cannot be compared equals nothing."""
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, torch.SymInt):
        return torch.SymInt, _C.size_text(value)
    return (type(value), value) if isinstance(value, _COMPARED) else object()


def _leaves(spec: Any) -> Any:
    if spec is None:
        return None
    if isinstance(spec, Spec):
        return leaf_of(spec)
    if isinstance(spec, Integer):
        return spec.size
    if not isinstance(spec, tuple | list):
        raise HandOver(f"an operator is called with {spec} in place of a tensor")
    return type(spec)(map(_leaves, spec))


def _ask_pytorch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on PyTorch's own fakes."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    form = schema(func)
    if not tensors and not any(argument.name == "device" for argument in form.arguments):
        # Its kernel would run for good.
        if form.returns:
            raise HandOver(f"{func} makes tensors from none")
        return None
    with torch.no_grad(), fakes() as make:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: make(*_specs(x)), (args, kwargs)
        )
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            raise Refused(f"{func}: {type(error).__name__}: {error}") from error
        return _spec_of_result(func, result)


def _spec_of_result(func: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise NestedTensor(f"{func} gives a nested tensor")
        if value.layout != torch.strided:
            raise HandOver(f"{func} gives a tensor of layout {value.layout}")
        spec = spec_of(value)
        return spec._replace(strides=_C.plain_strides(spec.strides))
    if isinstance(value, tuple | list):
        return tuple(_spec_of_result(func, item) for item in value)
    raise HandOver(f"{func} gives a {type(value).__name__}")
