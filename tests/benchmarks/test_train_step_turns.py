"""Whose turn it is, what is kept of a run that ends early, and what a failure leaves.

Workers here answer without training.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

MODULES = (
    "targets", "backends", "memory", "models", "onednn", "record", "builds", "report", "worker",
    "process",
)  # fmt: skip
COUNTERS = {"ort": {"fallbacks": 0, "nodes": 3}, "dynamo": {}}


@pytest.fixture
def script(load_script, monkeypatch) -> ModuleType:
    for name in MODULES:
        load_script(name)
    module = load_script("train_step")
    monkeypatch.setattr(module, "SETTLE_S", 0)
    return module


class Workers:
    """Makes workers, and knows which of them live and what they were asked."""

    def __init__(self) -> None:
        self.alive = self.most_alive = 0
        self.asked: list[tuple[str, str, str]] = []  # backend, cache, what
        self.fail: Callable[[Any, str], Exception | None] = lambda row, do: None

    def start(self, row: Any, cache: Path, *, pin_malloc: bool = False) -> Worker:
        return Worker(self, row, cache)


class Worker:
    def __init__(self, workers: Workers, row: Any, cache: Path) -> None:
        self.workers, self.row, self.cache = workers, row, cache

    def __enter__(self) -> Worker:
        self.workers.alive += 1
        self.workers.most_alive = max(self.workers.most_alive, self.workers.alive)
        return self

    def __exit__(self, *error: object) -> None:
        self.workers.alive -= 1

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.workers.asked.append((self.row.backend, self.cache.name.split("-")[-1], do))
        if (error := self.workers.fail(self.row, do)) is not None:
            raise error
        if do == "first":
            first = {"first_step_s": 2.0, "loss": 1.5, "is_random": False, "package": None}
            return first | {"first_peak_bytes": 9, "counters": COUNTERS}
        if do == "run":
            seconds = [0.25] * arguments["steps"]
            return {"step_s": seconds, "fwd_bwd_s": seconds, "counted": {}}
        if do == "memory":
            sizes = {"step_peak_bytes": 5 << 20, "activation_bytes": 3 << 20}
            return sizes | {"reserved_peak_bytes": 7 << 20, "counters": COUNTERS}
        return {"machine": {"torch": "2.13"}, "counters": COUNTERS}[do]

    def ask_watched(self, do: str, **arguments: Any) -> tuple[dict[str, Any], float]:
        return self.ask(do, **arguments), 0.0


@pytest.fixture
def workers(script, monkeypatch) -> Iterator[Workers]:
    made = Workers()
    monkeypatch.setattr(script.Bench, "_start", lambda bench, *args, **more: made.start(*args))
    yield made
    assert made.alive == 0


def measured(
    script, tmp_path: Path, device: str, steady_only: bool = False, **counts: int
) -> tuple[Any, str]:
    protocol = script.replace(script.QUICK, **counts)
    printed = Console(file=io.StringIO(), width=300)
    bench = script.Bench(printed, tmp_path, device, protocol, 9.0, None)
    bench.measure("mlp", ["eager", "inductor", "ort"], 1, steady_only)
    printed.file.truncate(0)
    script.print_report(printed, bench.records)
    return bench, printed.file.getvalue()


@pytest.fixture(autouse=True)
def no_roofline(script, workers) -> None:
    workers.fail = lambda row, do: script.WorkerError("no memory") if do == "roofline" else None


def test_on_cuda_one_worker_has_the_gpu(script, workers, tmp_path):
    bench, text = measured(script, tmp_path, "cuda", processes=3, first_runs=1, memory_runs=2)
    assert workers.most_alive == 1
    # Another one begins each time; the first process of each finds its caches empty.
    order = [(backend, cache) for backend, cache, do in workers.asked if do == "first"]
    assert [backend for backend, _ in order] == [
        *("eager", "inductor", "ort"),
        *("inductor", "ort", "eager"),
        *("ort", "eager", "inductor"),
    ]
    assert {cache for _, cache in order} == {"0"}
    for row in bench.records.all:
        assert row.error is None
        assert len(row.steps) == 3 * script.QUICK.rounds
        assert (len(row.first_cold), len(row.memory), len(row.steady_counters)) == (1, 2, 3)
        assert row.first_warm is not None
    assert "reserved: all that PyTorch's allocator has of the GPU in a step" in text


def test_on_cuda_every_cold_first_step_has_a_cache_of_its_own(script, workers, tmp_path):
    bench, _ = measured(script, tmp_path, "cuda", processes=2, first_runs=2)
    assert [cache for _, cache, do in workers.asked if do == "first"] == ["0"] * 3 + ["1"] * 3
    assert all(len(row.first_cold) == 2 for row in bench.records.all)
    assert all(row.first_warm is None for row in bench.records.all)


def test_on_cuda_steady_steps_alone(script, workers, tmp_path):
    bench, _ = measured(script, tmp_path, "cuda", steady_only=True, processes=2)
    for row in bench.records.all:
        assert len(row.steps) == 2 * script.QUICK.rounds
        assert (row.first_cold, row.first_warm, row.memory) == ([], None, [])


def test_on_the_cpu_workers_wait_for_their_turns(script, workers, tmp_path):
    _, text = measured(script, tmp_path, "cpu")
    assert workers.most_alive == 3
    turns = [backend for backend, _, do in workers.asked if do == "run"]
    # Three warm up; the second one begins the second round; peaks have processes of their own.
    assert turns[3:9] == ["eager", "inductor", "ort", "inductor", "ort", "eager"]
    assert "Peak memory, 1 thread(s), MiB" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_least_possible_time_the_row_holds(script, workers, tmp_path, device):
    bench, text = measured(script, tmp_path, device)
    *_, ours = bench.records.all
    assert ours.error is None
    assert ours.roofline is None
    assert "mlp: no least possible time: no memory" in text
    assert "failed" not in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_backend_that_fails_drops_out(script, workers, tmp_path, device):
    asked = iter(range(2))  # its first step runs, and the step after it does not

    def fail(row, do):
        is_late = row.backend == "inductor" and do == "run" and next(asked, 9)
        return script.WorkerError("no such kernel") if is_late or do == "roofline" else None

    workers.fail = fail
    bench, text = measured(script, tmp_path, device, processes=2)
    assert [row.error for row in bench.records.all] == [None, "no such kernel", None]
    assert "failed: no such kernel" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_strict_mode_refuses_is_told_beside_the_figures(script, workers, tmp_path, device):
    def fail(row, do):
        if row.backend == "ort" and row.refused is None and do == "first":
            return script.AnsweredError("Unsupported: no rule for one of its nodes")
        return script.WorkerError("no memory") if do == "roofline" else None

    workers.fail = fail
    bench, text = measured(script, tmp_path, device)
    assert [(row.error, row.refused) for row in bench.records.all] == [
        (None, None), (None, None), (None, "Unsupported: no rule for one of its nodes"),
    ]  # fmt: skip
    ours = bench.records.all[-1]
    assert ours.figures()["median_step"] == 0.25
    assert (len(ours.first_cold), len(ours.memory)) == (1, 1)
    assert "mlp, ort: eager PyTorch ran a part: Unsupported: no rule for one of its nodes" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_fails_without_strict_mode_too_drops_out(script, workers, tmp_path, device):
    def fail(row, do):
        return script.AnsweredError("out of memory") if row.backend == "ort" else None

    workers.fail = fail
    bench, text = measured(script, tmp_path, device)
    assert [row.error for row in bench.records.all] == [None, None, "out of memory"]
    starts = [do for backend, _, do in workers.asked if backend == "ort"]
    assert len(starts) == 2
    assert "failed: out of memory" in text


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_worker_learns_whether_it_is_strict(script, tmp_path, is_strict):
    job = script.Job("mlp", "ort", "cpu", 1, is_strict=is_strict)
    environment = sys.modules["process"].worker_environment(job, tmp_path, False)
    assert environment["TORCH_ORT_STRICT"] == str(int(is_strict))


def test_a_run_that_is_ended_keeps_what_it_has(script, workers, tmp_path):
    result = tmp_path / "new" / "result.json"
    workers.fail = lambda row, do: KeyboardInterrupt() if row.model == "cnn" else None
    arguments = ["--steady-only", "--models", "mlp", "cnn", "--backends", "eager", "--threads", "1"]
    with pytest.raises(KeyboardInterrupt):
        script.main([*arguments, "--quick", "--json", str(result)])
    kept = json.loads(result.read_text())
    assert kept["settings"]["is_complete"] is False
    (row,) = kept["records"]
    assert (row["model"], row["error"]) == ("mlp", None)
    assert row["figures"]["median_step"] == 0.25
    assert list(result.parent.iterdir()) == [result]


def test_as_many_first_steps_as_processes_on_cuda(script, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = script.parse_arguments(["--device", "cuda"])
    assert script.choose_protocol(options) == script.FULL_ON_CUDA
    with pytest.raises(SystemExit):
        script.parse_arguments(["--device", "cuda", "--processes", "2", "--first-runs", "3"])
    assert "--first-runs: got 3, want at most 2, as --processes" in capsys.readouterr().err
