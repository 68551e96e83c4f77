"""Chooses by timing which of PyTorch's kernels computes attention on CUDA.

A process has one choice for each kind of call, which all graphs share and which does not change.
Where the calls are found, and get what was chosen, is capture/attention.py.

The fastest kernel counts of those whose result lies in memory as that of PyTorch's choice does, so
that the rest of the capture is as it would be without a choice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_ort.core import counting
from torch_ort.engine.attention_times import Call, Times, have_order_set, measure
from torch_ort.pytorch.attention_compat import KERNELS

_logger = logging.getLogger("torch_ort.attention")
KERNEL_NAMES = tuple(KERNELS)
_CLEARLY = 0.97  # of the time of PyTorch's choice, as in csrc/run/tuning.cpp


@dataclass(frozen=True)
class Choice:
    """The kernel of a kind of call, and the fastest run of each, in microseconds."""

    kernel: str
    us: Mapping[str, float]


_lock = threading.RLock()
_measuring = threading.Lock()
# By the text of the call; None: there is nothing to choose from.
_choices: dict[str, Choice | None] = {}
_is_order_set = False


def choices() -> dict[str, Choice]:
    """Give all choices of the process."""
    with _lock:
        return {text: choice for text, choice in _choices.items() if choice is not None}


def load_choices(loaded: Mapping[str, Choice]) -> None:
    """Add choices from a file; those that exist stay."""
    with _lock:
        new = {text: choice for text, choice in loaded.items() if text not in _choices}
        _choices.update(new)
    counting.count("attentions_loaded", len(new))


def forget_choices() -> None:
    """Begin anew; for tests."""
    with _lock:
        _choices.clear()


def kernel_for(call: Call, device: torch.device, most_ms: int | None) -> str | None:
    """Name the kernel for a kind of call; None: PyTorch decides.

    It is measured now if it is not known, for at most so many milliseconds (0: no limit), or not if
    `most_ms` is None.
    """
    text = call.text(device)
    with _lock:
        is_known, choice = text in _choices, _choices.get(text)
    if not is_known and most_ms is not None:
        choice = _find_or_measure(text, call, device, most_ms)
    if choice is None:
        return None
    _set_order(device)
    return choice.kernel


def _find_or_measure(text: str, call: Call, device: torch.device, most_ms: int) -> Choice | None:
    with _measuring:
        with _lock:
            if text in _choices:  # another thread has measured it in the meantime
                return _choices[text]
        times = measure(call, device, most_ms)
        choice = None if times is None else _choose(times)
        if choice is not None:
            counting.count("attentions_tuned")
            words = ", ".join(f"{name} {us:.1f} us" for name, us in choice.us.items())
            _logger.info("attention: %s: %s is used: %s", text, choice.kernel, words)
        with _lock:
            return _choices.setdefault(text, choice)


def _choose(times: Times) -> Choice:
    """Keep PyTorch's choice unless another kernel is clearly faster: times of equal ones vary."""
    best = min(times.us, key=times.us.__getitem__)
    return Choice(best if times.us[best] < _CLEARLY * times.us[times.own] else times.own, times.us)


def _set_order(device: torch.device) -> None:
    global _is_order_set
    if not _is_order_set:
        have_order_set(device)
        _is_order_set = True
