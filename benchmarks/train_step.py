"""Time, first-step latency and peak memory of a training step, by model and backend.

    python benchmarks/train_step.py                          # everything; some 25 minutes
    python benchmarks/train_step.py --quick --models mlp --backends eager aot_eager
    python benchmarks/train_step.py --against ../before      # this build beside another one
    python benchmarks/train_step.py --inference              # forward alone, without gradients

README.md beside this file says how the figures are taken and how to read them.
"""

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from backends import AUTOTUNE, GRAPHS, IN_GRAPHS, ONEDNN, ORT_GRAPHS, OURS
from models import FOR_GPUS, LARGE, MODELS
from process import AnsweredError, WorkerError, WorkerProcess
from record import Record, Records
from report import milliseconds, print_report, write_json, write_png
from rich.console import Console
from worker import Job

T = TypeVar("T")
BACKENDS = (
    "eager", ONEDNN, "aot_eager", "inductor", AUTOTUNE, GRAPHS, "ort", "ortmodule", ORT_GRAPHS,
)  # fmt: skip
ON_CPU = ("eager", "aot_eager", "inductor", "ort")
ON_CUDA = ("eager", "inductor", GRAPHS, "ort", ORT_GRAPHS)
WARM_UP_STEPS = 5
LEAD_IN_STEPS = 3
# A worker's OpenMP threads spin for some milliseconds after their last parallel region, and the
# Intel runtime's for 200 ms; the next turn begins when they sleep.
SETTLE_S = 0.25


@dataclass(frozen=True)
class Protocol:
    """How often everything is measured."""

    processes: int
    rounds: int
    steps: int
    first_runs: int
    memory_runs: int
    memory_steps: int


FULL = Protocol(processes=1, rounds=8, steps=30, first_runs=3, memory_runs=3, memory_steps=10)
# Two builds differ by less than two processes of one build do, which get other pages of memory and
# other neighbours on the machine. So there are many turns, and short ones, in several processes.
AGAINST = replace(FULL, processes=6, rounds=8, steps=10, first_runs=8)
# Here processes take turns, each of which takes all figures: one alone has the memory of the GPU. A
# process takes long to start and to compile, so there are few.
FULL_ON_CUDA = replace(FULL, processes=3, rounds=3, steps=20, first_runs=1, memory_runs=1)
AGAINST_ON_CUDA = replace(FULL_ON_CUDA, processes=6, steps=10, first_runs=6)
# Enough to see that everything runs; too short to quote.
QUICK = Protocol(processes=1, rounds=2, steps=5, first_runs=1, memory_runs=1, memory_steps=3)
# Fields of the protocol that options of the same names set.
COUNTS = ("processes", "rounds", "steps", "first_runs", "memory_runs")


class Bench:
    """Runs the protocol.

    The workers' caches, and their logs if no folder is named for them, are in `folder`, which is
    thrown away.
    """

    def __init__(
        self, console: Console, folder: Path, device: str, protocol: Protocol, timeout_s: float,
        against: Path | None, autocast: str | None = None, onednn: str | None = None,
        logs: Path | None = None, save: Callable[[], None] = lambda: None, *,
        is_inference: bool = False,
    ) -> None:  # fmt: skip
        self.console = console
        self.folder = folder
        self.device = device
        self.protocol = protocol
        self.timeout_s = timeout_s
        self.against = against
        self.autocast = autocast
        self.onednn = onednn
        self.logs = logs or folder
        self.save = save  # called whenever there is more to keep
        self.is_inference = is_inference
        self.records = Records()
        self.machine: dict[str, Any] = {}

    def measure(self, model: str, backends: list[str], threads: int, steady_only: bool) -> None:
        """Measure one model with all backends; a backend that fails drops out with its reason."""
        rows = []
        for backend in backends:
            rows.append(self.records.add(model, backend, threads))
            if self.against is not None and backend in OURS:
                rows.append(self.records.add(model, backend, threads, is_other_build=True))
        if self.device == "cuda":
            for process in range(self.protocol.processes):
                for row in rotated(going(rows), process):
                    self._measure_alone(row, process, steady_only)
                    self.save()
            return
        if not steady_only:
            # Backends take turns here too, so that a slow minute falls on all of them.
            for run in range(self.protocol.first_runs):
                for row in going(rows):
                    self._measure_first(row, run)
                self.save()
        for process in range(self.protocol.processes):
            self._measure_steady(rows, process)
            self.save()
        if not steady_only:
            for run in range(self.protocol.memory_runs):
                for row in going(rows):
                    self._measure_memory(row, run)
                self.save()

    def _measure_alone(self, row: Record, process: int, steady_only: bool) -> None:
        """Take all figures in one process, which has the GPU for itself.

        Parameters, optimizer states and pools of several backends need not fit into its memory
        together. What a process pools there is given back only when it ends.
        """
        of_processes = f"process {process + 1} of {self.protocol.processes}"
        is_cold = not steady_only and process < self.protocol.first_runs
        cache = self._cache(row, process if is_cold else 0)
        caches = "empty" if is_cold or process == 0 else "own"
        self._say(row, f"{of_processes}, first step, {caches} caches")
        with drop_on_error(row), contextlib.ExitStack() as stack:
            worker, first = self._started(row, cache, self._warm_up, stack)
            if is_cold:
                row.first_cold.append(first)
            elif not steady_only and row.first_warm is None:
                row.first_warm = first
            self._say(row, f"{of_processes}, {self.protocol.rounds} rounds")
            for _ in range(self.protocol.rounds):
                self._take_turn(row, worker)
            self._say(row, f"median step {milliseconds(row.figures()['median_step'])} ms")
            row.steady_counters.append(worker.ask("counters"))
            if not steady_only and process < self.protocol.memory_runs:
                memory = worker.ask("memory", steps=self.protocol.memory_steps)
                row.memory.append(memory | {"first_peak_bytes": first["first_peak_bytes"]})
            self._measure_roofline(row, worker, process)

    def _measure_first(self, row: Record, run: int) -> None:
        self._say(row, f"first step, empty caches, {run + 1} of {self.protocol.first_runs}")
        with drop_on_error(row), contextlib.ExitStack() as stack:
            _, first = self._started(row, self._cache(row, run), ask_first, stack)
            row.first_cold.append(first)

    def _measure_steady(self, rows: list[Record], process: int) -> None:
        of_processes = f" of process {process + 1}" if self.protocol.processes > 1 else ""
        with contextlib.ExitStack() as stack:
            workers: list[tuple[Record, WorkerProcess]] = []
            for row in going(rows):
                self._say(
                    row, "first step with the caches of the run before, warm-up" + of_processes
                )
                with drop_on_error(row):
                    worker, first = self._started(row, self._cache(row, 0), self._warm_up, stack)
                    # Without a run before it, this step had no caches to find.
                    if process == 0 and row.first_cold:
                        row.first_warm = first
                    workers.append((row, worker))
            for turn in range(self.protocol.rounds):
                for row, worker in rotated(workers, process + turn):
                    if row.error:
                        continue
                    self._say(row, f"round {turn + 1} of {self.protocol.rounds}{of_processes}")
                    with drop_on_error(row):
                        self._take_turn(row, worker)
            for row, worker in workers:
                if row.error:
                    continue
                with drop_on_error(row):
                    row.steady_counters.append(worker.ask("counters"))
                    self._measure_roofline(row, worker, process)

    def _started(
        self, row: Record, cache: Path, begin: Callable[[Record, WorkerProcess], dict[str, Any]],
        stack: contextlib.ExitStack, *, pin_malloc: bool = False,
    ) -> tuple[WorkerProcess, dict[str, Any]]:  # fmt: skip
        """Start a worker, which `stack` ends, and return it with the first answer of `begin`.

        Where the engine refuses something under strict mode, the row has the reason, and figures
        with what eager PyTorch runs in that place.
        """
        with contextlib.ExitStack() as own:
            worker = own.enter_context(self._start(row, cache, pin_malloc=pin_malloc))
            try:
                first = begin(row, worker)
            except AnsweredError as error:
                if row.backend not in OURS or row.refused is not None:
                    raise
                row.refused = str(error)
            else:
                stack.push(own.pop_all())
                return worker, first
        self._say(row, f"strict mode: {row.refused}; once more without it")
        return self._started(row, cache, begin, stack, pin_malloc=pin_malloc)

    def _warm_up(self, row: Record, worker: WorkerProcess) -> dict[str, Any]:
        """Return what the first step took; the next ones may compile more, and are not timed."""
        self.machine |= worker.ask("machine")
        first = worker.ask("first")
        row.loss, row.is_random = first["loss"], first["is_random"]
        row.package = first["package"]
        worker.ask("run", steps=1, lead_in=WARM_UP_STEPS)
        return first

    def _measure_roofline(self, row: Record, worker: WorkerProcess, process: int) -> None:
        """Measure the least possible time where the row is for it, as a worker's last answer.

        Without it the row's own figures hold as well.
        """
        if row.backend != "ort" or self.against is not None or process > 0:
            return
        self._say(row, "the least possible time")
        time.sleep(SETTLE_S)
        try:
            row.roofline = worker.ask("roofline")
        except WorkerError as error:
            row.roofline_error = str(error)

    def _take_turn(self, row: Record, worker: WorkerProcess) -> None:
        time.sleep(SETTLE_S)
        answer, foreign_cpu = worker.ask_watched(
            "run", steps=self.protocol.steps, lead_in=LEAD_IN_STEPS
        )
        row.steps.append(answer["step_s"])
        row.fwd_bwd.append(answer["fwd_bwd_s"])
        row.foreign_cpu.append(foreign_cpu)
        for key, value in answer["counted"].items():
            row.counted_in_runs[key] = row.counted_in_runs.get(key, 0) + value

    def _measure_memory(self, row: Record, run: int) -> None:
        self._say(row, f"peak memory, {run + 1} of {self.protocol.memory_runs}")
        cache = self._cache(row, 0)
        with drop_on_error(row), contextlib.ExitStack() as stack:
            worker, first = self._started(row, cache, ask_first, stack, pin_malloc=True)
            worker.ask("run", steps=1, lead_in=WARM_UP_STEPS)
            memory = worker.ask("memory", steps=self.protocol.memory_steps)
            row.memory.append(memory | {"first_peak_bytes": first["first_peak_bytes"]})

    def _start(self, row: Record, cache: Path, *, pin_malloc: bool = False) -> WorkerProcess:
        build = "-other" if row.is_other_build else ""
        log = self.logs / f"{row.model}-{row.backend}{build}-{row.threads}.log"
        checkout = str(self.against) if row.is_other_build else None
        job = Job(
            row.model, row.backend, self.device, row.threads, self.autocast, checkout, self.onednn,
            is_strict=row.refused is None, is_inference=self.is_inference,
        )  # fmt: skip
        return WorkerProcess(job, cache, log, self.timeout_s, pin_malloc=pin_malloc)

    def _cache(self, row: Record, run: int) -> Path:
        build = "other" if row.is_other_build else "this"
        cache = self.folder / f"cache-{row.model}-{row.backend}-{build}-{row.threads}-{run}"
        cache.mkdir(exist_ok=True)
        return cache

    def _say(self, row: Record, what: str) -> None:
        # No times and source lines: the log is for following along.
        self.console.print(f"[dim]{row.model}, {row.label}, {row.threads} thread(s): {what}[/dim]")


def ask_first(row: Record, worker: WorkerProcess) -> dict[str, Any]:
    return worker.ask("first")


def going(rows: list[Record]) -> list[Record]:
    return [row for row in rows if row.error is None]


def rotated(values: list[T], number: int) -> list[T]:
    """Begin with another one each time, so that none has the first place in every round."""
    shift = number % max(len(values), 1)
    return values[shift:] + values[:shift]


@contextlib.contextmanager
def drop_on_error(row: Record) -> Iterator[None]:
    """Keep a worker's error in its row; the other backends go on."""
    try:
        yield
    except WorkerError as error:
        row.error = str(error)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        help=f"(default: all but {', '.join(LARGE)}; on CUDA {', '.join(FOR_GPUS)})",
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        help=f"(default: {', '.join(ON_CPU)}; on CUDA {', '.join(ON_CUDA)}; ort with --against)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="measure the engine of another checkout as well, built by `make build` there",
    )
    parser.add_argument(
        "--onednn", metavar="LIBRARY", help=f"libdnnl.so.2, for the products of {ONEDNN}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--autocast",
        choices=("bfloat16", "float16"),
        help="dtype of forward under autocast (default: none; on CUDA float32 runs as TF32)",
    )
    parser.add_argument(
        "--inference",
        action="store_true",
        help="a step is forward alone, under no_grad, of the model in eval()",
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        help="numbers of threads; first steps and peaks are taken at the largest "
        "(default: 1 2, as far as there are cores; on CUDA PyTorch's own choice)",
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs, in little time")
    parser.add_argument("--steady-only", action="store_true", help="no first steps, no peaks")
    parser.add_argument(
        "--processes",
        type=int,
        help="processes of each backend, one after the other, that take steady steps "
        f"({FULL.processes}; {AGAINST.processes} with --against; on CUDA "
        f"{FULL_ON_CUDA.processes} and {AGAINST_ON_CUDA.processes})",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"turns of each process ({FULL.rounds}; {AGAINST.rounds} with --against; on CUDA "
        f"{FULL_ON_CUDA.rounds} and {AGAINST_ON_CUDA.rounds})",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"timed steps a turn ({FULL.steps}; {AGAINST.steps} with --against; on CUDA "
        f"{FULL_ON_CUDA.steps} and {AGAINST_ON_CUDA.steps})",
    )
    parser.add_argument(
        "--first-runs",
        type=int,
        help=f"cold first steps of each backend ({FULL.first_runs}; {AGAINST.first_runs} with "
        f"--against; on CUDA {FULL_ON_CUDA.first_runs} and {AGAINST_ON_CUDA.first_runs})",
    )
    parser.add_argument(
        "--memory-runs",
        type=int,
        help=f"processes of each backend whose peak is taken ({FULL.memory_runs}; on CUDA "
        f"{FULL_ON_CUDA.memory_runs})",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements, again and again"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="keep what the processes of each row print"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figures")
    options = parser.parse_args(arguments)
    for name in COUNTS:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: got {getattr(options, name)}, want 1 or more")
    on_cuda = options.device == "cuda"
    if options.models is None:
        options.models = FOR_GPUS if on_cuda else [name for name in MODELS if name not in LARGE]
    if options.backends is None:
        options.backends = ["ort"] if options.against else list(ON_CUDA if on_cuda else ON_CPU)
    for backend in IN_GRAPHS:
        if backend in options.backends and not on_cuda:
            parser.error(f"--backends {backend}: CUDA graphs need --device cuda")
    if ONEDNN in options.backends and (options.onednn is None or on_cuda or options.autocast):
        parser.error(f"--backends {ONEDNN}: needs --onednn, and is for float32 on the CPU")
    if options.against is not None and not list(options.against.glob("torch_ort/_C.*")):
        parser.error(f"--against: got {options.against}, want a checkout with a built torch_ort")
    if options.threads is None:
        cores = len(os.sched_getaffinity(0))
        options.threads = [torch.get_num_threads()] if on_cuda else [1, min(2, cores)]
    processes = choose_protocol(options).processes
    for name in ("first_runs", "memory_runs"):
        if on_cuda and (asked := getattr(options, name) or 0) > processes:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: got {asked}, want at most {processes}, as --processes")
    if min(options.threads) < 1:
        parser.error(f"--threads: got {min(options.threads)}, want 1 or more")
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    return options


def full_protocol(options: argparse.Namespace) -> Protocol:
    """Return the protocol whose figures may be quoted."""
    if options.device == "cuda":
        return FULL_ON_CUDA if options.against is None else AGAINST_ON_CUDA
    return FULL if options.against is None else AGAINST


def choose_protocol(options: argparse.Namespace) -> Protocol:
    base = QUICK if options.quick else full_protocol(options)
    return replace(
        base,
        processes=options.processes or base.processes,
        rounds=options.rounds or base.rounds,
        steps=options.steps or base.steps,
        first_runs=options.first_runs or base.first_runs,
        memory_runs=options.memory_runs or base.memory_runs,
    )


def main(arguments: list[str]) -> int:
    """Run the benchmark and return its exit status.

    It is 1 if a backend failed or left a part to eager PyTorch, and else 0, whatever the targets
    say.
    """
    options = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        # A file or a CI log has no width of its own, and the tables are wide.
        console = Console(width=200)
    protocol = choose_protocol(options)
    for folder in (options.logs, options.json and options.json.parent):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def save(is_complete: bool = False) -> None:
        if options.json:
            settings = {
                "arguments": arguments,
                "protocol": vars(protocol),
                "system": platform.platform(),
                "machine": bench.machine,
                "is_complete": is_complete,
            }
            write_json(options.json, settings, bench.records)

    with tempfile.TemporaryDirectory(prefix="train_step-") as folder:
        bench = Bench(
            console, Path(folder), options.device, protocol, options.timeout, options.against,
            options.autocast, options.onednn, options.logs, save, is_inference=options.inference,
        )  # fmt: skip
        # Unique, in the order given; the largest number of threads also gets the rest.
        threads = list(dict.fromkeys(options.threads))
        for model in dict.fromkeys(options.models):
            for number in threads:
                steady_only = options.steady_only or number != max(threads)
                bench.measure(model, list(dict.fromkeys(options.backends)), number, steady_only)
    save(is_complete=True)
    print_report(console, bench.records, is_inference=options.inference)
    full = full_protocol(options)
    if any(getattr(protocol, name) < getattr(full, name) for name in COUNTS):
        console.print("[yellow]Shorter than the protocol: figures are not for quoting.[/yellow]")
    if options.png:
        write_png(options.png, bench.records)
    return 1 if any(record.error or record.refused for record in bench.records.all) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
