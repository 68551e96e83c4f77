"""A graph's first backward: until it succeeds, eager PyTorch can still run the step instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_ort import _C
from torch_ort.core import autocast
from torch_ort.fallback import failure_of, warn
from torch_ort.pytorch import (
    autograd_compat,
    module_compat,
)
from torch_ort.pytorch.generators import TorchGenerators
from torch_ort.read.layouts import JointLayout
from torch_ort.rules.symbols import Symbolic, symbol_name
from torch_ort.steps.state import GraphState


class FirstBackward:
    """Until one backward has succeeded, keeps all that eager PyTorch needs to run the step again.

    Inputs are kept by reference, and checked for edits; those that the graph writes into are
    copied.
    """

    def __init__(self, layout: JointLayout, state: GraphState) -> None:
        self.proven = False
        self._layout = layout
        self._state = state
        self._pending: dict[int, Kept] = {}

    def before_forward(self, args: Sequence[Any]) -> Kept | None:
        """Remember a call; None once it is no longer needed."""
        if self.proven:
            return None
        inputs = [
            (arg.detach().clone() if i in self._layout.written else arg.detach())
            if isinstance(arg, torch.Tensor) else arg
            for i, arg in enumerate(args)
        ]  # fmt: skip
        return Kept(inputs, _versions(inputs), TorchGenerators())

    def after_forward(self, token: torch.Tensor, kept: Kept) -> None:
        """Store the remembered inputs under the call's token."""
        for old in [key for key in self._pending if not _C.is_live(key)]:
            del self._pending[old]
        self._pending[int(token)] = kept

    def kept(self, token: torch.Tensor) -> Kept | None:
        """Give what is remembered of a call; None if it is not needed any more, or edited."""
        kept = self._pending.get(int(token))
        return None if kept is None or kept.was_edited() else kept

    def run_backward(self, token: torch.Tensor, saved: list[Any], tangents: list[Any]) -> list[Any]:
        """Run the first backward; if the engine fails, run the step again node by node."""
        kept = self.kept(token)
        try:
            gradients = _C.run_backward(token, saved, tangents)
        except Exception as error:
            must_raise = self._state.options.strict or self._state.communicates
            if kept is None or kept.was_edited() or must_raise:
                raise
            failure = failure_of(error, "backward")
        else:
            self.proven = True
            self._pending.clear()
            return gradients
        gradients = self._run_again(kept, tangents)  # an error of the program is raised here
        self._state.failed = True
        warn(failure)
        return gradients

    def _run_again(self, kept: Kept, tangents: list[Any]) -> list[torch.Tensor]:
        # The graph has the casts of autocast already.
        with kept.random.drawing_again(), torch.no_grad(), autocast.in_state(autocast.OFF):
            results = _JointInterpreter(self._layout).run(
                *kept.inputs, *self._layout.with_objects(tangents), enable_io_processing=False
            )
        gradients = results[len(self._layout.forward_outputs) :]
        return [gradients[i] for i in self._layout.differentiated]


@dataclass
class Kept:
    """What a step needs to be run again."""

    inputs: list[Any]
    versions: list[int]
    random: TorchGenerators

    def was_edited(self) -> bool:
        """Tell whether an input was written into since."""
        return _versions(self.inputs) != self.versions


def _versions(inputs: list[Any]) -> list[int]:
    return [autograd_compat.version(x) if isinstance(x, torch.Tensor) else 0 for x in inputs]


class _JointInterpreter(fx.Interpreter):
    """Runs a joint graph without writing into its inputs: the forward call has done that.

    An output without a gradient has None, and so has all that only such outputs reach.
    """

    def __init__(self, layout: JointLayout) -> None:
        super().__init__(layout.joint)
        self._reached = set(layout.tangents)  # outputs that gradients reach, defined or not

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        given = [node for node in n.all_input_nodes if node in self._reached]
        if given and n.op == "call_function":
            self._reached.add(n)
            if all(self.env[node] is None for node in given):
                return None
        return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Give a node's arguments, with zeros for undefined gradients if others are defined."""

        def value(node: fx.Node) -> Any:
            found = self.env[node]
            is_missing = found is None and node in self._reached and n.op == "call_function"
            return self._zeros(node.meta["val"]) if is_missing else found

        return fx.node.map_arg(args, value)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        sizes = [self._value(Symbolic(n)) if isinstance(n, torch.SymInt) else n for n in like.shape]
        return torch.zeros(sizes, dtype=like.dtype, device=like.device)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        """Give a node's arguments; integers over symbols get their values."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return module_compat.pytree.tree_map_only(Symbolic, self._value, (args, kwargs))

    def _value(self, symbolic: Symbolic) -> int:
        symbols = {
            symbol_name(node.meta["val"]): value
            for node, value in self.env.items()
            if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt)
        }
        symbols.pop(None, None)  # of symbols that have turned out to be numbers
        return _C.evaluate_size(symbolic.size, symbols)

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is torch.ops.aten.copy_.default:
            return args[0]
        return super().call_function(target, args, kwargs)
