"""What is said of captures: one logger by rank, one introduction in a process and road."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from torch_ort import options
from torch_ort.core.log_level import LogLevel
from torch_ort.engine.program import Program
from torch_ort.functions.capturing import policy_of

# How much the logger lets through, by level.
PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.INFO,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}

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


def say_ignored(
    logger: logging.Logger, settings: options.ORTModuleOptions, by_torch_compile: bool = False
) -> None:
    """Warn of switches that are set and do nothing, on the road that asks."""
    for variable, why in options.asked_in_vain(settings, by_torch_compile):
        say_once(logger, f"{variable}: {why}")


def say_mode(logger: logging.Logger, mode: str | None) -> None:
    """Warn of a mode of torch.compile, which changes nothing."""
    if mode is not None and options.MODES[mode]:
        say_once(logger, f"mode {mode!r}: the same as 'default': {options.MODES[mode]}")


def introduce(
    logger: logging.Logger, settings: options.ORTModuleOptions, road: str = "ORTModule"
) -> None:
    """Say, once in a process and at INFO, that a road runs in the engine, and by which rules."""
    is_heard = rank_and_world()[0] == 0 and logger.isEnabledFor(logging.INFO)
    if f"introduction of {road}" in _said or not is_heard:
        return
    _said.add(f"introduction of {road}")
    policy = settings.fallback_policy
    states = {
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": policy_of(settings).is_enabled,
        "ORTMODULE_FALLBACK_POLICY": not policy & type(policy).FALLBACK_DISABLE,
    }
    words = ", ".join(f"{name} {'ON' if is_on else 'OFF'}" for name, is_on in states.items())
    logger.info("%s: forward and backward run as one graph in the engine (%s)", road, words)


def say_captured(logger: logging.Logger, programs: Sequence[Program], seconds: float) -> None:
    """Say, at INFO, what a capture has given, and the time of its parts."""
    for program in programs:
        spent = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in program.seconds.items())
        kind = "training" if program.is_training else "inference"
        logger.info("captured a %s graph in %.2fs: %s", kind, seconds, spent)
