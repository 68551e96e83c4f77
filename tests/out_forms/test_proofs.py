"""The list of proved `out=` overloads, and the prover that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.out_forms import hand_written, prove
from tests.out_forms.layouts import column_major, row_major, sliced, transposed
from tests.out_forms.overloads import Pair, pairs
from tests.out_forms.proof import Call, PlannedMemory, Warnings, Wrong, truth_of
from torch_ort import _C
from torch_ort.engine import out_forms

aten = torch.ops.aten
MEAN, SUM = 1, 2


def used_by_the_engine(pair: Pair, on_cpu: bool = True) -> tuple[str, set[str]] | None:
    name, _, overload = pair.functional.name().partition(".")
    return _C.testing.out_form(name, overload, on_cpu)


def words_of(cell: str) -> set[str]:
    return set(cell.split(",")) - {"yes"}


def listed_for(device: str) -> dict[str, str]:
    """Give what the list says of the torch that is installed, by overload."""
    table = prove.read_table()
    columns = {column for row in table.values() for column in row}
    for column in (prove.column_of(device), prove.column_of("cpu")):
        if column in columns:
            return {name: row[column] for name, row in table.items() if row[column] != "-"}
    return {}  # and the engine uses none


def test_the_engine_uses_what_is_on_the_list() -> None:
    listed = listed_for("cpu")
    found = {}
    for pair in pairs("cpu").values():
        form = used_by_the_engine(pair)
        assert form is None or form[0] == pair.name
        if form is not None:
            found[pair.name] = form[1]
    assert found == {name: words_of(cell) for name, cell in listed.items()}


def test_cuda_starts_from_the_list_of_the_cpu() -> None:
    on_cuda = {p.name for p in pairs("cpu").values() if used_by_the_engine(p, on_cpu=False)}
    assert on_cuda <= listed_for("cuda").keys()


@pytest.mark.parametrize("column", sorted({c for row in prove.read_table().values() for c in row}))
def test_each_version_has_its_own_column(column: str) -> None:
    device, _, version = column.partition("-")
    listed = {name: words_of(row[column]) for name, row in prove.read_table().items()
              if row[column] != "-"}  # fmt: skip
    proved = _C.proved_out_forms(device, f"{version}.7+cpu")
    assert {name: words - {"yes"} for name, words in proved.items()} == listed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", ["1.99.0", "2.1.3", "3.13.0"])
def test_a_version_without_a_column_uses_no_out_forms(device: str, version: str) -> None:
    assert _C.proved_out_forms(device, version) == {}


def test_a_version_without_a_column_is_told_of_once(monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "torch_ort.out_forms")
    monkeypatch.setattr(
        out_forms, "tell_of_unproved", cache(out_forms.tell_of_unproved.__wrapped__)
    )
    compiled = torch.compile(lambda x: x.sin() + 1, backend="ort", dynamic=False)
    compiled(torch.randn(3))
    assert bool(caplog.messages) == (not listed_for("cpu"))
    caplog.clear()
    out_forms.tell_of_unproved.cache_clear()
    monkeypatch.setattr(_C, "proved_out_forms", lambda device: {})
    compiled(torch.randn(4))
    compiled(torch.randn(5))
    (said,) = caplog.messages
    assert said.startswith(f"torch {torch.__version__}: no out= overload has been proved for this ")
    assert "on cpu, so none is used" in said
    assert "`python -m tests.out_forms.prove --write` proves them" in said


WRONG: dict[str, tuple[torch._ops.OpOverload, Callable[[], tuple[Any, ...]]]] = {
    "binary_cross_entropy": (
        aten.binary_cross_entropy.default,
        lambda: (torch.rand(3, 4), torch.rand(3, 4), None, MEAN),
    ),
    "mse_loss": (aten.mse_loss.default, lambda: (torch.rand(3, 4), torch.rand(3, 4), SUM)),
    "huber_loss": (aten.huber_loss.default, lambda: (torch.rand(3, 4), torch.rand(3, 4), MEAN)),
    "smooth_l1_loss": (aten.smooth_l1_loss.default, lambda: (torch.rand(3, 4), torch.rand(3, 4))),
    "soft_margin_loss": (
        aten.soft_margin_loss.default,
        lambda: (torch.rand(3, 4), torch.ones(3, 4)),
    ),
    "native_batch_norm": (
        aten.native_batch_norm.default,
        lambda: (transposed(torch.rand(3, 4, 5)), None, None, None, None, True, 0.1, 1e-5),
    ),
    "batch_norm_legit": (
        aten._native_batch_norm_legit.no_stats,
        lambda: (sliced(torch.rand(3, 4, 5)), None, None, True, 0.1, 1e-5),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_overloads_known_to_be_wrong(name: str) -> None:
    functional, arguments = WRONG[name]
    call = Call(pairs("cpu")[functional], arguments(), {})
    with Warnings() as said, pytest.raises(Wrong):
        prove.prove(call, truth_of(call), row_major, said)
    assert used_by_the_engine(call.pair) is None


def test_log_softmax_is_right_in_rows_alone() -> None:
    call = Call(pairs("cpu")[aten._log_softmax.default], (torch.randn(3, 4), 0, False), {})
    truth = truth_of(call)
    with Warnings() as said:
        prove.prove(call, truth, row_major, said)
        with pytest.raises(Wrong, match="gives other numbers in out"):
            prove.prove(call, truth, column_major, said)
    assert "strides" not in used_by_the_engine(call.pair)[1]


def resizes(out: Tensor) -> None:
    out.resize_(2, 2)


def moves(out: Tensor) -> None:
    out.set_(torch.zeros(3, 4))


def turns(out: Tensor) -> None:
    out.as_strided_((3, 4), (1, 3))


def overruns(out: Tensor) -> None:
    other = torch.from_numpy(_bytes_around(out))
    other.zero_()


def fills_gaps(out: Tensor) -> None:
    out.as_strided((14,), (1,)).zero_()


def _bytes_around(out: Tensor) -> Any:
    import ctypes

    import numpy as np

    around = (ctypes.c_uint8 * 8).from_address(out.data_ptr() - 8)
    return np.ctypeslib.as_array(around)


@pytest.mark.parametrize(
    ("kernel", "strides", "words"),
    [
        (resizes, (4, 1), "resizes out"),
        (moves, (4, 1), "replaces the memory of out"),
        (turns, (4, 1), "changes the strides of out"),
        (overruns, (4, 1), "writes outside of out"),
        (fills_gaps, (5, 1), "writes into the gaps of out"),
    ],
)
def test_planned_memory_notices(kernel: Callable, strides: tuple, words: str) -> None:
    memory = PlannedMemory(torch.zeros(3, 4), strides)
    memory.check("out")
    kernel(memory.tensor)
    with pytest.raises(Wrong, match=words):
        memory.check("out")


def check_findings(findings: dict[str, prove.Finding], device: str) -> None:
    """Compare what was found with the list; it may claim more where calls were few."""
    listed = listed_for(device)
    for name, finding in findings.items():
        cell = listed.get(name)
        if cell is None or finding.calls == 0:
            continue
        assert finding.is_proved, f"{name}: {finding.wrong.most_common(3)}"
        refuted = words_of(cell) & finding.refuted.keys()
        assert not refuted, f"{name}: {finding.refuted}"


def test_what_most_models_run() -> None:
    prover = prove.Prover("cpu", most=2)
    hand_written.watch("cpu", (torch.float32, torch.bfloat16, torch.int64), prover)
    check_findings(prover.findings, "cpu")
    assert sum(finding.calls > 0 for finding in prover.findings.values()) > 120


@pytest.mark.slow
def test_all_overloads() -> None:
    findings = prove.prove_all("cpu")
    check_findings(findings, "cpu")
    cells = {name: finding.cell for name, finding in findings.items() if finding.cell != "-"}
    assert cells == listed_for("cpu")


@pytest.mark.cuda
def test_what_most_models_run_on_cuda() -> None:
    prover = prove.Prover("cuda", most=2)
    hand_written.watch("cuda", (torch.float32, torch.bfloat16, torch.int64), prover)
    check_findings(prover.findings, "cuda")


@pytest.mark.cuda
@pytest.mark.slow
def test_all_overloads_on_cuda() -> None:
    check_findings(prove.prove_all("cuda"), "cuda")
