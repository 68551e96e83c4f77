"""What a step may hold of forward's results: the budget of a graph, and whether its plan keeps it.

`options={"memory_budget": ...}`. C++ chooses what is made again (`csrc/passes/recompute_plan.h`),
by times that follow from what this machine can do at most, measured once in a process.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_ort import _C

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
    """

    planned: _C.BudgetReport
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
        text = (
            f"memory_budget: {held:,} bytes are held for backward, "
            f"{held - self.planned.held_bytes:+,} of what was planned, budget {allowed:,} bytes"
        )
        if held > allowed:
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


@functools.cache
def _speeds(isa: str, threads: int) -> tuple[tuple[tuple[str, float], ...], float]:
    """Measure operations of products a second by dtype, and bytes that copies move."""
    flops = tuple((dtype, _C.measure_peak(dtype, isa)) for dtype in _DTYPES)
    return flops, _C.measure_copy(_COPIED_BYTES)
