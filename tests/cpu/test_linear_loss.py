"""The cross-entropy of a linear layer in chunks of rows, against eager PyTorch in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_nodes import (
    FORMS,
    IGNORED,
    NEAR,
    OF_ROWS,
    Loss,
    compare,
    computed,
    list_of,
    operands,
    wanted,
)
from regions import ISAS, also_on_cuda, crossed

from torch_ort import _C


@also_on_cuda
@crossed(isa=ISAS, dtype=NEAR, form=FORMS | OF_ROWS)
def test_against_float64(form, dtype, isa):
    torch.manual_seed(0)
    loss = (FORMS | OF_ROWS)[form]
    compare(loss, operands(loss, 13, 7, 1100, dtype), isa)


@settings(max_examples=60, deadline=None)
@given(
    loss=st.builds(
        Loss,
        rows=st.integers(1, 9),
        groups=st.integers(1, 5),
        reduction=st.sampled_from(["none", "mean", "sum"]),
        soft_cap=st.sampled_from([0.0, 4.0]),
        loss_grad=st.booleans(),
        sums_grad=st.booleans(),
        square_grad=st.booleans(),
        of_rows=st.booleans(),
        bias=st.booleans(),
        class_weight=st.booleans(),
        gradients=st.booleans(),
        logits=st.booleans(),
    ),
    rows=st.integers(0, 30),
    width=st.integers(1, 20),
    classes=st.sampled_from([1, 2, 37, 511, 512, 513, 1024, 1700]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_any_form_and_size(loss, rows, width, classes, dtype, seed):
    torch.manual_seed(seed)
    compare(loss, operands(loss, rows, width, classes, dtype))


LISTS = {
    "none": (), "one": (7,), "run": tuple(range(4, 15)), "all": tuple(range(23)),
    "scattered": (0, 1, 4, 8, 9, 10, 13, 16, 17, 20, 21, 22),
}  # fmt: skip


@crossed(isa=ISAS, dtype=NEAR, form=FORMS, listed=LISTS)
def test_listed_rows(listed, form, dtype, isa):
    """Other rows are not read but for their logits, and their gradients are left as they are."""
    torch.manual_seed(1)
    loss = dataclasses.replace(FORMS[form], listed=LISTS[listed])
    if not loss.listed:
        loss = dataclasses.replace(loss, reduction="sum")
    compare(loss, operands(loss, 23, 7, 1100, dtype), isa)


def test_listed_rows_of_any_layout():
    loss = Loss(listed=(1, 2, 5, 9, 10, 11))
    given = operands(loss, 12, 8, 700, torch.float32)
    given[0] = given[0].T.contiguous().T
    for listed in (loss.listed, (4, 5, 6, 7)):
        given[0].nan_to_num_(0)
        given[2].fill_(IGNORED)[list(listed)] = 3
        given[3] = list_of(listed, 12)
        each = dataclasses.replace(loss, listed=listed)
        got = computed(each, given, strides={"hidden": "1,12"})
        for a, b in zip(got, wanted(each, given), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_lists_that_name_no_rows():
    loss = Loss(listed=(1, 2, 5))
    given = operands(loss, 12, 8, 700, torch.float32)
    given[3][3] = 12
    with pytest.raises(IndexError, match="rows: got 12 at 2, want 3 or more, and less than 12"):
        computed(loss, given)
    given[3] = given[3][:12].clone()
    with pytest.raises(_C.InternalError, match="rows: got 12 int64, want 13"):
        computed(loss, given)


@pytest.mark.parametrize("label", [600, -1, -101])
def test_labels_of_rows_that_are_not_listed(label):
    loss = Loss(listed=(1, 2, 5))
    given = operands(loss, 8, 4, 600, torch.float32)
    given[2][3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
        computed(loss, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_without_a_label(dtype):
    """The mean of nothing is NaN, its gradients are zeros."""
    given = operands(Loss(), 8, 4, 600, dtype)
    given[2].fill_(IGNORED)
    loss, hidden_grad, weight_grad = computed(Loss(), given)
    assert loss.isnan()
    assert not hidden_grad.any()
    assert not weight_grad.any()
    compare(Loss(reduction="sum"), given)


@pytest.mark.parametrize("label", [600, -1, -101])
def test_labels_that_are_no_class(label):
    given = operands(Loss(), 8, 4, 600, torch.float32)
    given[2][3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
        computed(Loss(), given)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e30])
def test_logits_that_are_no_numbers(number):
    """What is not finite spoils its row, and the loss, as in eager PyTorch."""
    loss = Loss(bias=True, logits=True, reduction="sum")
    given = operands(loss, 8, 4, 1200, torch.float64)
    given[3][700] = number
    compare(loss, given)


def test_classes_that_cannot_be():
    """A bias of -inf leaves a class out, and a block of classes all of which are left out."""
    loss = Loss(bias=True, reduction="sum")
    given = operands(loss, 8, 4, 1200, torch.float64)
    given[3][400:1100] = -float("inf")
    given[2] %= 400
    compare(loss, given)


@pytest.mark.parametrize("loss", [Loss(), OF_ROWS["weighted sums"], OF_ROWS["squares"]])
def test_far_from_zero(loss):
    """Logits near 1000 cost no digits but their own."""
    given = operands(loss, 12, 8, 700, torch.float32)
    given[0] *= 100
    near = computed(loss, given)
    for got, want in zip(near, wanted(loss, given), strict=True):
        assert (got - want).norm() <= 3e-5 * want.norm()


def test_rows_that_do_not_count_have_no_part_in_a_mean_of_nothing():
    """Their squares have gradients."""
    loss = Loss(square_grad=True, sums_grad=True, of_rows=True)
    given = operands(loss, 8, 4, 600, torch.float32)
    given[2].fill_(IGNORED)
    compare(loss, given)


def test_operands_of_any_layout():
    given = operands(Loss(bias=True), 12, 8, 700, torch.float32)
    given[0] = given[0].T.contiguous().T
    given[1] = given[1].T.contiguous().T
    got = computed(Loss(bias=True), given, strides={"hidden": "1,12", "weight": "1,700"})
    for a, b in zip(got, wanted(Loss(bias=True), given), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits():
    loss = Loss(bias=True, rows=8)
    given = operands(loss, 40, 16, 2000, torch.float32)
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(computed(loss, given))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


def test_operands_that_do_not_fit():
    """The workspace has to be that of the chunks, however large these are."""
    loss = Loss(gradients=False)
    given = operands(loss, 6, 4, 20, torch.float32)
    given[2] = given[2][:5]
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        computed(loss, given)
    huge = Loss(rows=2**62)
    assert huge.workspace(19, 4) % 2**64 == 0  # as a sum of 64 bits has it
    with pytest.raises(_C.InternalError, match="more numbers than there can be"):
        computed(huge, operands(huge, 6, 4, 19, torch.float32), workspace=0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Loss(rows=0), "got 0 rows at a time and 3 groups, want 1 or more"),
        (Loss(reduction="most"), "reduction: got 'most', want none, mean or sum"),
    ],
)
def test_forms_that_there_are_not(loss, words):
    with pytest.raises(_C.UserError, match=words):
        computed(loss, operands(loss, 6, 4, 20, torch.float32))


def test_a_list_that_leaves_out_rows_that_are_given():
    loss = Loss(of_rows=True, listed=(1, 2))
    words = "a list leaves out rows of which something is made"
    with pytest.raises(_C.InternalError, match=words):
        computed(loss, operands(loss, 6, 4, 20, torch.float32))
