"""What an ORTModule says: one logger by rank, the table of features at the first run."""

from __future__ import annotations

import logging
import sys

import torch

from torch_ort import options
from torch_ort.functions.capturing import policy_of
from torch_ort.ortmodule.debug_options import LogLevel

# How much the logger lets through, by level.
PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.INFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}

_WIDTH = 96
_said: set[str] = set()


def rank_and_world() -> tuple[int, int]:
    """Give this process's rank and the number of ranks; 0 of 1 without torch.distributed."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def make_logger(level: LogLevel) -> logging.Logger:
    """Give the logger `orttraining`, or `orttraining.rank-N` where there are several ranks.

    Ranks other than 0 are silent from INFO up; developers' levels speak on all ranks.
    """
    rank, world = rank_and_world()
    logger = logging.getLogger(f"orttraining.rank-{rank}" if world > 1 else "orttraining")
    logger.setLevel(PYTHON_LEVELS[level])
    logger.disabled = rank != 0 and level >= LogLevel.INFO
    root = logging.getLogger("orttraining")
    if not root.hasHandlers():
        handler = _StderrHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(name)s [%(levelname)s] - %(message)s")
        )
        root.addHandler(handler)
    return logger


class _StderrHandler(logging.StreamHandler):
    """Writes to standard error as it is at the time, which tests and notebooks replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def say_once(logger: logging.Logger, text: str) -> None:
    """Warn, unless this process has said so already."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def say_ignored(logger: logging.Logger, settings: options.ORTModuleOptions) -> None:
    """Warn of switches that are set and do nothing yet."""
    for variable in options.asked_in_vain(settings):
        say_once(logger, f"{variable}: not available yet, ignored")


def first_run_table(settings: options.ORTModuleOptions) -> str:
    """Give the table of features that the first run prints."""
    policy = settings.fallback_policy
    falls_back = not policy & type(policy).FALLBACK_DISABLE
    rows = [
        ("Whole-graph engine", True, "Forward and backward run as one graph with planned memory"),
        ("Fused regions", True, "Element-wise operators, norms, softmax and losses in one pass"),
        ("ATen Executor", True, "Any registered PyTorch operator runs inside the graph"),
        (
            "Custom Function",
            policy_of(settings).is_enabled,
            "Each torch.autograd.Function is a PythonOp, see ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        ),
        ("Memory Optimizer", False, "ORTMODULE_MEMORY_OPT_LEVEL is not available yet"),
        ("Compute Optimizer", False, "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER is not available yet"),
        ("Auto Fallback", falls_back, "Failures run in PyTorch, see ORTMODULE_FALLBACK_POLICY"),
        ("TritonOp Enabled", False, "ORTMODULE_USE_TRITON is not available yet"),
        ("ZeRO Stage3 Support", True, "For parts named in deepspeed.utils.set_z3_leaf_modules"),
    ]
    title = "ORTModule of torch_ort accelerates your model".center(_WIDTH - 2)
    lines = ["", "*" * _WIDTH, f"*{title}*", "*" * _WIDTH]
    lines += [f"{name:20}: {'ON' if on else 'OFF':4}: {text}" for name, on, text in rows]
    return "\n".join([*lines, "*" * _WIDTH])
