"""How the results of a recorded function are built from outputs of the graph, inputs, and views.

Results that share memory are made when the graph has run, by the views that the function made: what
autograd knows of them, and what edits in place do, is as in eager PyTorch.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_ort import _C
from torch_ort.core.refusals import HandOver
from torch_ort.pytorch.dispatch_compat import (
    Leaf,
    has_gradient,
    is_base,
    is_differentiable_view,
    is_functionalized,
    is_one_of_several_views,
    storage_key,
    viewed,
    viewed_again,
)
from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import real_tensors
from torch_ort.rules.answers import Answers, form_of, leaf_of
from torch_ort.rules.symbols import Symbolic, symbol_name


class Step(NamedTuple):
    """An operator that gives a view of its first argument, or several; and its other arguments."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict
    has_symbols: bool = False

    def of(self, tensor: Any, symbols: dict[str, int]) -> Any:
        """Call it."""
        args, kwargs = self.args, self.kwargs
        if self.has_symbols:
            args, kwargs = pytree.tree_map_only(
                Symbolic, lambda x: _C.evaluate_size(x.size, symbols), (args, kwargs)
            )
        return self.function(tensor, *args, **kwargs)


@dataclass(frozen=True)
class View:
    """The operators that make a view of a tensor, one after the other."""

    steps: list[Step]
    is_differentiable: bool

    @property
    def is_address(self) -> bool:
        """Tell whether the view gives sizes, strides and an offset in memory (`as_strided`)."""
        return any(step.function is torch.ops.aten.as_strided.default for step in self.steps)

    def of(self, tensor: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
        """Make the view."""
        with nullcontext() if self.is_differentiable else torch.no_grad():
            for step in self.steps:
                tensor = step.of(tensor, symbols)
        return tensor

    def of_either(
        self, source: torch.Tensor, copy: torch.Tensor, symbols: dict[str, int]
    ) -> torch.Tensor:
        """Make the view of a tensor, or of its dense copy where a reshape has to copy."""
        if source is copy or any(step.function in _OF_STRIDES for step in self.steps):
            return self.of(copy, symbols)
        try:
            return self.of(source, symbols)
        except RuntimeError:  # the strides of the source allow no such view
            return self.of(copy, symbols)


# Operators that name strides, which are those of the copy.
_OF_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)


@dataclass(frozen=True)
class Result:
    """One of the graph's outputs or inputs, or a view of it."""

    is_input: bool
    index: int
    view: View | None = None
    # Makes of an output a leaf of autograd's, which the function has made.
    leaf: Callable[[torch.Tensor], torch.Tensor] | None = None


class Results:
    """Gives the function's results when its graph has run."""

    def __init__(self, results: Sequence[Result], inputs: Sequence[Any]) -> None:
        self._results = results
        self._positions = {  # of symbols among the inputs
            symbol_name(value): i
            for i, value in enumerate(inputs)
            if isinstance(value, torch.SymInt)
        }
        self._positions.pop(None, None)  # of symbols that have turned out to be numbers
        self._are_outputs = not any(r.is_input or r.view or r.leaf for r in results)
        # The inputs that results are made of.
        self.inputs = frozenset(result.index for result in results if result.is_input)
        # The inputs whose memory results are parts of, whatever its layout is.
        self.addressed = {r.index for r in results if r.is_input and r.view and r.view.is_address}

    def of(
        self, inputs: Sequence[Any], outputs: Sequence[Any], given: Sequence[Any] | None = None
    ) -> list[Any]:
        """Give the results of one call; `given` are its inputs where `inputs` has copies."""
        if self._are_outputs:
            return [outputs[result.index] for result in self._results]
        symbols = {name: inputs[i] for name, i in self._positions.items()}
        made: list[Any] = []
        leaves: dict[int, torch.Tensor] = {}  # by output
        for result in self._results:
            value = (inputs if result.is_input else outputs)[result.index]
            source = given[result.index] if given and result.is_input else value
            view = result.view
            if result.leaf is not None:
                if result.index not in leaves:
                    leaves[result.index] = result.leaf(value)
                made.append(leaves[result.index])
            else:
                made.append(source if view is None else view.of_either(source, value, symbols))
        return made

    def outputs_in(self, results: Sequence[Any], outputs: Sequence[int]) -> list[torch.Tensor]:
        """Find some of the graph's outputs among the results of the function itself."""
        first: dict[int, tuple[Any, View | None]] = {}
        for made, result in zip(results, self._results, strict=True):
            if not result.is_input:
                first.setdefault(result.index, (made, result.view))
        found = [first[index] for index in outputs]
        return [made if view is None else viewed(made) for made, view in found]


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def is_leaf(tensor: torch.Tensor) -> bool:
    """Tell whether a function has made a tensor of which autograd keeps the gradient."""
    return has_gradient(tensor) and tensor.is_leaf


class OutputsTaken:
    """A function's results taken apart while it is recorded.

    `outputs` are what the graph has to give: numbers, tensors, and what several results view;
    every result, whether it is read or not, if the graph is to be complete without us.
    """

    def __init__(
        self, inputs: dict[int, torch.Tensor], results: Sequence[Any], is_complete: bool
    ) -> None:  # fmt: skip
        self.outputs: list[Any] = []
        self._inputs = {storage_key(tensor): (p, tensor) for p, tensor in inputs.items()}
        self._places: dict[int, int] = {}  # positions of values among the outputs, by identity
        sharing: dict[int, list[torch.Tensor]] = defaultdict(list)
        for i, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                if not is_functionalized(result):
                    raise HandOver(f"output {i} is a constant")
                if not any(result is other for other in sharing[storage_key(result)]):
                    sharing[storage_key(result)].append(result)
            elif result is not None and not isinstance(result, int | float | torch.SymInt):
                raise HandOver(f"output {i} is a {type(result).__name__}")
        self._bases = {
            key: _base_of(tensors) for key, tensors in sharing.items() if key not in self._inputs
        }
        if is_complete:
            for result in results:
                self._places.setdefault(id(result), len(self.outputs))
                self.outputs.append(result)
        self.results = [self._take(result) for result in results]

    def read(self) -> list[int]:
        """Give the outputs that results are made of."""
        return sorted({result.index for result in self.results if not result.is_input})

    def _take(self, result: Any) -> Result:
        if not isinstance(result, torch.Tensor):
            return Result(False, self._place(result))
        key = storage_key(result)
        position, base = self._inputs.get(key) or (None, self._bases[key])
        is_given = position is not None and result is base
        if not is_given and isinstance(result, torch.nn.Parameter):
            make = functools.partial(torch.nn.Parameter, requires_grad=result.requires_grad)
            return Result(False, self._place(result), leaf=make)
        if not is_given and is_leaf(result):
            return Result(False, self._place(result), leaf=_as_leaf)
        view = None
        if base is not None and result is not base:
            if has_gradient(result) and not is_differentiable_view(result, base):
                base = None  # the graph computes its gradient
            else:
                view = _view(result, base)
        if base is not None and position is not None:
            return Result(True, position, view)
        return Result(False, self._place(result if view is None else base), view)

    def _place(self, output: Any) -> int:
        if id(output) not in self._places:
            self._places[id(output)] = len(self.outputs)
            self.outputs.append(output)
        return self._places[id(output)]


def _base_of(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Give what tensors of one memory are views of; None where each may have its own memory."""
    if len(tensors) == 1:
        return None
    can_be_edited = [tensor for tensor in tensors if not is_one_of_several_views(tensor)]
    if len(can_be_edited) < 2 and any(map(has_gradient, tensors)):
        return None
    found = {id(base): base for base in map(viewed, tensors) if is_base(base)}
    if len(found) != 1:
        raise HandOver("outputs share memory, and it is not known whose")
    return next(iter(found.values()))


def _view(tensor: torch.Tensor, base: torch.Tensor) -> View:
    leaf = leaf_of(form_of(base))
    with real_tensors(), _Steps(leaf) as steps:  # the recording does not see these calls
        made = viewed_again(tensor, leaf)
    want = form_of(tensor)
    if made is leaf or not all(map(_C.same_sizes, form_of(made)[:2], want[:2])):
        raise HandOver("an output shares its memory with another, and is no view of it")
    return View(steps.until(made), has_gradient(tensor) or not base.requires_grad)


class _Steps(Answers):
    """Notes the operators that make a view of a tensor, one after the other."""

    def __init__(self, base: Leaf) -> None:
        super().__init__()
        self._steps: list[Step] = []
        self._last: Any = base

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Note one operator."""
        given = (args[1:], kwargs)
        has_symbols = any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves(given))
        if has_symbols:
            given = pytree.tree_map_only(torch.SymInt, Symbolic, given)
        self._steps = [*self.until(args[0]), Step(func, *given, has_symbols)]
        self._last = result

    def until(self, tensor: torch.Tensor) -> list[Step]:
        """Give the steps that make a tensor: the result of the last one, or one of several."""
        if tensor is self._last:
            return self._steps
        index = next(i for i, item in enumerate(self._last) if item is tensor)
        return [*self._steps, Step(operator.getitem, (index,), {})]
