"""The cross-entropy of a linear layer by the kernels of a GPU, with products of its library.

tests/cpu/test_linear_loss.py runs all forms on a GPU as well.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import golden
import pytest
import regions
import torch
from emulated import cuda_device
from emulated.cuda_driver import ORDERS
from gate import compile_texts, faults
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_nodes import (
    FORMS,
    IGNORED,
    OF_ROWS,
    Loss,
    compare,
    computed,
    graph_of,
    list_of,
    operands,
    wanted,
)

from torch_ort import _C

pytestmark = pytest.mark.cuda
emulated = pytest.mark.skipif(not cuda_device.is_active(), reason="of the emulator")
CUDA = regions.CUDA


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([*FORMS, *OF_ROWS]),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    rows=st.integers(0, 30),
    chunk=st.integers(1, 9),
    width=st.integers(1, 9),
    classes=st.sampled_from([1, 2, 7, 8, 9, 37, 512, 1100, 4103]),
    dtype=st.sampled_from(regions.REAL),
    seed=st.integers(0, 1000),
)
def test_any_form_and_size(form, reduction, rows, chunk, width, classes, dtype, seed) -> None:
    """Texts depend on the form alone, so that many sizes run with few of them."""
    torch.manual_seed(seed)
    loss = (FORMS | OF_ROWS)[form]
    if not loss.loss_grad:
        loss = dataclasses.replace(loss, reduction=reduction)
    loss = dataclasses.replace(loss, rows=chunk)
    compare(loss, operands(loss, rows, width, classes, dtype), CUDA)


@emulated
@pytest.mark.parametrize("form", ["all", "everything", "none"])
def test_same_bits_in_any_order_of_threads(form, monkeypatch) -> None:
    loss = (FORMS | OF_ROWS)[form]
    given = operands(loss, 13, 7, 1100, torch.bfloat16)
    results = []
    for order in ORDERS:
        monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
        results.append(computed(loss, given, CUDA))
    assert len(results) > 3
    for each in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], each, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_of_any_layout(dtype) -> None:
    loss = Loss(bias=True)
    given = operands(loss, 12, 8, 701, dtype)
    given[0] = given[0].T.contiguous().T
    given[1] = given[1].T.contiguous().T
    got = computed(loss, given, CUDA, strides={"hidden": "1,12", "weight": "1,701"})
    near = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(got, wanted(loss, given), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near)


@pytest.mark.parametrize("label", [600, -1, -101])
def test_labels_that_are_no_class(label) -> None:
    """They spoil what they are part of, and the next call raises."""
    loss = Loss(reduction="none", loss_grad=True)
    given = operands(loss, 8, 4, 600, torch.float32)
    given[2][3] = label
    compiled, inputs = graph_of(loss, given, CUDA)
    session = regions.Compiled(compiled, CUDA)
    got = session.run(inputs)
    assert got["loss"].isnan().nonzero().tolist() == [[3]]
    assert got["hidden_grad"].isnan().any(1).nonzero().tolist() == [[3]]
    with pytest.raises(IndexError, match="Target is out of bounds: found by an earlier step"):
        session.run(inputs)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e30])
def test_logits_that_are_no_numbers(number) -> None:
    """What is not finite spoils its row, and the loss, as in eager PyTorch."""
    loss = Loss(bias=True, logits=True, reduction="sum")
    given = operands(loss, 8, 4, 1200, torch.float64)
    given[3][700] = number
    given[2].clamp_(min=0)
    compare(loss, given, CUDA)


def test_rows_without_a_loss_may_be_anything() -> None:
    """Rows of padding have no part in any gradient, not even as 0 times NaN."""
    loss = Loss(rows=4)
    given = operands(loss, 10, 4, 600, torch.float32)
    given[2][::3] = IGNORED
    clean = [x.clone() for x in given]
    given[0][::3] = torch.nan
    clean[0][::3] = 0
    got, want = computed(loss, given, CUDA), wanted(loss, clean)
    torch.testing.assert_close(got[0].double(), want[0])
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-6)


def test_classes_that_cannot_be() -> None:
    loss = Loss(bias=True, reduction="sum")
    given = operands(loss, 8, 4, 5000, torch.float64)
    given[3][400:4900] = -float("inf")
    given[2] %= 400
    compare(loss, given, CUDA)


@pytest.mark.parametrize("loss", [Loss(), OF_ROWS["weighted sums"], OF_ROWS["squares"]], ids=str)
def test_far_from_zero(loss) -> None:
    given = operands(loss, 12, 8, 700, torch.float32)
    given[0] *= 100
    for got, want in zip(computed(loss, given, CUDA), wanted(loss, given), strict=True):
        assert (got - want).norm() <= 3e-5 * want.norm()


@pytest.mark.parametrize("counted", [1, 2900])
def test_means_of_float16_keep_their_digits(counted) -> None:
    """A gradient of a mean of thousands would be below the least number of float16."""
    loss = Loss(rows=700)
    given = operands(loss, 2900, 4, 40, torch.float16)
    given[2].random_(0, 40)
    given[2][counted:] = IGNORED
    for got, want in zip(computed(loss, given, CUDA), wanted(loss, given), strict=True):
        assert (got - want).norm() <= 2e-3 * want.norm()


def test_operands_that_do_not_fit() -> None:
    loss = Loss(gradients=False)
    given = operands(loss, 6, 4, 20, torch.float32)
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        computed(loss, [*given[:2], given[2][:5]], CUDA)
    with pytest.raises(_C.InternalError, match="the operands do not fit together"):
        computed(loss, given, CUDA, workspace=5)
    with pytest.raises(_C.InternalError, match="more numbers than there can be"):
        computed(Loss(rows=2**62), given, CUDA, workspace=0)
    listed = Loss(listed=(1, 2))
    given = operands(listed, 6, 4, 20, torch.float32)
    assert given[3].equal(list_of((1, 2), 6))
    with pytest.raises(_C.InternalError, match="got a list of rows, want none on this device"):
        computed(listed, given, CUDA)


# ---- texts and launches


def texts_of(forms: dict[str, Loss], dtype: torch.dtype, folder: Path) -> dict[str, str]:
    for loss in forms.values():
        graph, inputs = graph_of(loss, operands(loss, 3, 4, 40, dtype), CUDA)
        regions.Compiled(graph, CUDA, kernel_dump_dir=str(folder)).run(inputs)
    return {path.stem: path.read_text() for path in folder.glob("*.cu")}


def test_machine_code(tmp_path) -> None:
    """No spills, and logits move 16 bytes at a time."""
    forms = FORMS | OF_ROWS
    texts = texts_of(forms, torch.bfloat16, tmp_path)
    for dtype in (torch.float32, torch.float16, torch.float64):
        texts |= texts_of({name: forms[name] for name in ("mean", "everything")}, dtype, tmp_path)
    assert len(texts) > 15
    for built in compile_texts(texts, ("sm_80", "sm_90")):
        has_gradient = "g" in built.name.rsplit("_", 1)[1]
        assert faults(built, 2 if has_gradient else 1, int(has_gradient)) == [], built.name


@emulated
def test_launches(tmp_path, monkeypatch, request) -> None:
    """Two chunks of rows: one launch for each of them and for their losses."""
    monkeypatch.setenv("EMULATED_CUDA_LOG", str(tmp_path / "log"))
    loss = Loss(rows=7, bias=True)
    computed(loss, operands(loss, 13, 8, 1100, torch.bfloat16), CUDA)
    accept = request.config.getoption("--accept")
    golden.compare("linear_loss.launches", (tmp_path / "log").read_text(), accept)
