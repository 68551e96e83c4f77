"""The functions that AOTAutograd calls for forward and backward of a graph of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.engine import watchers
from torch_ort.engine.budget import Recomputation
from torch_ort.engine.program import Program
from torch_ort.options import Options
from torch_ort.pytorch import (
    autograd_compat,
)
from torch_ort.read.layouts import JointLayout, OutputLayout
from torch_ort.steps.first_backward import FirstBackward, Kept
from torch_ort.steps.lazy_logits import Recipe
from torch_ort.steps.state import GraphState

_TOKEN = "torch_ort token"  # among the notes of autograd's node


class ForwardRunner:
    """Runs instead of the forward stub; `backward` runs instead of the other one."""

    def __init__(
        self, layout: JointLayout, session: _C.Session, options: Options, state: GraphState,
        recomputation: Recomputation | None = None,
        inspect: Callable[[Sequence[Any]], None] | None = None, is_one_of_two: bool = False,
    ) -> None:  # fmt: skip
        self._boxed_call = True  # set on the object, because AOTAutograd copies it from there
        self._layout = layout
        self.session = session
        self.options = options
        self._state = state
        self._saved_inputs = session.saved_inputs
        self._saved_outputs = session.saved_outputs
        # The first backward may also show that another graph is the right one.
        keeps = is_one_of_two or not options.strict
        self.first_backward = FirstBackward(layout, state) if keeps else None
        self.backward = BackwardRunner(self)
        self._edges = layout.gradient_inputs()
        self._last = threading.local()  # segments and token of the latest call of each thread
        self._recomputation = recomputation
        self._inspect = inspect  # called with the inputs of each call

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run forward; clears `args`."""
        layout = self._layout
        tensors = [args[i] for i in layout.tensor_inputs]
        symbols = [args[i] for i in layout.symbol_inputs]
        objects = [args[i] for i in layout.object_inputs]
        kept = self.note_call(args)
        args.clear()
        packs = autograd_compat.saved_tensor_hooks_copy()
        results = _C.run_forward(
            self.session.id, tensors, symbols, packs, self.options.early_gradients
        )
        token = results.pop()
        self._last.segments = _C.segments(token)
        self._last.token = token if packs else None
        saved = [tensors[i] for i in self._saved_inputs]
        saved += [results[i] for i in self._saved_outputs]
        # An error of hooks is the program's: it would be raised again.
        if kept is not None and not packs:
            self.first_backward.after_forward(token, kept)
        outputs = layout.outputs.assemble(results, objects)
        return [*outputs, token, *(saved[i] for i in layout.to_saved), *objects]

    def hold_call(self, node: torch.autograd.graph.Node | None) -> None:
        """Let the newest call end with its node, if hooks may have dropped the token."""
        token, self._last.token = getattr(self._last, "token", None), None
        if node is not None and token is not None:
            node.metadata[_TOKEN] = token

    def let_leave_early(self, results: Sequence[Any]) -> None:
        """Let gradients of the newest call leave early; `results` are AOTAutograd's."""
        segments = self._last.segments
        result = next((x for x in results if isinstance(x, torch.Tensor) and x.grad_fn), None)
        if segments and result is not None and -1 not in self._edges:
            num_edges = len(self._layout.tensor_inputs)
            _C.let_leave_early(result, segments, self._edges, num_edges)

    def note_call(self, args: Sequence[Any]) -> Kept | None:
        """Remember the tensors that a first run writes, and what another run of the call needs.

        None once the latter is not needed.
        """
        if self._recomputation is not None:  # its first step is complete once there is a plan
            self._recomputation.check(self.session)
        if self._inspect is not None:
            self._inspect(args)
        if watchers.call_watchers:
            tensors = [args[i] for i in self._layout.tensor_inputs]
            symbols = [args[i] for i in self._layout.symbol_inputs]
            watchers.note_call(self.session, tensors, symbols)
        guard = self.first_backward
        kept = guard.before_forward(args) if guard else None
        if self._state.written is not None:
            self._state.written += [
                (args[i], kept.inputs[i] if kept is not None else args[i].detach().clone())
                for i in self._layout.written
            ]
        return kept


class BackwardRunner:
    """Runs instead of the backward stub.

    Its arguments are the token, saved tensors, objects, and the gradients of the outputs.
    """

    def __init__(self, forward: ForwardRunner) -> None:
        self._boxed_call = True
        self._forward = forward

    def __deepcopy__(self, memo: dict) -> BackwardRunner:
        return self

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run backward; clears `args`."""
        layout = self._forward._layout
        guard = self._forward.first_backward
        token = autograd_compat.notes_of_running_node().get(_TOKEN, args[0])
        first, last = 1 + len(layout.saved), 1 + len(layout.saved) + len(layout.objects)
        given, objects = args[1:first], args[first:last]
        tangents = layout.only_tensors(args[last:])
        args.clear()
        saved = [given[i] for i in layout.order]
        if torch.compiler.is_compiling():  # compiled autograd gets one opaque operator
            gradients = torch.ops.torch_ort.run_backward(
                self._forward.session.id, token, saved, tangents
            )
        elif guard is None or guard.proven:
            gradients = _C.run_backward(token, saved, tangents, early=True)
        else:
            gradients = guard.run_backward(token, saved, tangents)
        return layout.gradient_layout.assemble(gradients, objects)


class InferenceRunner:
    """Runs a graph without gradients."""

    def __init__(
        self,
        program: Program,
        session: _C.Session,
        outputs: OutputLayout,
        objects: list[int],
        written: list[int],
        state: GraphState,
    ) -> None:
        self._boxed_call = True
        self._program = program
        self.session = session
        self._outputs = outputs
        self._objects = objects  # positions of inputs that pass through
        self._written = written  # positions of the inputs that the graph writes into
        self._state = state
        self._lazy = [
            Recipe(each, range(len(program.tensor_inputs))) for each in program.lazy_logits
        ]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph; clears `args`."""
        if self._state.written is not None:
            self._state.written += [(args[i], args[i].detach().clone()) for i in self._written]
        tensors = [args[i] for i in self._program.tensor_inputs]
        symbols = [args[i] for i in self._program.symbol_inputs]
        objects = [args[i] for i in self._objects]
        args.clear()
        if watchers.call_watchers:
            watchers.note_call(self.session, tensors, symbols)
        results = _C.run_forward(self.session.id, tensors, symbols, False)
        for each in self._lazy:
            rows = results[each.output]
            results[each.output] = each.logits(each.form(rows), rows, tensors)
        return self._outputs.assemble(results, objects)
