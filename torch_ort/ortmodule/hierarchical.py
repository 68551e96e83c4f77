"""HierarchicalORTModule: where the whole module cannot be captured, its largest parts that can."""

from __future__ import annotations

import torch

from torch_ort.ortmodule.calls import Calls
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.module import ORTModule
from torch_ort.ortmodule.parts import Parts


class HierarchicalORTModule(ORTModule):
    """An ORTModule whose sub-modules run in the engine, where the whole cannot be captured.

    The first call that cannot be captured runs in plain PyTorch; from the next one on each
    sub-module runs in the engine by itself, or its own sub-modules do in their turn. What has no
    parts and cannot be captured stays in PyTorch. The tree of modules stays what it is.

    An ORTModule does the same after its warning, but for sub-modules without parts of their own.
    Here these are tried as well, and nothing is said.
    """

    def _make_calls(self, module: torch.nn.Module, debug: DebugOptions) -> Calls:
        calls = super()._make_calls(module, debug)
        calls.instead_of_pytorch = lambda: Parts(module, ORTModule).take(debug)
        return calls
