"""How reports run a model: compiled afresh, step by step, and left as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_ort.core import autocast
from torch_ort.fallback import put_back
from torch_ort.pytorch.dynamo_compat import COMPILED_APART
from torch_ort.pytorch.generators import TorchGenerators
from torch_ort.pytorch.module_compat import pytree


def compile_afresh(model: Any, options: dict[str, Any] | None) -> Any:
    """Compile with a backend object of its own: Dynamo gives nothing that it has compiled before.

    What it compiles counts for no other recompile limit. Raises UserError on a bad option.
    """
    from torch_ort.backend import ort
    from torch_ort.options import resolve

    resolve(options)
    backend = functools.partial(ort, options=options)
    backend.reset = ort.reset
    return torch.compile(model, backend=backend, **COMPILED_APART)


@contextmanager
def kept(model: Any, inputs: Any) -> Iterator[None]:
    """Put parameters, buffers, inputs and random generators back as they were."""
    random = TorchGenerators()
    tables = [
        (table, dict(table))
        for module in getattr(model, "modules", list)()
        for table in (module._parameters, module._buffers)
    ]
    tensors = [tensor for _, table in tables for tensor in table.values() if tensor is not None]
    copies = [(tensor, tensor.detach().clone()) for tensor in [*tensors, *tensors_of(inputs)]]
    try:
        yield
    finally:
        random.restore()
        for table, before in tables:
            table.update(before)
        put_back(copies)


def run_backward(model: Any, result: Any, inputs: Any) -> None:
    """Run backward if an output asks for it, without autocast; no tensor's `.grad` changes.

    A block of autocast around a report is one around the model, as training loops have it.
    """
    outputs = [
        leaf for leaf in tensors_of(result) if leaf.requires_grad and leaf.is_floating_point()
    ]
    wanted = [*getattr(model, "parameters", list)(), *tensors_of(inputs)]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    if outputs and wanted:
        with autocast.in_state(autocast.OFF):
            total = sum(output.float().sum() for output in outputs)
            torch.autograd.grad(total, wanted, allow_unused=True)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Give the tensors in nested lists, dicts and other containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def isa_of(options: dict[str, Any] | None) -> str:
    """Give the instruction set that options, or the environment, ask for; empty: the widest."""
    from torch_ort.options import resolve

    return resolve(options).isa


def device_of(model: Any, given: Any) -> torch.device:
    """Give the device of the first input or parameter; the CPU if there is none."""
    tensors = [*tensors_of(given), *getattr(model, "parameters", list)()]
    return tensors[0].device if tensors else torch.device("cpu")
