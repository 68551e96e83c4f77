"""ORTModules whose parameters DeepSpeed's ZeRO stage 3 partitions and gathers.

Each rank holds a part of every parameter. Hooks around the call of each module gather those that
hang in it, and divide them again, in forward and in backward. So no graph can hold a module and its
parts, unless DeepSpeed takes the module for a leaf: then it gathers all that is in it at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_ort._C import UserError
from torch_ort.capture import logs
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.parts import Parts

SWITCH = "ORTMODULE_ENABLE_ZERO_STAGE3"
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def mark_blocks(module: nn.Module, wrapper: type, logger: logging.Logger) -> None:
    """Let DeepSpeed, whose `initialize` comes later, gather each block of a module as a whole."""
    blocks = dict(blocks_of(module, wrapper))
    if not blocks:
        return
    try:
        from deepspeed.utils import set_z3_leaf_module
    except ImportError as error:
        logs.say_once(logger, f"{SWITCH}: ignored, as deepspeed cannot be imported: {error}")
        return
    for block in blocks.values():
        set_z3_leaf_module(block, True)
        block.register_forward_pre_hook(_with_gradients, prepend=True)
    kinds = Counter(type(block).__name__ for block in blocks.values())
    logger.info(
        "%s: %s: marked as leaves, so that DeepSpeed gathers each as a whole and the engine runs "
        "it as one graph: %s",
        SWITCH, ", ".join(f"{count} {kind}" for kind, count in kinds.items()), ", ".join(blocks),
    )  # fmt: skip


def run_between_gathers(
    module: nn.Module, wrapper: type, debug: DebugOptions, logger: logging.Logger
) -> None:  # fmt: skip
    """Bring the parts of a module into the engine, now that DeepSpeed has put its hooks there."""
    Parts(module, wrapper).take(debug)
    for part in module.modules():
        if "ds_id" in vars(part):
            # In its first call DeepSpeed adds this counter. Then the number of attributes would
            # differ from that in the capture, and each part would be captured again.
            vars(part).setdefault("applied_pre_backward_ref_cnt", 0)
    blocks = dict(blocks_of(module, wrapper))
    if blocks:
        logs.say_once(
            logger,
            "DeepSpeed's ZeRO stage 3 gathers parameters around the calls of small modules, each "
            f"of which runs as a graph of its own: with {SWITCH}=1 in the environment when the "
            f"ORTModule is made, it would gather {len(blocks)} blocks as a whole",
        )


def blocks_of(module: nn.Module, wrapper: type) -> Iterator[tuple[str, nn.Module]]:
    """Walk over the blocks of a module, with their paths.

    Those are the members of the innermost lists of two or more modules of one class that have a
    forward, parts and parameters. What is a `wrapper`, a leaf already, or shares a parameter with
    what is outside of it, is none: DeepSpeed counts the gradients of a leaf apart from all others.
    """
    uses = Counter(
        parameter for part in module.modules() for parameter in part._parameters.values()
    )

    def walk(outer: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, part in outer.named_children():
            if isinstance(part, wrapper) or getattr(part, "_z3_leaf", False):
                continue
            inner = list(walk(part, f"{path}{name}."))
            if inner:
                yield from inner
            elif _is_block(part, outer) and not _shares(part, uses):
                yield f"{path}{name}", part

    return walk(module, "")


def _is_block(part: nn.Module, outer: nn.Module) -> bool:
    is_called = type(part).forward is not nn.Module.forward
    if not isinstance(outer, _LISTS) or not is_called or next(part.children(), None) is None:
        return False
    alike = {id(other) for other in outer.children() if type(other) is type(part)}
    return len(alike) > 1 and next(part.parameters(), None) is not None


def _shares(part: nn.Module, uses: Counter[nn.Parameter | None]) -> bool:
    inside = Counter(p for inner in part.modules() for p in inner._parameters.values())
    inside.pop(None, None)  # a bias that is not there
    return any(uses[parameter] > count for parameter, count in inside.items())


def _with_gradients(block: nn.Module, args: tuple) -> tuple:
    """Be a hook before a block: let an input require grad, if none does.

    A gradient that arrives there tells DeepSpeed that those of the block's parameters are complete.

    Raises UserError where no input can.
    """
    is_gathered = "ds_id" in vars(block)
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters())
    if not is_gathered or not trains or any(_requires_grad(value) for value in args):
        return args
    given = tuple(_requiring_grad(value) for value in args)
    if not any(map(_requires_grad, given)):
        raise UserError(
            f"{SWITCH}: {type(block).__name__}: got no floating-point tensor as a positional "
            "argument, want one: DeepSpeed would take the gradients of a module that it gathers as "
            "a whole before they are there; unset the variable"
        )
    return given


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _requiring_grad(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_number else value
