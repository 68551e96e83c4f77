"""HierarchicalORTModule: where the whole module cannot be captured, its largest parts that can."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort.ortmodule.calls import Calls
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.module import ORTModule


class HierarchicalORTModule(ORTModule):
    """An ORTModule whose sub-modules are wrapped instead, where the whole cannot be captured.

    The first call that cannot be captured runs in plain PyTorch; from the next one on each
    sub-module runs in the engine by itself, or is taken apart in its turn. What has no parts and
    cannot be captured stays in PyTorch. Names of parameters and keys of checkpoints do not change.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        super().__init__(module, debug_options)

    def _make_calls(self, *arguments: Any) -> Calls:
        calls = super()._make_calls(*arguments)
        calls.instead_of_pytorch = self._wrap_parts
        return calls

    def _wrap_parts(self) -> None:
        _wrap_children(self._original, self._debug_options, {})


def _wrap_children(
    module: torch.nn.Module, debug_options: DebugOptions, wrapped: dict[int, ORTModule]
) -> None:
    for name, child in module.named_children():
        if isinstance(child, ORTModule):
            continue
        # Containers without a forward are not called themselves.
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            _wrap_children(child, debug_options, wrapped)
            continue
        if id(child) not in wrapped:
            wrapped[id(child)] = HierarchicalORTModule(child, debug_options)
        module._modules[name] = wrapped[id(child)]
