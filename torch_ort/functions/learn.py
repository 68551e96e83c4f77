"""Finds the form of a Function's results, on tensors without data or, if needed, on real ones.

A Function that reads numbers is run with a few settings of the sizes; a size of a result that goes
with one of the arguments is taken to be that one. Every call of the graph checks what was learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.core.dtypes import dtype_number
from torch_ort.functions.arguments import full_name
from torch_ort.functions.dtypes import torch_dtype
from torch_ort.guards.outside_reads import not_watched
from torch_ort.guards.python_draws import PythonGenerators
from torch_ort.pytorch import autograd_compat, size_compat, trace_compat
from torch_ort.pytorch.dispatch_compat import Leaf
from torch_ort.pytorch.generators import TorchGenerators
from torch_ort.rules.answers import form_of, rehearsal
from torch_ort.rules.forms import Spec, in_order, numel, rows, spec_of


@dataclass
class Learnt:
    """What forward gives for arguments of certain forms."""

    outputs: list[Spec]
    differentiable: list[bool]  # by output
    written: list[int | None]  # by output: which of the tensor arguments it is
    places: list[int]  # positions of the outputs among all that forward returns
    returned: Any  # all that forward returns, with None for the outputs; a tuple if it returns one
    # For each tensor that autograd sees, the form of its gradient, or None if backward gives none.
    # If this is missing, it is learnt from `made`, an output without data that still has its
    # autograd history.
    gradients: list[Spec | None] | None = None
    made: torch.Tensor | None = None


class _Outside(torch.autograd.Function):
    """Where the arguments come from, so that none is a leaf, which nothing may write into."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class Learner:
    """Learns one Function with its constants; `run` takes tensors and sizes."""

    def __init__(
        self, function: type, run: Callable[..., Any], requires_grad: Sequence[bool],
        grad_mode: bool, num_seen: int,
    ) -> None:  # fmt: skip
        self._function = function
        self._run = run
        self._requires_grad = requires_grad
        self._grad_mode = grad_mode
        self._num_seen = num_seen

    def forward(self, tensors: list[torch.Tensor], sizes: list[Any]) -> Learnt:
        """Learn the form of forward's results. Raises Unsupported if all trial calls fail."""
        with autograd_compat.functions_as_they_are(), _generators_kept(), not_watched():
            try:
                self._try_without_symbols(tensors, sizes)
                return self._forward_on_fakes(tensors, sizes)
            except Exception as error:
                if hasattr(self._function, "infer_shape"):
                    return self._by_infer_shape(tensors)
                return self._forward_on_real(tensors, sizes, error)

    def backward(
        self, learnt: Learnt, tensors: list[Spec], sizes: list[Any],
        given: Sequence[torch.Tensor | None],
    ) -> list[Spec | None]:  # fmt: skip
        """Learn which tensors get a gradient, and its form, where outputs have some or none."""
        if learnt.gradients is not None:
            return learnt.gradients
        wanted = [gradient is not None for gradient in given]
        with autograd_compat.functions_as_they_are(), _generators_kept(), not_watched():
            try:
                with _without_numbers(given) as made:
                    return self._backward_on_fakes(learnt, tensors, made)
            except Exception as error:
                if hasattr(self._function, "infer_shape"):
                    return self._all_gradients(tensors)
                return self._backward_on_real(tensors, sizes, wanted, error)

    # ---- tensors without data

    def _try_without_symbols(self, tensors: list[torch.Tensor], sizes: list[Any]) -> None:
        """Raise the error of a Function that needs data, before it decides anything by sizes."""
        forms = [spec_of(tensor) for tensor in tensors]
        settings = size_compat.Settings([*(n for form in forms for n in form.sizes), *sizes])
        if not settings.open_sizes:
            return
        if any(isinstance(tensor, Leaf) for tensor in tensors):
            with rehearsal() as make:
                self._call(
                    [make(_at(form, settings)) for form in forms],
                    [settings.at(n, 0) for n in sizes],
                )
            return
        with trace_compat.fakes_apart():
            made = [_real(None, form, settings, 0, torch.empty) for form in forms]
            with trace_compat.without_numbers(made):
                self._call(made, [settings.at(n, 0) for n in sizes])

    def _forward_on_fakes(self, tensors: list[torch.Tensor], sizes: list[Any]) -> Learnt:
        with _without_numbers(tensors) as made:
            inputs, results = self._call(made, sizes)
            tuple_of = results if isinstance(results, tuple) else (results,)
            outputs = [item for item in tuple_of if isinstance(item, torch.Tensor)]
            if size_compat.sizes_of_data(outputs) - size_compat.sizes_of_data(tensors):
                raise Unsupported("sizes that depend on data")
            forms = [form_of(output) for output in outputs]
        made = next((output for output in outputs if output.requires_grad), None)
        return self._learnt(inputs, results, forms, made)

    def _backward_on_fakes(
        self, learnt: Learnt, tensors: list[Spec], given: Sequence[torch.Tensor | None]
    ) -> list[Spec | None]:
        count = len(learnt.returned) if isinstance(learnt.returned, tuple) else 1
        gradients: list[torch.Tensor | None] = [None] * count
        for place, gradient in zip(learnt.places, given, strict=True):
            gradients[place] = gradient
        results = _C.call_with_autograd(lambda: _C.run_grad_fn(learnt.made, gradients))
        return [
            form_of(result) if result is not None and asks else None
            for result, asks in zip(results, self._requires_grad, strict=False)
        ]

    def _call(self, tensors: list[torch.Tensor], sizes: list[Any]) -> tuple[list[Any], Any]:
        """Run forward as a step of the graph would."""

        def call() -> tuple[list[Any], Any]:
            with torch.set_grad_enabled(self._grad_mode):
                inputs = [
                    tensor.detach().requires_grad_(asks)
                    for tensor, asks in zip(tensors, self._requires_grad, strict=True)
                ]
                asking = [i for i, asks in enumerate(self._requires_grad) if asks]
                if self._grad_mode and asking:
                    for i, tensor in zip(
                        asking, _Outside.apply(*(inputs[i] for i in asking)), strict=True
                    ):
                        inputs[i] = tensor
                return inputs, self._run(*inputs, *sizes)

        return _C.call_with_autograd(call)

    # ---- real tensors

    def _forward_on_real(
        self, tensors: list[torch.Tensor], sizes: list[Any], why: Exception
    ) -> Learnt:
        forms = [spec_of(tensor) for tensor in tensors]
        settings = size_compat.Settings([*(n for form in forms for n in form.sizes), *sizes])
        first, learnt, gradients = self._run_real(tensors, forms, sizes, settings, 0, why)
        seen = [(0, first)]
        for number in range(1, settings.count):
            if number == settings.count - 1 and len(seen) > 1:
                break  # the last setting is for Functions that reject the others
            try:
                seen.append(
                    (number, self._run_real(tensors, forms, sizes, settings, number, why)[0])
                )
            except Unsupported:
                continue
        found = _sizes_of_results(seen, _sources(forms, sizes), settings)
        if found is None:
            # It is unknown how the sizes of its results depend on those of its arguments, so the
            # graph is made for the sizes of this call.
            for size in settings.open_sizes:
                int(size)
            found = [list(output.shape) for output in first]
        learnt.outputs = [
            _dense_form(output, shape) for output, shape in zip(first, found, strict=True)
        ]
        learnt.gradients = gradients and [
            None if gradient is None else _dense_form(gradient, forms[i].sizes)
            for i, gradient in enumerate(gradients)
        ]
        return learnt

    def _backward_on_real(
        self, tensors: list[Spec], sizes: list[Any], wanted: list[bool], why: Exception
    ) -> list[Spec | None]:
        settings = size_compat.Settings([*(n for form in tensors for n in form.sizes), *sizes])
        _, _, gradients = self._run_real(None, tensors, sizes, settings, 0, why, wanted)
        return [
            None if gradient is None else _dense_form(gradient, tensors[i].sizes)
            for i, gradient in enumerate(gradients)
        ]

    def _run_real(
        self, tensors: list[torch.Tensor] | None, forms: list[Spec], sizes: list[Any],
        settings: Any, number: int, why: Exception, wanted: list[bool] | None = None,
    ) -> tuple[list[torch.Tensor], Learnt, list[torch.Tensor | None] | None]:  # fmt: skip
        """Run forward, and for the first setting backward, on made-up numbers."""
        error: Exception = why
        with trace_compat.kernels_as_in_eager():
            for fill in (_between_0_and_1, torch.ones, torch.zeros):
                made = [
                    _real(tensors[i] if tensors else None, form, settings, number, fill)
                    for i, form in enumerate(forms)
                ]
                try:
                    inputs, results = self._call(made, [settings.at(n, number) for n in sizes])
                    tuple_of = results if isinstance(results, tuple) else (results,)
                    outputs = [item for item in tuple_of if isinstance(item, torch.Tensor)]
                    learnt = self._learnt(inputs, results, [], None)
                    gradients = None
                    if number == 0 and any(learnt.differentiable):
                        gradients = self._gradients(tuple_of, learnt, wanted)
                except Exception as failed:
                    error = failed
                    continue
                return [output.detach() for output in outputs], learnt, gradients
        raise Unsupported(
            f"{full_name(self._function)}: shapes and dtypes of its results are unknown: a trial "
            f"call failed on tensors without data ({_words(why)}) and on made-up data "
            f"({_words(error)}); define `infer_shape` in the class (docs/python_op.md)"
        ) from error

    def _gradients(
        self, results: tuple, learnt: Learnt, wanted: list[bool] | None
    ) -> list[torch.Tensor | None]:
        given: list[torch.Tensor | None] = [None] * len(results)
        for i, place in enumerate(learnt.places):
            if learnt.differentiable[i] and (wanted is None or wanted[i]):
                given[place] = torch.ones_like(results[place])
        made = next(r for r in results if isinstance(r, torch.Tensor) and r.requires_grad)
        gradients = _C.call_with_autograd(lambda: _C.run_grad_fn(made, given))
        return [
            gradient if asks else None
            for gradient, asks in zip(gradients, self._requires_grad, strict=False)
        ]

    # ---- infer_shape of the class

    def _by_infer_shape(self, tensors: list[torch.Tensor]) -> Learnt:
        """Ask the class's infer_shape, as ONNX Runtime Training does."""
        name = full_name(self._function)
        shapes, dtypes = self._function.infer_shape(
            _Node(name),
            [list(tensor.shape) for tensor in tensors],
            [dtype_number(tensor.dtype) for tensor in tensors],
        )
        if len(shapes) != len(dtypes):
            raise Unsupported(
                f"{name}.infer_shape: got {len(shapes)} shapes and {len(dtypes)} dtypes, want as "
                "many"
            )
        device = tensors[0].device if tensors else torch.device("cpu")
        outputs = [
            Spec(list(shape), _C.contiguous_strides(list(shape)), torch_dtype(dtype), device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        asks = self._grad_mode and any(self._requires_grad)
        return Learnt(
            outputs,
            [asks and form.dtype.is_floating_point for form in outputs],
            [None] * len(outputs),
            list(range(len(outputs))),
            (None,) * len(outputs) if len(outputs) > 1 else None,
            self._all_gradients([spec_of(tensor) for tensor in tensors]),
        )

    def _all_gradients(self, tensors: list[Spec]) -> list[Spec | None]:
        return [
            rows(form.sizes, form) if asks else None
            for form, asks in zip(tensors[: self._num_seen], self._requires_grad, strict=False)
        ]

    def _learnt(
        self, inputs: list[torch.Tensor], results: Any, forms: list[Spec],
        made: torch.Tensor | None,
    ) -> Learnt:  # fmt: skip
        tuple_of = results if isinstance(results, tuple) else (results,)
        places = [i for i, item in enumerate(tuple_of) if isinstance(item, torch.Tensor)]
        outputs = [tuple_of[i] for i in places]
        constants = tuple(None if isinstance(item, torch.Tensor) else item for item in tuple_of)
        return Learnt(
            forms,
            [output.requires_grad for output in outputs],
            [_position(inputs, output) for output in outputs],
            places,
            constants if isinstance(results, tuple) else constants[0],
            None if made is not None else [],
            made,
        )


@dataclass
class _Node:
    """The description of the node that `infer_shape` gets."""

    func_name: str


@contextmanager
def _without_numbers(
    tensors: Sequence[torch.Tensor | None],
) -> Iterator[list[torch.Tensor | None]]:
    """Give tensors of a trace to run code on that wants no numbers, and leaves no trace."""
    if any(isinstance(tensor, Leaf) for tensor in tensors):
        with rehearsal() as make:
            yield [make(tensor.spec) if isinstance(tensor, Leaf) else tensor for tensor in tensors]
    else:
        with trace_compat.without_numbers(tensors):
            yield list(tensors)


def _at(form: Spec, settings: Any) -> Spec:
    """Give a form with the sizes of the call that is traced."""
    sizes = [settings.at(n, 0) for n in form.sizes]
    return form._replace(sizes=sizes, strides=_C.contiguous_strides(sizes))


def _position(inputs: list[torch.Tensor], output: torch.Tensor) -> int | None:
    # If forward marks an argument as written, apply returns the same object.
    return next((i for i, tensor in enumerate(inputs) if tensor is output), None)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _dense_form(tensor: torch.Tensor, sizes: list[Any]) -> Spec:
    """Give the form of a tensor with other sizes, its dims in the same order in memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return Spec(list(sizes), in_order(sizes, order), tensor.dtype, tensor.device)


def _sources(forms: list[Spec], sizes: list[Any]) -> list[Any]:
    """Give the sizes of arguments to which a size of a result may be equal."""
    sources: list[Any] = [n for form in forms for n in form.sizes]
    return [*sources, *sizes, *(numel(form.sizes) for form in forms)]


def _sizes_of_results(
    seen: list[tuple[int, list[torch.Tensor]]], sources: list[Any], settings: Any
) -> list[list[Any]] | None:
    """Give sizes of results that fit all trial calls; None if nothing fits."""
    results = [outputs for _, outputs in seen]
    if len(seen) < 2 and settings.open_sizes:
        return None
    if any([x.dim() for x in outputs] != [x.dim() for x in results[0]] for outputs in results):
        return None
    found = []
    for outputs in zip(*results, strict=True):
        shape = []
        for numbers in zip(*(output.shape for output in outputs), strict=True):
            fitting = (
                source for source in (numbers[0], *sources)
                if all(
                    settings.at(source, setting) == number
                    for (setting, _), number in zip(seen, numbers, strict=True)
                )
            )  # fmt: skip
            shape.append(next(fitting, None))
        found.append(shape)
    return None if any(size is None for shape in found for size in shape) else found


def _between_0_and_1(*sizes: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(*sizes, generator=generator, dtype=dtype, device=device)


def _real(
    given: torch.Tensor | None, form: Spec, settings: Any, number: int, fill: Callable[..., Any]
) -> torch.Tensor:
    if given is not None and not trace_compat.is_traced(given):
        return given.detach().clone()
    sizes = [settings.at(n, number) for n in form.sizes]
    if not (form.dtype.is_floating_point or form.dtype.is_complex):
        fill = torch.empty if fill is torch.empty else torch.zeros
    return fill(sizes, dtype=form.dtype, device=form.device)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore random generators, so that the real call draws the numbers that a trial call drew."""
    of_python = PythonGenerators()
    with trace_compat.real_tensors():
        of_torch = TorchGenerators()
    try:
        yield
    finally:
        with trace_compat.real_tensors():
            of_torch.restore()
        of_python.restore()
