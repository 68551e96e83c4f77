"""Operators that call Python functions at run time, in eager PyTorch and in captured graphs.

Hooks run in Python only while a graph is traced; what has to happen at every step stands here.
All operators are tagged as random, so that no pass removes, merges or reorders them, or runs them
a second time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

_OPTIONS: dict[str, Any] = {"mutates_args": (), "tags": (torch.Tag.nondeterministic_seeded,)}


class Listener(Protocol):
    """What the operators tell of; `key` is the subscription, or -1 for the running one."""

    def mark(self, key: int, starts: bool) -> None:
        """Note that a call of the model starts or ends."""

    def forward(
        self, key: int, name: str, ort_name: str, depth: int, tensor: torch.Tensor
    ) -> list[int]:
        """Take an activation; give three numbers by which its gradient is known."""

    def backward(self, numbers: list[int], name: str, depth: int, gradient: torch.Tensor) -> None:
        """Take the gradient of an activation."""


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Let the operators tell one listener from now on."""
    _listeners[:] = [listener]


@torch.library.custom_op("torch_ort::mark_call", **_OPTIONS)
def mark_call(key: int, starts: bool) -> None:
    """Tell that a call of a model starts or ends."""
    _listeners[0].mark(key, starts)


@mark_call.register_fake
def _fake_mark(key: int, starts: bool) -> None:
    return None


@torch.library.custom_op("torch_ort::probe_activation", **_OPTIONS)
def probe_activation(
    tensor: torch.Tensor, key: int, name: str, ort_name: str, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Show a tensor; give a copy of it, and the numbers by which its gradient is known."""
    with torch.no_grad():
        numbers = _listeners[0].forward(key, name, ort_name, depth, tensor.detach())
    return tensor.clone(), torch.tensor(numbers, dtype=torch.int64, device="cpu")


@probe_activation.register_fake
def _fake_probe(
    tensor: torch.Tensor, key: int, name: str, ort_name: str, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.clone(), torch.empty(3, dtype=torch.int64, device="cpu")


@torch.library.custom_op("torch_ort::probe_gradient", **_OPTIONS)
def probe_gradient(
    gradient: torch.Tensor, numbers: torch.Tensor, name: str, depth: int
) -> torch.Tensor:
    """Show the gradient of an activation; give a copy of it."""
    with torch.no_grad():
        _listeners[0].backward(numbers.tolist(), name, depth, gradient.detach())
    return gradient.clone()


@probe_gradient.register_fake
def _fake_gradient(
    gradient: torch.Tensor, numbers: torch.Tensor, name: str, depth: int
) -> torch.Tensor:
    return gradient.clone()


def _keep_numbers(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, ctx.name, _, ctx.depth = inputs
    # Not by save_for_backward: a checkpoint would compute the numbers again later, from other
    # values.
    ctx.numbers = output[1]


def _differentiate(ctx: Any, gradient: torch.Tensor, unused: Any) -> tuple:
    return probe_gradient(gradient, ctx.numbers, ctx.name, ctx.depth), None, None, None, None


def _pass_on(ctx: Any, gradient: torch.Tensor) -> tuple:
    return gradient, None, None, None


probe_activation.register_autograd(_differentiate, setup_context=_keep_numbers)
probe_gradient.register_autograd(_pass_on)

# torch.fx drops operators whose results are unused, except for those in a list of its own.
for _name in ("mark_call", "probe_activation", "probe_gradient"):
    torch.fx.has_side_effect(getattr(torch.ops.torch_ort, _name).default)
