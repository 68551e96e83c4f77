# Several processes on gloo, with DistributedDataParallel and fully_shard: losses, all gradients and
# all parameters are those of eager PyTorch, and the engine has run every step.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch.distributed as dist
from data_parallel import PARALLEL_CASES, PARALLEL_WRAPS, SHARDED_CASES, SHARDED_WRAPS, STEPS
from processes import run_script

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

Results = list[dict[str, dict[str, dict[str, Any]]]]  # of each rank, by case and wrap
# Of all ways to wrap, which differ little: those that the documentation names.
FEW = ("compile(DDP)", "DDP(ORTModule)", "parts compiled in place", "one ORTModule")


def runs(wraps: dict) -> list:
    """Give numbers of processes, and which wraps they try: more take minutes."""
    few = [name for name in wraps if name in FEW]
    every = [name for name in wraps if name != "eager"]
    rest = [name for name in every if name not in FEW]
    slow = pytest.mark.slow
    found = [(2, name, ()) for name in few]
    found += [(2, name, slow) for name in rest] + [(4, name, slow) for name in every]
    return [pytest.param(ranks, name, marks=marks) for ranks, name, marks in found]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[str, int, str], Results]:
    """Return a function that gives what each rank has seen; processes are started once."""

    @functools.cache
    def run(kind: str, ranks: int, names: tuple[str, ...]) -> Results:
        script = Path(data_parallel.__file__).read_text()
        folder = tmp_path_factory.mktemp(kind)
        return run_script(
            script, folder, str(ranks), kind, *names, ranks=ranks, timeout=540,
            TORCH_ORT_STRICT="0", OMP_NUM_THREADS="1",
        )  # fmt: skip

    def find(kind: str, ranks: int, name: str) -> Results:
        wraps = PARALLEL_WRAPS if kind == "parallel" else SHARDED_WRAPS
        few = tuple(each for each in wraps if each in FEW)
        rest = tuple(each for each in wraps if each not in (*FEW, "eager"))
        return run(kind, ranks, few if name in FEW else rest)

    return find


def check(results: Results, case: str, wrap: str) -> None:
    """Check that each rank has trained as in eager PyTorch, and all ranks the same."""
    for of_rank in results:
        assert of_rank[case][wrap]["difference"] == ""
        assert of_rank[case][wrap]["is_same_on_ranks"]
        assert of_rank[case][wrap]["warnings"] == []


def assert_engine_ran(results: Results, case: str, wrap: str, at_least: int) -> None:
    """Check that on each rank the engine has run so many forwards and backwards, and eager none."""
    for of_rank in results:
        counters = of_rank[case][wrap]["counters"]
        assert counters["graphs_captured"] >= 1
        assert counters["forward_runs"] == counters["backward_runs"] >= at_least
        for name in ("fallbacks", "frames_left_to_eager", "graph_breaks", "captures_refused",
                     "calls_left_to_eager", "recordings_handed_over"):  # fmt: skip
            assert counters[name] == 0, name


@pytest.mark.parametrize(("ranks", "wrap"), runs(PARALLEL_WRAPS))
@pytest.mark.parametrize("case", PARALLEL_CASES)
class TestDistributedDataParallel:
    def test_trains_as_in_eager(self, results_of, case, ranks, wrap):
        check(results_of("parallel", ranks, wrap), case, wrap)

    def test_runs_in_the_engine(self, results_of, case, ranks, wrap):
        calls = STEPS * PARALLEL_CASES[case].micro_batches
        results = results_of("parallel", ranks, wrap)
        assert_engine_ran(results, case, wrap, calls)
        counters = results[0][case][wrap]["counters"]
        if wrap == "DDP(ORTModule)":  # no graph is split into buckets
            assert counters["forward_runs"] == calls


@pytest.mark.parametrize(("ranks", "wrap"), runs(SHARDED_WRAPS))
@pytest.mark.parametrize("case", SHARDED_CASES)
class TestFullyShard:
    def test_trains_as_in_eager(self, results_of, case, ranks, wrap):
        check(results_of("sharded", ranks, wrap), case, wrap)

    def test_runs_in_the_engine(self, results_of, case, ranks, wrap):
        calls = STEPS * SHARDED_CASES[case].micro_batches
        results = results_of("sharded", ranks, wrap)
        assert_engine_ran(results, case, wrap, calls)
