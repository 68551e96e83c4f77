"""The tensors of a module: inputs of its graph, which a capture replaces by others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import Unsupported
from torch_ort.guards.scripts import is_script, script_object
from torch_ort.guards.structure import plain_parameter
from torch_ort.guards.watch import containers_in

# Held while the tensors of a module are replaced by others, which other threads must not see.
replacing_tensors = threading.RLock()


class ModuleState:
    """The tensors of a tree of modules, each once, with all attributes that hold it.

    Parameters, buffers, and tensors in plain attributes or in lists and dicts there: all are inputs
    of a graph, so that what they hold, and gradients, are right at every call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.places: list[tuple[Any, Any, int]] = []  # container, key, position
        positions: dict[int, int] = {}
        for path, part in module.named_modules():
            for container, label in _containers(part):
                for key in _keys(container):
                    tensor = container[key]
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    if id(tensor) not in positions:
                        positions[id(tensor)] = len(self.tensors)
                        self.tensors.append(tensor)
                        self.names.append(".".join(filter(None, (path, label, _key_name(key)))))
                    self.places.append((container, key, positions[id(tensor)]))

    def check(self) -> None:
        """Raise Unsupported unless all are plain tensors."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if not plain_parameter(tensor):
                raise Unsupported(
                    f"tensor '{name}' of the module is a {type(tensor).__name__} of layout "
                    f"{tensor.layout}, want a plain, strided tensor"
                )

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Remove the gradients for the time of the block, and restore them.

        Backwards of Functions, which a capture runs to learn what they give, may add to them. One
        of another shape than its tensor, whose data was replaced, could not be put back.
        """
        leaves = [tensor for tensor in self.tensors if tensor.is_leaf and _has_own_gradient(tensor)]
        before = [tensor.grad for tensor in leaves]
        for tensor in leaves:
            tensor.grad = None
        try:
            yield
        finally:
            for tensor, gradient in zip(leaves, before, strict=True):
                tensor.grad = gradient

    @contextmanager
    def asking_like(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let those that are leaves require gradients where `tensors` do, for the block."""
        held = {
            position: container[key]
            for container, key, position in self.places
            if key in _keys(container)
        }
        changed = [
            tensor for position, tensor in held.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf
            and tensor.requires_grad != tensors[position].requires_grad
        ]  # fmt: skip
        try:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)
            yield
        finally:
            for tensor in changed:
                tensor.requires_grad_(not tensor.requires_grad)

    def call_with(self, tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call` with other tensors in all these attributes; assignments of its own persist."""
        before = [container[key] for container, key, _ in self.places]
        for container, key, position in self.places:
            container[key] = tensors[position]
        try:
            return call()
        finally:
            for (container, key, position), tensor in zip(self.places, before, strict=True):
                if container[key] is tensors[position]:
                    container[key] = tensor


def _has_own_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is None or tensor.grad.shape == tensor.shape


def _keys(container: Any) -> list[Any]:
    if isinstance(container, list):
        return list(range(len(container)))
    in_lists = container.list_keys() if isinstance(container, _C.ScriptObject) else []
    return [*container, *in_lists]


def _key_name(key: Any) -> str:
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _containers(module: torch.nn.Module) -> list[tuple[dict | list, str]]:
    own = module.__dict__
    registries = (
        [script_object(module)] if is_script(module) else [own["_parameters"], own["_buffers"]]
    )
    found: list[tuple[dict | list, str]] = [(registry, "") for registry in (*registries, own)]
    # A set of tensors has no positions at which others could be put.
    found += [(value, name) for name, value in containers_in(own) if type(value) is not set]
    return found
