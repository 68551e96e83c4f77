"""The one table of what does not run in the engine, or not with eager's numbers, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from operator_cases import LAYOUTS, Case

ROADS = ("ortmodule", "graph", "compile")


class Kind(enum.Enum):
    """What is different from other operators."""

    FALLS_BACK = "runs in eager PyTorch, after a warning, with eager's outcome"
    UNDEFINED = "its numbers are not those of its arguments; their form is as in eager"
    NOT_RUN = "eager PyTorch cannot run it here"
    WRONG = "is not as in eager"


@dataclass(frozen=True)
class Row:
    """An exception for some operators, by PyTorch's names with variants; "" stands for all."""

    kind: Kind
    reason: str
    names: str
    roads: tuple[str, ...] = ROADS
    layouts: tuple[str, ...] = LAYOUTS

    def holds_for(self, case: Case, road: str) -> bool:
        """Tell whether a case on a road is meant."""
        named = not self.names or case.operator.formatted_name in self.names.split()
        return named and road in self.roads and case.layout in self.layouts


_READ = "a number is read from data, by Python or by PyTorch itself"
_NOT_DENSE = "an ORTModule's graph writes into dense arguments only"

TABLE = (
    Row(
        Kind.NOT_RUN, "compiles CUDA code",
        "jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args "
        "jiterator_binary_return_by_ref jiterator_2inputs_2outputs",
    ),
    Row(
        Kind.NOT_RUN, "divides by zero in backward, which ends the process",
        "native_batch_norm _native_batch_norm_legit nn_functional_pdist", layouts=("empty",),
    ),
    Row(
        Kind.UNDEFINED, "gives memory as it is",
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided",
    ),
    Row(Kind.FALLS_BACK, _READ, "item equal allclose cov corrcoef"),
    Row(
        Kind.FALLS_BACK, "data tells the size of the result, which Dynamo leaves to eager",
        "masked_select combinations nonzero unique unique_consecutive argwhere",
        roads=("graph",),
    ),
    Row(Kind.FALLS_BACK, "takes sparse tensors", "sparse_sampled_addmm sparse_mm_reduce"),
    Row(
        Kind.WRONG, "kernels for preallocated results are wrong for batch norms of what is strided",
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update",
        roads=("graph",), layouts=("transposed", "strided"),
    ),
    Row(
        Kind.WRONG, "in eager, what has gaps draws other numbers than a copy without",
        "normal_in_place", roads=("graph",), layouts=("strided",),
    ),
    Row(
        Kind.FALLS_BACK, _NOT_DENSE,
        "cauchy exponential geometric log_normal normal_in_place uniform native_batch_norm",
        roads=("ortmodule",), layouts=("transposed", "strided"),
    ),
)  # fmt: skip


def row_for(case: Case, road: str) -> Row | None:
    """Give the exception that a case is on a road; None for most."""
    return next((row for row in TABLE if row.holds_for(case, road)), None)


def is_run(case: Case) -> bool:
    """Tell whether eager PyTorch can run a case."""
    rows = (row_for(case, road) for road in ROADS)
    return not any(row is not None and row.kind is Kind.NOT_RUN for row in rows)
