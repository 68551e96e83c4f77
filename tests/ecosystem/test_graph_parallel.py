# Several processes on gloo, whose graphs gather parameters and sum gradients themselves: gradients
# are those of fully_shard and DistributedDataParallel in eager PyTorch.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graph_parallel
import pytest
import tensor_parallel
import torch.distributed as dist
from graph_parallel import CASES
from processes import run_script

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function that gives what each rank has seen; processes are started once."""

    @functools.cache
    def run(ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        (folder / "tensor_parallel.py").write_text(Path(tensor_parallel.__file__).read_text())
        return run_script(
            Path(graph_parallel.__file__).read_text(), folder, str(ranks), *CASES,
            ranks=ranks, timeout=540, TORCH_ORT_STRICT="0",
        )  # fmt: skip

    return run


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_pytorch_does(name: str, ranks: int, results_of) -> None:
    case = CASES[name]
    for of_rank in results_of(ranks):
        found = of_rank[name]
        assert found["warnings"] == []
        assert found["difference"] <= (2e-2 if case.is_short else 1e-5)
        want, got = found["losses"]
        assert got == pytest.approx(want, rel=2e-2 if case.is_short else 1e-5)
        assert found["names"] == list(tensor_parallel.Decoder().state_dict())
        counters = found["counters"]
        assert counters["fallbacks"] == counters["graph_breaks"] == 0
        runs = case.steps if case.is_compiled else 0
        assert counters["forward_runs"] == counters["backward_runs"] == runs
        # Small ones are joined: a gather in each half or in one, and a sum of gradients.
        of_each_step = {"replicas": 1, "shards that are held": 2}.get(name, 3)
        assert counters["collectives"] == of_each_step * runs


def test_gathered_parameters_are_not_held(results_of) -> None:
    for of_rank in results_of(2):
        held, again = (of_rank[name]["saved_bytes"] for name in ("shards that are held", "shards"))
        parameters = sum(each.numel() * 4 for each in tensor_parallel.Decoder().parameters())
        # All but norms and the table of words are read by backward as well.
        assert held - again > 0.8 * parameters


def test_what_is_refused(results_of) -> None:
    for of_rank in results_of(2):
        mesh, twice, inside, scalar = of_rank["refusals"]
        assert "mesh: got 2 dims, want 1; pass one of its dims" in mesh
        assert "parameter 'weight': got a DTensor, want a plain tensor" in twice
        assert "module '0': shard or replicate has changed it already" in inside
        assert "parameter 'scale': got 0 dims, want 1 or more" in scalar


@pytest.mark.parametrize("ranks", RANKS)
def test_recurrent_layers(ranks: int, results_of) -> None:
    for of_rank in results_of(ranks):
        found = of_rank["recurrent"]
        assert len(found) == 4
        assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_of_different_sizes(ranks: int, results_of) -> None:
    for of_rank in results_of(ranks):
        assert of_rank["uneven"] <= 1e-5
