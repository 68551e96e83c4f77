"""Recomputation in backward: what the options ask for, and whether the memory plan keeps to it.

The options are `memory_budget`, and `memory_opt_level` with `memory_opt_config`. C++ chooses which
values are recomputed (`csrc/passes/border/plan.h`). It estimates times from the peak of this
machine's matrix products and copies, which is measured once in a process.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_ort import _C
from torch_ort.core.clusters import parse_cluster, recomputes_by_name

if TYPE_CHECKING:
    from torch_ort.options import Options

_DTYPES = ("float32", "float64", "bfloat16")
_COPIED_BYTES = 32 << 20  # more than the caches of a core hold, which is typical of activations

_logger = logging.getLogger("torch_ort.budget")


@dataclass
class Recomputation:
    """What was planned for one graph; all sizes in bytes.

    `planned.dense_bytes` is the most that results of forward occupy at one time without
    recomputation, `peak_bytes` the same with it, `allowed_bytes` the budget, and `held_bytes` what
    is saved for backward. `again_us` is the estimated time of the recomputation in microseconds,
    and `made` lists what is recomputed: (name, op, origin, bytes less saved, microseconds).
    `level` is that of `memory_opt_level` if there is no budget. `planned` then has the number of
    layers, and which of `clusters` are recomputed.
    """

    planned: _C.BudgetReport
    level: int | None = None
    is_checked: bool = False

    def check(self, session: _C.Session) -> None:
        """Log once what the plan of the first step saves for backward, against what was planned.

        Plans of later calls, whose sizes may differ, are not compared.
        """
        plan = None if self.is_checked else session.plan_report()
        if plan is None:
            return
        self.is_checked = True
        held, allowed = plan["saved_bytes"], self.planned.allowed_bytes
        if self.level is None:
            option, of_what = "memory_budget", f"budget {allowed:,} bytes"
        else:
            option = "memory_opt_level" if self.level else "memory_opt_config"
            of_what = f"{self.planned.dense_held_bytes:,} bytes without recomputation"
        text = (
            f"{option}: {held:,} bytes are saved for backward, "
            f"{held - self.planned.held_bytes:+,} against the plan, {of_what}"
        )
        if self.level is None and held > allowed:
            _logger.warning("%s: it is exceeded by %s bytes", text, f"{held - allowed:,}")
        else:
            _logger.info(text)


def of_options(options: Options) -> _C.Budget | None:
    """Give the budget that the options ask for; None for none."""
    amount = options.memory_budget
    if not amount:
        return None
    flops, num_bytes = _speeds(options.isa, torch.get_num_threads())
    return _C.Budget(float(amount), isinstance(amount, float), dict(flops), num_bytes)


def selection_of_options(options: Options, lists_all: bool = False) -> _C.Selection | None:
    """Give what the options ask to be recomputed by layer or by name; None for nothing.

    With `lists_all` the selection lists all that could be recomputed, and is never None.
    """
    is_on = recomputes_by_name(options)
    if not is_on and not lists_all:
        return None
    config = options.memory_opt_probe_config
    if config == "1:0":
        config = options.memory_opt_probe_recompute_level
    search, _, ends_at_layers = config.partition(":")
    chosen = [] if options.memory_opt_level else map(parse_cluster, options.memory_opt_config)
    selection = _C.Selection(
        options.memory_opt_level, list(chosen), search == "1", ends_at_layers == "1", lists_all
    )
    if is_on:  # otherwise no estimated times are needed
        flops, num_bytes = _speeds(options.isa, torch.get_num_threads())
        selection.set_speeds(dict(flops), num_bytes)
    return selection


@functools.cache
def _speeds(isa: str, threads: int) -> tuple[tuple[tuple[str, float], ...], float]:
    """Measure operations per second of matrix products by dtype, and bytes per second of copies."""
    flops = tuple((dtype, _C.measure_peak(dtype, isa)) for dtype in _DTYPES)
    return flops, _C.measure_copy(_COPIED_BYTES)
