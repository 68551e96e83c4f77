"""Texts of a few kernels as they are, with the nodes that each line comes from (golden/*.cu)."""

from __future__ import annotations

import golden
import kernel_cases
import pytest
import regions

pytestmark = pytest.mark.cuda
TEXTS = (
    "dropout", "softmax", "layer_norm_grad", "embedding", "loss", "channel_sums", "batch_norm",
    "norm_dropout_of_split_rows",
)  # fmt: skip


def run(case: kernel_cases.Case) -> regions.Compiled:
    compiled = regions.Compiled(case.graph(), regions.CUDA)
    case.compare(compiled.run(case.given()), case.wanted())
    if case.tells_fault:
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            compiled.run(case.given())
    return compiled


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, request: pytest.FixtureRequest) -> None:
    ((_, listing),) = run(kernel_cases.CASES[name]()).session.programs()
    text = golden.without_hashes(listing)
    golden.compare(f"{name}.cu", text, request.config.getoption("--accept"))


@pytest.mark.parametrize("name", [name for name in kernel_cases.CASES if name not in TEXTS])
def test_what_other_texts_compute(name: str) -> None:
    run(kernel_cases.CASES[name]())
