"""What a step may hold of forward's results, or makes of them again, and whether its plan does.

`options={"memory_budget": ...}`, and `memory_opt_level` with `memory_opt_config`. C++ chooses
what is made again (`csrc/passes/recompute_plan.h`), by times that follow from what this machine can
do at most, measured once in a process.
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
_COPIED_BYTES = 32 << 20  # more than caches near a core hold, as activations are

_logger = logging.getLogger("torch_ort.budget")


@dataclass
class Recomputation:
    """What was planned for one graph: all sizes in bytes.

    `planned.dense_bytes` is the most that lives at one time of forward's results where nothing is
    made again, `allowed_bytes` the budget, `peak_bytes` the same as `dense_bytes` for the plan,
    `held_bytes` what of that stands at the border; `again_us` the microseconds that it should take,
    and `made` what is made again: (name, op, origin, bytes that cross no more, microseconds).
    `level` is that of `memory_opt_level` where no budget is in force: `planned` then says how many
    layers there are, and what is on of `clusters`.
    """

    planned: _C.BudgetReport
    level: int | None = None
    is_checked: bool = False

    def check(self, session: _C.Session) -> None:
        """Compare what the plan of a first step holds at the border with the budget.

        Sizes of later captures of the same graph may be others: then nothing is said.
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
            f"{option}: {held:,} bytes are held for backward, "
            f"{held - self.planned.held_bytes:+,} of what was planned, {of_what}"
        )
        if self.level is None and held > allowed:
            _logger.warning("%s: it is missed by %s bytes", text, f"{held - allowed:,}")
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
    """Give what the options ask to be made again by name; None for nothing.

    With `lists_all` it is for a list of what could be, and there is always one.
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
    if is_on:  # else nobody reads times
        flops, num_bytes = _speeds(options.isa, torch.get_num_threads())
        selection.set_speeds(dict(flops), num_bytes)
    return selection


@functools.cache
def _speeds(isa: str, threads: int) -> tuple[tuple[tuple[str, float], ...], float]:
    """Measure operations of products a second by dtype, and bytes that copies move."""
    flops = tuple((dtype, _C.measure_peak(dtype, isa)) for dtype in _DTYPES)
    return flops, _C.measure_copy(_COPIED_BYTES)
