"""The one table of what does not run in the engine, or not with eager's numbers, and why.

A row that a case does not need is a failure as well.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
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
    only: Callable[[Case], bool] = lambda case: True

    def holds_for(self, case: Case, road: str) -> bool:
        """Tell whether a case on a road is meant."""
        named = not self.names or case.operator.formatted_name in self.names.split()
        return named and road in self.roads and case.layout in self.layouts and self.only(case)


_READ = "a number is read from data, by Python or by PyTorch itself"
_NEVER_BROKEN = ("ortmodule", "graph")  # Dynamo breaks a graph where data is read


def _has_tensors(count: int) -> Callable[[Case], bool]:
    return lambda case: len(case.tensors) >= count


def _draws(case: Case) -> bool:
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(case.function(*case.fresh()))
    return not torch.equal(*results)


def _splits_by_tensor(case: Case) -> bool:
    return len(case.tensors) > 1 and case.tensors[1].numel() > 0


def _is_transposed(case: Case) -> bool:
    return not case.tensors[0].is_contiguous()


def _has_statistics(case: Case) -> bool:
    """Tell whether a batch norm of something that is not dense has running statistics."""
    return len(case.tensors) >= 4 and _is_transposed(case)


def _has_mask(case: Case) -> bool:
    return any(tensor.dtype == torch.bool for tensor in case.tensors[1:])


TABLE = (
    Row(
        Kind.NOT_RUN, "compiles CUDA code",
        "jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args "
        "jiterator_binary_return_by_ref jiterator_2inputs_2outputs",
    ),
    Row(Kind.NOT_RUN, "divides by zero in backward, which ends the process",
        "native_batch_norm _native_batch_norm_legit nn_functional_pdist", layouts=("empty", )),
    Row(Kind.NOT_RUN, "its samples say another size than the result has", "repeat_interleave",
        layouts=("empty", ), only=_has_tensors(2)),
    Row(Kind.NOT_RUN, "bytes that are no bools change when they are read",
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided",
        only=lambda case: case.dtype == torch.bool),
    Row(Kind.UNDEFINED, "gives memory as it is",
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided"),
    Row(Kind.UNDEFINED, "eager's mean over no sample is memory as it is",
        "nn_functional_multilabel_margin_loss nn_functional_multi_margin_loss",
        layouts=("empty", )),
    Row(Kind.UNDEFINED, "new elements are memory as it is", "resize_", layouts=("empty",)),
    Row(Kind.FALLS_BACK, _READ, "item equal allclose cov corrcoef"),
    Row(Kind.FALLS_BACK, _READ, "nn_functional_ctc_loss linalg_lstsq linalg_lstsq_grad_oriented",
        roads=_NEVER_BROKEN),
    Row(Kind.FALLS_BACK, "a branch asks for the signs of variances",
        "nn_functional_gaussian_nll_loss"),
    Row(Kind.FALLS_BACK, "where to begin is read from a tensor", "narrow", roads=_NEVER_BROKEN,
        only=_has_tensors(2)),
    Row(Kind.FALLS_BACK, "where to split is read from a tensor", "tensor_split", roads=("graph", ),
        only=_splits_by_tensor),
    Row(Kind.FALLS_BACK, "into how many parts, or where in a later dim, is read from a tensor",
        "tensor_split", roads=("ortmodule", ),
        only=lambda case: _splits_by_tensor(case) and case.sample > 0),
    Row(Kind.FALLS_BACK, "a mask tells how many elements are written, which Dynamo leaves to eager",
        "index_put", roads=("graph", ), layouts=("written", ),
        only=lambda case: _has_mask(case) and case.tensors[0].is_floating_point()),
    Row(Kind.FALLS_BACK, "takes sparse tensors", "sparse_sampled_addmm sparse_mm_reduce"),
    Row(Kind.FALLS_BACK, "gives sparse tensors", "to_sparse"),
    Row(Kind.FALLS_BACK, "ONNX has no complex numbers of halves", "chalf"),
    Row(Kind.FALLS_BACK, "AOTAutograd writes into the tensor as it was before it lost dims",
        "squeeze_multiple", roads=("ortmodule", ), layouts=("written", ),
        only=lambda case: case.tensors[0].numel() > 1),
    Row(
        Kind.FALLS_BACK, "PyTorch's functionalization has no form of polygamma_ without writes",
        "polygamma_polygamma_n_0 polygamma_polygamma_n_1 polygamma_polygamma_n_2 "
        "polygamma_polygamma_n_3 polygamma_polygamma_n_4",
        layouts=("written", "copy written"),
    ),
    Row(Kind.FALLS_BACK, "counts in the memory of what an ORTModule has a dense copy of",
        "as_strided as_strided_copy as_strided_partial_views as_strided_scatter resize_",
        roads=("ortmodule", ), layouts=("strided", ),
        only=lambda case: not case.tensors[0].is_contiguous()),
    Row(Kind.WRONG, "in eager, what has gaps draws other numbers than a copy without",
        "normal_in_place", roads=("graph", ), layouts=("strided", )),
    Row(Kind.WRONG, "bernoulli_ draws in the order of memory, its form without writes row by row",
        "nn_functional_alpha_dropout", roads=("ortmodule", "graph"), layouts=("transposed", ),
        only=_draws),
    Row(Kind.WRONG, "masks of the engine are drawn row by row, and so lies what they multiply",
        "nn_functional_dropout", roads=("graph", ), layouts=("transposed", ), only=_draws),
    Row(
        Kind.WRONG, "captures compare with all classes, which keeps the order of dims in memory",
        "nn_functional_one_hot", roads=("graph",), layouts=("transposed",),
        only=lambda case: case.sample % 2 == 1,  # the number of classes is given
    ),
    Row(Kind.WRONG, "of a column-major inverse in another shape, an ORTModule gives row-major ones",
        "linalg_tensorinv", roads=("ortmodule", ), layouts=("as given", "transposed")),
    Row(Kind.WRONG, "captures make it row-major, as PyTorch's formula in Python does",
        "native_dropout_backward", roads=("graph", ), layouts=("transposed", )),
    Row(Kind.WRONG, "AOTAutograd's captures have the layout that PyTorch's meta kernel tells",
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update", roads=("graph", ),
        layouts=("transposed", ), only=_has_statistics),
    Row(Kind.WRONG, "AOTAutograd's captures have the layout that PyTorch's meta kernel tells",
        "nn_functional_batch_norm", roads=("graph", ), layouts=("transposed", ),
        only=_has_statistics),
)  # fmt: skip

# What some samples are refused for and others are not: they run in eager PyTorch.
REFUSALS = (
    ("forward (draws|writes|reads|gives) .* not dense", ""),
    (
        "data-dependent: Python asks for a number in a tensor",
        "nn_functional_one_hot svd svd_lowrank linalg_svd",
    ),
    (
        "DynamicOutputShapeException: aten.(_unique|repeat_interleave)",
        "index_fill repeat_interleave",
    ),
    # By PyTorch's formula in Python, not by its kernel.
    ("linalg.vector_norm cannot compute the inf norm", "norm_inf"),
)


def is_refusal(case: Case, error: Exception) -> bool:
    """Tell whether an error leaves a case to eager PyTorch for a known reason."""
    return any(
        re.search(words, str(error))
        and (not names or case.operator.formatted_name in names.split())
        for words, names in REFUSALS
    )


def row_for(case: Case, road: str) -> Row | None:
    """Give the exception that a case is on a road; None for most."""
    return next((row for row in TABLE if row.holds_for(case, road)), None)


def is_run(case: Case) -> bool:
    """Tell whether eager PyTorch can run a case."""
    rows = (row_for(case, road) for road in ROADS)
    return not any(row is not None and row.kind is Kind.NOT_RUN for row in rows)
