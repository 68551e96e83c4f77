"""A captured graph with what is known of it at each stage of compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort import _C
from torch_ort.engine.budget import Recomputation


@dataclass
class Program:
    """A captured graph with its session, and all that reports and dumps show of it."""

    graph: _C.Graph
    constants: dict[str, torch.Tensor]
    is_training: bool
    tensor_inputs: list[int] = field(default_factory=list)
    symbol_inputs: list[int] = field(default_factory=list)
    parameter_gradients: list[int] = field(default_factory=list)  # positions among the outputs
    # For each gradient, the input of the engine that it is of.
    gradient_inputs: list[int] = field(default_factory=list)
    # As it was before the passes; kept only if it is shown somewhere.
    captured: _C.Graph | None = None
    session: _C.Session | None = None
    number: int = 0
    # The names of the user, by those in the graph.
    input_names: dict[str, str] = field(default_factory=dict)
    passes: list[tuple[str, int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recomputation: Recomputation | None = None  # of a budget, or of what is chosen by name
    can_be_lazy: bool = False  # its caller supports logits that are computed when they are read
    # The logits that its caller computes.
    lazy_logits: list[_C.LazyLogits] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)  # the Functions that its PythonOps call

    def device_type(self) -> str:
        """Name the type of device that the graph runs on; some numbers lie on the CPU always."""
        types = {device.partition(":")[0] for *_, device in self.graph.types().values()}
        return min(types - {"cpu"}, default="cpu")
