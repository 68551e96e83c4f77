"""HierarchicalORTModule: an ORTModule that captures sub-modules if it cannot capture the whole."""

from __future__ import annotations

import torch

from torch_ort.ortmodule.calls import Calls
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.module import ORTModule
from torch_ort.ortmodule.parts import Parts


class HierarchicalORTModule(ORTModule):
    """An ORTModule that runs its sub-modules in the engine if the whole cannot be captured.

    The first call that cannot be captured runs in plain PyTorch. From the next one on each
    sub-module runs in the engine as a graph of its own or, if it cannot be captured either, its own
    sub-modules do in turn. A sub-module without parts that cannot be captured runs in PyTorch. The
    tree of modules stays the same. Arguments and errors are those of `ORTModule`.

    An ORTModule does the same after a warning, but leaves sub-modules without parts of their own in
    PyTorch. This class tries those too, and does not warn. Where no sub-module can be captured
    either, and plain PyTorch is not allowed, the call raises why the whole cannot.
    """

    def _make_calls(self, module: torch.nn.Module, debug: DebugOptions) -> Calls:
        calls = super()._make_calls(module, debug)
        parts = Parts(module, ORTModule)
        calls.instead_of_pytorch = lambda: parts.take(debug)
        calls.stay_out = parts.stay_out
        return calls
