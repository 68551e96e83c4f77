"""What a program of this folder is, and how one is run.

A program is a generator function. It gets `wrap`, which makes of a module what is called in its
place, and is written as a script would be: it builds its modules, takes STEPS optimizer steps, and
yields the loss (or several) of each. It returns the modules and tensors that are to be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch

STEPS = 10

Wrap = Callable[[torch.nn.Module], Any]


@dataclass(frozen=True)
class Program:
    """A training program, and how near to eager PyTorch its numbers have to be."""

    name: str
    train: Callable[[Wrap], Generator]
    is_quick: bool
    rtol: float
    atol: float


@dataclass
class Trained:
    """What a run has left: the losses of each step, and tensors by name."""

    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]


PROGRAMS: dict[str, Program] = {}


def program(
    train: Callable | None = None, *, quick: bool = False, rtol: float = 1e-3, atol: float = 1e-4
) -> Any:
    """Add a program to the list; `quick` ones are in the default run."""

    def add(train: Callable) -> Callable:
        name = f"{train.__module__.rpartition('.')[2]}.{train.__name__}"
        PROGRAMS[name] = Program(name, train, quick, rtol, atol)
        return train

    return add if train is None else add(train)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take the optimizer's step for the gradients of one loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run(one: Program, wrap: Wrap) -> Trained:
    """Run a program from a seed; give its losses and what it has trained."""
    torch.manual_seed(0)
    random.seed(0)
    steps, losses = one.train(wrap), []
    while True:
        try:
            losses.append(_together(next(steps)))
        except StopIteration as end:
            return Trained(losses, _state_of(end.value))


def _together(losses: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    return torch.stack([part.detach().double() for part in parts])


def _state_of(trained: Any) -> dict[str, torch.Tensor]:
    """Name all parameters, buffers and tensors of what a program returns, and their gradients."""
    parts = trained if isinstance(trained, tuple) else (trained,)
    state = {}
    for i, part in enumerate(parts):
        if isinstance(part, torch.Tensor):
            state[f"{i}"] = part.detach().clone()
            continue
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            state[f"{i}.{name}"] = tensor.detach().clone()
            if tensor.grad is not None:
                state[f"{i}.{name}.grad"] = tensor.grad.detach().clone()
    return state


def assert_same(got: Trained, want: Trained, one: Program) -> None:
    """Compare two runs; the message names the step or the tensor."""
    near = {"rtol": one.rtol, "atol": one.atol}
    assert len(got.losses) == len(want.losses) == STEPS
    for step, (ours, theirs) in enumerate(zip(got.losses, want.losses, strict=True)):
        torch.testing.assert_close(ours, theirs, **near, msg=_naming(f"losses of step {step}"))
    assert got.state.keys() == want.state.keys()
    for name, theirs in want.state.items():
        torch.testing.assert_close(got.state[name], theirs, **near, msg=_naming(name))


def _naming(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"
