"""Which Functions a module's capture keeps as nodes, and the context in which it does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torch_ort._C import Unsupported
from torch_ort.functions.arguments import full_name
from torch_ort.functions.call import Calls, is_called_by_graph
from torch_ort.pytorch import autograd_compat, trace_compat
from torch_ort.pytorch.patching import not_for_dynamo

# Functions of these packages are traced through, because they are part of what PyTorch or torch_ort
# do with tensors: a checkpoint calls code of the user's, and a collective is an operator.
_TRACED_PACKAGES = ("torch", "torch_ort")

# Checkpoints that are implemented as Functions.
_CHECKPOINT = "torch.utils.checkpoint.CheckpointFunction"
_CHECKPOINT_OF_DEEPSPEED = (
    "deepspeed.runtime.activation_checkpointing.checkpointing.CheckpointFunction"
)

# Functions that stand for an operator of PyTorch. While ZeRO stage 3 is active, DeepSpeed replaces
# torch.nn.functional.linear by this one.
_OPERATORS = {
    "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3": torch.ops.aten.linear.default,
}

_switched: bool | None = None


def switch(to_enable: bool | None) -> None:
    """Keep Functions whole, or trace all of them, whatever options say; None: as options say."""
    global _switched
    _switched = to_enable


@dataclass(frozen=True)
class Policy:
    """Which Functions become PythonOps."""

    is_enabled: bool = True
    skipped: frozenset[str] = frozenset()  # by full name

    def keeps(self, function: type) -> bool:
        """Tell whether a Function becomes a PythonOp."""
        is_traced = function.__module__.partition(".")[0] in _TRACED_PACKAGES
        return self.is_enabled and not is_traced and full_name(function) not in self.skipped


def policy_of(settings: Any) -> Policy:
    """Read the policy from an ORTModule's options."""
    is_enabled = settings.enable_custom_autograd and not settings.disable_custom_autograd_support
    names = settings.skipped_autograd_functions.split(",")
    return Policy(
        is_enabled if _switched is None else _switched,
        frozenset(name.strip() for name in names if name.strip()),
    )


def _checkpointed(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Call a function under a reentrant checkpoint as under one that is not, which is captured.

    A reentrant one gives no gradients to parameters where no argument asks for one.
    """
    asks = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(asks and torch.is_grad_enabled()):
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@contextmanager
def kept_whole(policy: Policy) -> Iterator[None]:
    """Put calls of Functions into traces made in the block: as PythonOps, if that is wanted."""
    calls = Calls()

    def replace(function: type, args: tuple, apply: Callable[..., Any]) -> Any:
        name = full_name(function)
        if name == _CHECKPOINT:
            return _checkpointed(*args)
        if name == _CHECKPOINT_OF_DEEPSPEED:
            raise Unsupported(
                f"{name}: forward would be run again by autograd itself, outside of the graph; "
                "call torch.utils.checkpoint.checkpoint, which is captured and obeyed, or wrap the "
                "parts between checkpoints in a HierarchicalORTModule"
            )
        if name in _OPERATORS:
            return _OPERATORS[name](*args)
        return calls.put(function, args) if policy.keeps(function) else apply(*args)

    try:
        with autograd_compat.functions_replaced(replace):
            yield
    finally:
        calls.forget()


@contextmanager
def functions_seen() -> Iterator[Counter[str]]:
    """Count, by full name, the calls of Functions in this thread that no graph makes."""
    seen: Counter[str] = Counter()
    policy = Policy()

    @not_for_dynamo
    def note(function: type, args: tuple, apply: Callable[..., Any]) -> Any:
        is_traced = any(map(trace_compat.is_traced, args))
        if policy.keeps(function) and not is_traced and not is_called_by_graph(sys._getframe(1)):
            seen[full_name(function)] += 1
        # Functions that are called inside are part of this one.
        with autograd_compat.functions_as_they_are():
            return apply(*args)

    with autograd_compat.functions_replaced(note):
        yield seen
