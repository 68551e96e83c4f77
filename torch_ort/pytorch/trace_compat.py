"""Private names of torch for traces: fake tensors, dispatch modes, transforms and their logs.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sympy
import torch

from torch_ort.pytorch import patches, private, versions
from torch_ort.pytorch.dispatch_compat import (
    Leaf,
    dropout_passes_through,
    is_functionalized,
    sizes_seen_as_numbers,
)
from torch_ort.pytorch.private import (
    DataDependentOutputException,
    DimDynamic,
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    GuardOnDataDependentSymNode,
    LocalSource,
    OutputType,
    ShapeEnv,
    StatelessSymbolicContext,
    TracingContext,
    UnsupportedFakeTensorException,
    forward_ad,
    no_python_dispatcher,
    symbolic_shapes,
    tracing,
)
from torch_ort.pytorch.private import TorchDispatchMode as TorchDispatchMode
from torch_ort.pytorch.private import _disable_current_modes as real_tensors
from torch_ort.pytorch.size_compat import forget_sizes, python_text, values_in


def data_is_asked(error: BaseException) -> bool:
    """Tell whether code asked for what only the numbers in a tensor can tell."""
    return isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException)


def said_to_be_compiling() -> AbstractContextManager[None]:
    """Make `torch.compiler.is_compiling()` true in the block, for this thread."""
    return patches.IS_COMPILING.by(lambda theirs: True)


def values_unchecked() -> AbstractContextManager[None]:
    """Let torch.distributions take values that a trace does not have for valid ones."""
    return patches.CHECKED_VALUES.by(
        lambda theirs, valid: True if is_traced(valid) else theirs(valid)
    )


class FakeInputs:
    """Tensors without data to trace a function with.

    Sizes and integers of a call are symbols, but for sizes of 0 and 1, or all are fixed. What is
    decided of sizes on the way stands in `guards`.
    """

    def __init__(self, are_fixed: bool = False) -> None:
        self._are_fixed = are_fixed
        self._sizes = _ShapeEnv(duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._sizes, allow_non_fake_inputs=True)
        self._context = TracingContext(self._mode)
        # In the order in which they were made. One that is found equal to another is read as that
        # one.
        self._symbols: list[sympy.Basic] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A block in which fakes are made and traced.

        `torch.compiler.is_compiling()` is true meanwhile: modules that ask leave out what looks at
        numbers.
        """
        with (
            said_to_be_compiling(),
            dropout_passes_through(),
            sizes_seen_as_numbers(),
            patches.UNSEEN_SIZES.by(False),
            tracing(self._context),
        ):
            try:
                yield
            finally:
                forget_sizes()

    def held(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Give a fake of a tensor whose sizes never change."""
        return self._mode.from_tensor(tensor, static_shapes=True, source=LocalSource(name))

    def tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Give a fake of a tensor that each call provides anew."""
        if self._are_fixed:
            return self.held(tensor, name)
        if tensor.is_leaf and tensor.grad is not None:
            # Its gradient would get symbols of its own, whose values no call provides.
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim(),
            constraint_sizes=[None] * tensor.dim(),
        )
        fake = self._mode.from_tensor(tensor, symbolic_context=context, source=LocalSource(name))
        fake.item_memo = None  # a condition must not depend on the number in a tensor
        self._symbols += [n.node.expr for n in fake.shape if isinstance(n, torch.SymInt)]
        return fake

    def integer(self, value: int, name: str) -> int | torch.SymInt:
        """Give a symbol for an integer that each call provides anew."""
        if self._are_fixed:
            return value
        source = LocalSource(name)
        symbol = self._sizes.create_symbol(
            value, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        self._symbols.append(symbol)
        return self._sizes.create_symintnode(symbol, hint=value, source=source)

    def written(self) -> dict[int, bool]:
        """Tell of each input that the traced function writes into whether autograd watches it."""
        infos = self._context.fw_metadata.input_info
        return {
            i: not info.mutations_under_no_grad_or_inference_mode
            for i, info in enumerate(infos)
            if info.mutates_data or info.mutates_metadata
        }

    def given_back(self) -> set[int]:
        """Give the inputs that the traced function's results are, or are views of."""
        kinds = (OutputType.is_input, OutputType.alias_of_input)
        infos = self._context.fw_metadata.output_info
        return {info.base_idx for info in infos if info.output_type in kinds}

    def guards(self) -> list[str]:
        """Give the conditions on symbols, as Python, under which the same would be traced."""
        conditions = [guard.expr for guard in self._sizes.guards]
        for symbol in self._symbols:
            lower = self._sizes.var_to_range[symbol].lower
            if lower.is_finite and lower > 0:
                conditions.append(sympy.Ge(symbol, lower, evaluate=False))
        # In parentheses, because a condition may contain `or`.
        return [f"({python_text(condition)})" for condition in conditions]


class _ShapeEnv(ShapeEnv):
    """Takes equal products of sizes for what they nearly always are: products of equal sizes."""

    def _evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        for pair in self._equal_factors(orig_expr):
            super()._evaluate_expr(pair)
        return super()._evaluate_expr(orig_expr, *args, **kwargs)

    def _equal_factors(self, expr: sympy.Basic) -> list[sympy.Eq]:
        """Give equations of sizes from one of products: rows of tokens and rows of their labels.

        What the products' numbers alone do not tell, the engine needs to fuse across them; a call
        where only the products are equal is captured anew.
        """
        if not (isinstance(expr, sympy.Eq) and all(side.is_Mul for side in expr.args)):
            return []
        values = values_in(self)
        made = list(values)  # in the order of the inputs
        left, right = ([f for f in side.args if f in values] for side in expr.args)
        if len(left) < 2 or [len(side.args) for side in expr.args] != [len(left), len(right)]:
            return []
        left, right = (
            sorted(side, key=lambda f: (values[f], made.index(f))) for side in (left, right)
        )
        if [values[f] for f in left] != [values[f] for f in right]:
            return []
        return [sympy.Eq(a, b) for a, b in zip(left, right, strict=True) if a != b]


def in_function_transform() -> bool:
    """Tell whether a transform of torch.func is at work, which wraps tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


is_jit_tracing = private._is_tracing  # whether torch.jit.trace is at work in this thread


def in_forward_mode() -> bool:
    """Tell whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0


def has_tangents(values: Sequence[Any]) -> bool:
    """Tell whether one of some values is a tensor with a tangent of forward-mode AD."""
    return any(
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and forward_ad.unpack_dual(value).tangent is not None
        for value in values
    )


def meta_errors_unsaid() -> AbstractContextManager[None]:
    """Keep this thread's failing operators on tensors without data out of torch's log."""
    return patches.FAKE_TENSOR_LOG.by(_hear_no_errors)


def _hear_no_errors(theirs: Callable, record: logging.LogRecord) -> Any:
    return record.exc_info is None and theirs(record)


@contextmanager
def anomalies_unsaid() -> Iterator[None]:
    """Keep to itself what AOTAutograd's anomaly mode warns of: a backward that cannot be traced.

    It is traced again for the sizes of the call, or a fallback says why it cannot be.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in ", UserWarning)
        yield


def sizes_of_inputs_kept() -> AbstractContextManager[None]:
    """Let a trace read a size of an input there, whatever it is the result of, too."""
    return patches.COMPUTED_SIZES.by(_register_unless_known)


def _register_unless_known(
    theirs: Callable, tracer: Any, function: Any, arguments: tuple, result: Any
) -> None:
    is_symbolic = isinstance(result, torch.SymInt | torch.SymFloat)
    # A number that is read from a tensor is no input's: the operation that reads it makes it known.
    may_be_size = is_symbolic and not symbolic_shapes.free_unbacked_symbols(result)
    known = tracer.sympy_expr_tracker.get(result.node.expr) if may_be_size else None
    if known is None:
        theirs(tracer, function, arguments, result)
    elif result not in tracer.symnode_tracker:
        tracer.symnode_tracker[result] = known.proxy


def is_traced(value: Any) -> bool:
    """Tell whether something is a tensor of a trace."""
    if versions.missing:
        return False  # there are no traces
    return isinstance(value, FakeTensor | FunctionalTensor | Leaf) or is_functionalized(value)


def form_key(values: Sequence[Any]) -> tuple:
    """Give a value that is equal for tensors and sizes of equal form in one trace."""
    return tuple(map(_form_key, values))


def _form_key(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
    symbols = [size for size in value.shape if isinstance(size, torch.SymInt)]
    env = id(getattr(symbols[0].node, "shape_env", None)) if symbols else 0
    # Tensors with data stand for themselves, because what is learnt of a Function may depend on it.
    return *sizes, value.dtype, str(value.device), env, is_traced(value)


@contextmanager
def kernels_as_in_eager() -> Iterator[None]:
    """Run operators on real tensors as eager PyTorch does, by none that traces compute in Python.

    Those of torch 2.11 give the states of an LSTM a dim more than its kernels do.
    """
    with real_tensors(), no_python_dispatcher():
        yield


@contextmanager
def fakes_apart() -> Iterator[None]:
    """Make and use tensors without data that no trace knows of."""
    with real_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def without_numbers(tensors: Sequence[Any]) -> Iterator[None]:
    """Run code on fake tensors whose numbers it may want: then it fails, and leaves no trace."""
    fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    if not fakes:
        raise UnsupportedFakeTensorException("the tensors are not fake ones")
    # Otherwise compiled code would read at address 0 of these tensors and of what is made of them.
    # Their mode is not always that of the current trace.
    mode = fakes[0].fake_mode
    for tensor in fakes:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    before, mode._allow_unsafe_data_ptr_access = mode._allow_unsafe_data_ptr_access, False
    env = mode.shape_env
    try:
        with env.ignore_fresh_unbacked_symbols() if env is not None else nullcontext():
            yield
    finally:
        mode._allow_unsafe_data_ptr_access = before
