"""The parent's end of a worker: starts it, sends requests, reads answers, ends it."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from backends import OURS
from memory import PINNED_MALLOC
from worker import Job

WORKER = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """A worker answered with an error, died, or took too long."""


class AnsweredError(WorkerError):
    """A worker answered with an error: it lives, and what it trains does not run."""


class WorkerProcess:
    """A worker and its log; a context manager, which ends the worker."""

    def __init__(
        self, job: Job, cache: Path, log: Path, timeout_s: float, *, pin_malloc: bool = False
    ) -> None:
        self.log = log
        self.timeout_s = timeout_s
        self.timed_out = False
        # Processes of one row have one log, one after the other.
        with log.open("a") as log_stream:
            self.log_start = log_stream.tell()
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), job.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_stream,
                text=True,
                env=worker_environment(job, cache, pin_malloc),
            )

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.process.kill()
        # The end of its input is a worker's sign to leave, and to take its compile pool with it.
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises AnsweredError with the worker's own message, or WorkerError with the end of its log
        if it died.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(self.timeout_s, self._stop_late_worker)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise WorkerError(self._describe_death(do))
        answer = json.loads(line)
        if "error" in answer:
            raise AnsweredError(answer["error"])
        return answer

    def ask_watched(self, do: str, **arguments: Any) -> tuple[dict[str, Any], float]:
        """Ask, and also return the share of the machine's cores that others used meanwhile."""
        own = psutil.Process(self.process.pid)
        begin, own_begin, busy_begin = time.perf_counter(), cpu_seconds(own), busy_seconds()
        answer = self.ask(do, **arguments)
        wall = time.perf_counter() - begin
        others = (busy_seconds() - busy_begin) - (cpu_seconds(own) - own_begin)
        # The kernel counts in ticks of 10 ms, so a short turn may come out a little below zero.
        return answer, max(0.0, others / (wall * (psutil.cpu_count() or 1)))

    def _stop_late_worker(self) -> None:
        self.timed_out = True
        self.process.kill()

    def _describe_death(self, do: str) -> str:
        if self.timed_out:
            return f"{do}: no answer after {self.timeout_s:.0f} s"
        self.process.wait()
        with self.log.open("rb") as log_stream:
            log_stream.seek(self.log_start)
            words = log_stream.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"{do}: worker died with status {self.process.returncode}: {' '.join(words)}"


def worker_environment(job: Job, cache: Path, pin_malloc: bool) -> dict[str, str]:
    # Timed workers run with glibc's defaults, and measured ones with PINNED_MALLOC, whatever the
    # caller's own settings are.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    environment |= {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "XDG_CACHE_HOME": str(cache),
    }
    if pin_malloc:
        environment |= PINNED_MALLOC
    if job.backend in OURS:
        environment["TORCH_ORT_STRICT"] = str(int(job.is_strict))
    return environment


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def busy_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal
