# Several processes on gloo, with modules that parallelize_module has split over ranks: gradients
# are those of eager PyTorch, and the engine has run every step as one graph.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel
import torch
import torch.distributed as dist
from processes import run_script
from tensor_parallel import CASES, SHARDED_CASES

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function that gives what each rank has seen; processes are started once."""

    @functools.cache
    def run(ranks: int) -> list[dict[str, Any]]:
        cases = CASES if ranks == 2 else SHARDED_CASES
        return run_script(
            Path(tensor_parallel.__file__).read_text(), tmp_path_factory.mktemp("ranks"),
            str(ranks), *cases, ranks=ranks, timeout=540, TORCH_ORT_STRICT="0",
        )  # fmt: skip

    return run


@pytest.mark.parametrize("name", [name for name in CASES if name != "ORTModule"])
def test_tensors_are_split(name: str, results_of) -> None:
    check(name, CASES[name], results_of(2))


@pytest.mark.parametrize("name", SHARDED_CASES)
def test_tensors_are_split_and_sharded(name: str, results_of) -> None:
    check(name, SHARDED_CASES[name], results_of(4))


def check(name: str, case: tensor_parallel.Case, results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank[name]
        assert found["warnings"] == []
        assert found["difference"] <= (2e-2 if case.dtype is torch.bfloat16 else 1e-5)
        assert found["kinds"] == 1  # gradients of DTensors are DTensors in both
        want, got = found["losses"]
        assert got == pytest.approx(want, rel=2e-2 if case.dtype is torch.bfloat16 else 1e-5)
        counters = found["counters"]
        blocks = 2 if case.is_sharded else 1
        assert counters["forward_runs"] == counters["backward_runs"] == case.steps * blocks
        assert counters["fallbacks"] == counters["graph_breaks"] == 0


def test_an_ort_module_says_what_to_do(results_of) -> None:
    for of_rank in results_of(2):
        found = of_rank["ORTModule"]
        assert found["difference"] == 0
        (words,) = found["warnings"]
        assert "is split over ranks (parallelize_module), which an ORTModule does not" in words
        assert "use torch.compile(model, backend='ort')" in words
