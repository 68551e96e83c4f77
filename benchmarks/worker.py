"""One backend training, or evaluating, one model in a process of its own.

The worker reads requests and writes answers, one JSON object a line, and does nothing between
them. `train_step.py` starts it and says whose turn it is. Its only argument is its Job, as JSON.
"""

import contextlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder
from itertools import count
from typing import Any, TextIO

import torch
from backends import EAGER, GRAPHS, IN_GRAPHS, MODES, ONEDNN, ORT_GRAPHS, OURS
from memory import HighWater, tensor_bytes
from models import build
from onednn import OneDnn, replace_products


@dataclass(frozen=True)
class Job:
    """What a worker trains, and how."""

    model: str
    backend: str
    device: str
    threads: int
    autocast: str | None = None  # a dtype by name
    checkout: str | None = None  # where torch_ort comes from, if not from the installed one
    onednn: str | None = None  # the library, for eager_onednn
    is_strict: bool = True  # whether an error tells what the engine leaves to eager PyTorch
    is_inference: bool = False  # a step is forward alone, of the model in eval()

    def to_json(self) -> str:
        """Write the job as a worker reads it."""
        return json.dumps(asdict(self))


class CheckoutFinder:
    """Finds torch_ort in a checkout; an editable install of another one would come first."""

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Answer for the package and what is in it."""
        if name == "torch_ort":
            return PathFinder.find_spec(name, [self.checkout])
        return PathFinder.find_spec(name, path) if name.startswith("torch_ort.") else None


class Trainer:
    """The model, its optimizer, and the step that is measured.

    In inference there is no optimizer, and a step is forward without gradients.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        workload = build(job.model, job.device)
        self.module = workload.model
        self.batches = workload.batches
        self.optimizer = None if job.is_inference else make_optimizer(self.module, job)
        self.module.train(not job.is_inference)
        self.step_numbers = count()
        self.call: Callable[..., torch.Tensor] = self.module
        self.clock = CudaClock() if job.device == "cuda" else WallClock()
        self.products = replace_products(OneDnn(job.onednn)) if job.backend == ONEDNN else None

    def step(self) -> torch.Tensor:
        """Run one step and return its loss, with the clock marked four times."""
        batch = self.batches[next(self.step_numbers) % len(self.batches)]
        self.clock.mark()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.clock.mark()
        if self.job.backend == GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        with self.modes():
            loss = self.call(*batch)
        if self.optimizer is not None:
            loss.backward()
        self.clock.mark()
        if self.optimizer is not None:
            self.optimizer.step()
        self.clock.mark()
        return loss.detach()

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Set what forward runs in: gradients or none, and the precision."""
        dtype = self.job.autocast and getattr(torch, self.job.autocast)
        with (
            torch.set_grad_enabled(not self.job.is_inference),
            torch.autocast(self.job.device, dtype, enabled=dtype is not None),
        ):
            yield

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()

    def first(self) -> dict[str, Any]:
        """Compile and run the first step; a backend may do its work in either half."""
        water = HighWater(self.job.device)
        resettable = True
        try:
            water.start()
        except OSError:
            resettable = False
        # The dropout masks come after the weights and batches, from a seed of their own.
        torch.manual_seed(1)
        generator = random_state(self.job.device)
        self.synchronize()
        begin = time.perf_counter()
        if self.job.backend == "ortmodule":
            import torch_ort

            self.call = torch_ort.ORTModule(self.module)
        elif self.job.backend in MODES:
            self.call = torch.compile(self.module, mode=MODES[self.job.backend])
        elif self.job.backend == ORT_GRAPHS:
            self.call = torch.compile(self.module, backend="ort", mode="reduce-overhead")
        elif self.job.backend not in EAGER:
            self.call = torch.compile(self.module, backend=self.job.backend)
        compiled = time.perf_counter()
        loss = self.step()
        self.synchronize()
        end = time.perf_counter()
        return {
            "compile_call_s": compiled - begin,
            "first_step_s": end - begin,
            "first_peak_bytes": water.peak_bytes() if resettable else None,
            "loss": loss.item(),
            "is_random": not torch.equal(generator, random_state(self.job.device)),
            "package": package_folder(),
            "counters": self.counters(),
        }

    def run(self, steps: int, lead_in: int) -> dict[str, Any]:
        """Time steps, after a few untimed ones that bring this process's data back to the caches.

        On CUDA the host runs ahead, as in a training loop: it waits once, after the last step.
        """
        for _ in range(lead_in):
            self.step()
        self.synchronize()
        self.clock.take()
        before = self.counters()["ort"]
        for _ in range(steps):
            loss = self.step()
        self.synchronize()
        after = self.counters()["ort"]
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss: got {loss.item()}, want a finite number")
        marks = self.clock.take()
        quadruples = list(zip(*[iter(marks)] * 4, strict=True))
        return {
            "step_s": [last - first for first, _, _, last in quadruples],
            "fwd_bwd_s": [end - begin for _, begin, end, _ in quadruples],
            "counted": {key: value - before.get(key, 0) for key, value in after.items()},
        }

    def memory(self, steps: int) -> dict[str, Any]:
        """Measure the peak of steady steps.

        The starting point holds parameters, optimizer state and batches, and neither gradients
        nor any memory that the engine pools between steps: what is above it is what steps need.
        """
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.job.backend in OURS:
            import torch_ort

            torch_ort.empty_cache()
        water = HighWater(self.job.device)
        try:
            water.start()
        except OSError as error:
            reason = f"Linux refused to reset VmHWM: {error}"
            return {"step_peak_bytes": None, "reason": reason, "counters": self.counters()}
        for _ in range(steps):
            self.step()
        peak, reason = water.peak_bytes(), None
        if self.job.backend in IN_GRAPHS:
            peak, reason = None, "a CUDA graph that is replayed allocates nothing"
        parameters = list(self.module.parameters())
        states = [
            value
            for state in (self.optimizer.state.values() if self.optimizer is not None else ())
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        gradients = tensor_bytes([p.grad for p in parameters if p.grad is not None])
        return {
            "step_peak_bytes": peak,
            "activation_bytes": None if peak is None else peak - gradients,
            "reserved_peak_bytes": water.reserved_bytes(),
            "reason": reason,
            "parameter_bytes": tensor_bytes(parameters),
            "gradient_bytes": gradients,
            "optimizer_bytes": tensor_bytes(states),
            "input_bytes": tensor_bytes([tensor for batch in self.batches for tensor in batch]),
            "counters": self.counters(),
        }

    def roofline(self) -> dict[str, Any]:
        """Measure the machine, and say what forward, and backward in training, take at least.

        `products_of_peak` is where the engine's products stand, None without any.
        """
        import torch_ort

        with self.modes():
            found = torch_ort.explain(self.module, *self.batches[0], roofline=True).roofline
        least = sum(step.flops / step.peak for step in found.products)
        spent = sum(step.per_run for step in found.products) / 1e6
        return {
            "flops": found.flops,
            "peak_flops": found.peaks.flops,
            "where": found.peaks.where,
            "memory_bytes": found.memory_bytes,
            "bytes_per_second": found.bytes_per_second,
            "least_s": found.seconds,
            "products_of_peak": least / spent if spent else None,
        }

    def counters(self) -> dict[str, dict[str, int]]:
        """Return what torch_ort counted so far, and what Dynamo captured and broke."""
        counted: dict[str, dict[str, int]] = {"ort": {}, "dynamo": {}}
        if self.job.backend in OURS:
            import torch_ort

            counted["ort"] = dict(torch_ort.counters())
        if self.job.backend not in EAGER:
            from torch._dynamo.utils import counters

            counted["dynamo"] = {
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": sum(counters["graph_break"].values()),
            }
        return counted


def make_optimizer(module: torch.nn.Module, job: Job) -> torch.optim.Optimizer:
    """Make the fastest AdamW of each: the engine's or PyTorch's fused one."""
    if job.backend in OURS:
        import torch_ort

        return torch_ort.optim.AdamW(module.parameters(), lr=1e-4)
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def package_folder() -> str | None:
    """Tell where the engine comes from, if this process has loaded it."""
    package = sys.modules.get("torch_ort")
    return None if package is None else os.path.dirname(package.__file__)


def random_state(device: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


class WallClock:
    """Marks moments on the host."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def mark(self) -> None:
        """Remember this moment."""
        self.marks.append(time.perf_counter())

    def take(self) -> list[float]:
        """Return the marks in seconds and forget them."""
        marks, self.marks = self.marks, []
        return marks


class CudaClock:
    """Marks moments on the current stream; read once it has passed them."""

    def __init__(self) -> None:
        self.marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Ask the stream to remember when it gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def take(self) -> list[float]:
        """Return the marks in seconds and forget them; the stream must have passed them all."""
        marks, self.marks = self.marks, []
        return [marks[0].elapsed_time(event) / 1e3 for event in marks]


def machine(job: Job) -> dict[str, Any]:
    on_cuda = job.device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
    }


def serve(trainer: Trainer, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until their stream ends; an error is an answer too, and the last one."""
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "machine": lambda: machine(trainer.job),
        "first": trainer.first,
        "run": trainer.run,
        "memory": trainer.memory,
        "roofline": trainer.roofline,
        "counters": trainer.counters,
    }
    for line in requests:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](**request)
        except Exception as error:
            # The parent reports it in this worker's row; the trace goes to this worker's log.
            traceback.print_exc()
            first_line = str(error).strip().splitlines()[:1]
            answer = {"error": ": ".join([type(error).__name__, *first_line])}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    # A compiler may print; its words go to the log, away from the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as GPUs train in float32
    if job.checkout is not None:
        sys.meta_path.insert(0, CheckoutFinder(job.checkout))
    serve(Trainer(job), sys.stdin, answers)


if __name__ == "__main__":
    main()
