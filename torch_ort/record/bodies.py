"""Bodies of If and Loop in a recorded graph, which may refer to nodes of the enclosing graphs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_ort.core.scopes import set_here
from torch_ort.pytorch.dispatch_compat import (
    functionalized,
    is_functionalized,
    unwrapped,
)
from torch_ort.rules.answers import leaf_of
from torch_ort.rules.forms import Spec

_thread = threading.local()  # `recording`: what records in this thread, if it may record branches


@dataclass
class Body:
    """A graph with inputs of its own; its nodes have names that no other graph's have."""

    prefix: str
    graph: fx.Graph = field(default_factory=fx.Graph)


def run_if(inputs: Sequence[Any], bodies: dict[str, Body]) -> None:
    """Stand for an If in a recorded graph: a condition, `then_branch` and `else_branch`."""
    raise NotImplementedError("a recorded If: nothing but the engine runs it")


def run_loop(inputs: Sequence[Any], bodies: dict[str, Body]) -> None:
    """Stand for a Loop: rounds or None, a condition or None, what is carried; `body`.

    The body takes the number of the round and the condition before what is carried; it gives the
    condition of the next round first.
    """
    raise NotImplementedError("a recorded Loop: nothing but the engine runs it")


OPS = {run_if: "If", run_loop: "Loop"}


def recording_branches(
    recording: ControlFlowRecorder | None,
) -> AbstractContextManager[None]:
    """Let `recording()` return this in the block, or None if the recording is for training."""
    return set_here(_thread, "recording", recording)


def recording() -> ControlFlowRecorder | None:
    """Give what records branches and loops on data in this thread; None where nothing can."""
    return getattr(_thread, "recording", None)


class ControlFlowRecorder:
    """Records data-dependent branches and loops; `mode` adds them to the graph."""

    def __init__(self, mode: Any, inputs: dict[int, torch.Tensor]) -> None:
        self.first_line = ""  # the user's line with a branch on data; empty if there is none
        self._mode = mode
        self._inputs = inputs
        self._num_bodies = 0

    def inputs(self) -> list[torch.Tensor]:
        """Give the function's own inputs."""
        return list(self._inputs.values())

    def body(self) -> Body:
        """Make a body."""
        self._num_bodies += 1
        return Body(f"b{self._num_bodies}_")

    def writing_to(self, body: Body) -> AbstractContextManager[None]:
        """Record in a body."""
        return self._mode.writing_to(body)

    def add_input(self, spec: Spec) -> torch.Tensor:
        """Add an input to the body that is written to."""
        leaf = leaf_of(spec)
        self._mode.add_input(leaf)
        return functionalized(leaf)

    def set_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Set the results of the body that is being recorded."""
        self._mode.set_outputs([self._node_of(output) for output in outputs])

    def call(
        self, target: Any, inputs: Sequence[torch.Tensor | None], bodies: dict[str, Body],
        specs: Sequence[Spec], origin: str,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Record an If or a Loop; give its results."""
        leaves = [leaf_of(spec) for spec in specs]
        nodes = [None if value is None else self._node_of(value) for value in inputs]
        node = self._mode.add(target, (nodes, bodies), leaves, origin)
        for i, leaf in enumerate(leaves):
            leaf.source = (node, i)
        return [functionalized(leaf) for leaf in leaves]

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        return self._mode.node_of(unwrapped(tensor) if is_functionalized(tensor) else tensor)
