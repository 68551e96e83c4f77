"""One architecture on one road, in a process of its own; the answer is one line of JSON.

`model_coverage.py` starts it. Its only argument is its Job, as JSON.
"""

import contextlib
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from architectures import Example, build, call
from coverage_rows import EAGER
from memory import HighWater, pin_malloc

COMPILE, ORTMODULE = "compile", "ortmodule"
ROADS = (COMPILE, ORTMODULE)
LEARNING_RATE = 1e-3
# The last loss has seen three updates.
CHECKED_STEPS = 4
WARM_STEPS = 3
TIMED_STEPS = 10
PROFILED_STEPS = 3
MEMORY_STEPS = 3


@dataclass(frozen=True)
class Job:
    """What a worker trains, and how."""

    architecture: str
    road: str
    threads: int

    def to_json(self) -> str:
        """Write the job as a worker reads it."""
        return json.dumps(asdict(self))


@dataclass
class FirstSteps:
    """What the first CHECKED_STEPS steps gave."""

    seconds: float  # of the call that compiles, and of the first step
    losses: list[float]
    gradients: list[torch.Tensor | None]  # of the first step, in the order of the parameters
    graphs: int  # that the engine ran in the last of these steps


class Training:
    """An example and its optimizer; `model` is what stands for the model."""

    def __init__(self, name: str, road: str) -> None:
        self.name = name
        self.road = road
        self.example: Example = build(name)
        self.optimizer = torch.optim.AdamW(self.example.model.parameters(), lr=LEARNING_RATE)
        self.model: Callable[..., Any] = self.example.model
        self.steps = 0

    def begin(self) -> FirstSteps:
        """Put the engine in the model's place, as far as the road asks for it, and train."""
        begin = time.perf_counter()
        if self.road == COMPILE:
            self.model = torch.compile(self.example.model, backend="ort")
        elif self.road == ORTMODULE:
            import torch_ort

            self.model = torch_ort.ORTModule(self.example.model)
        losses = [self.step().item()]
        seconds = time.perf_counter() - begin
        gradients = [
            None if parameter.grad is None else parameter.grad.detach().clone()
            for parameter in self.example.model.parameters()
        ]
        losses += [self.step().item() for _ in range(CHECKED_STEPS - 2)]
        before = self.forward_runs()
        losses.append(self.step().item())
        return FirstSteps(seconds, losses, gradients, self.forward_runs() - before)

    def forward_runs(self) -> int:
        """Return how often the engine has run a graph forward."""
        if self.road == EAGER:
            return 0
        import torch_ort

        return torch_ort.counters()["forward_runs"]

    def step(self) -> torch.Tensor:
        """Run one training step and return its loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def forward(self) -> torch.Tensor:
        """Return the loss of the next batch."""
        batch = self.example.batches[self.steps % len(self.example.batches)]
        self.steps += 1
        return call(self.model, batch)


def check(name: str, road: str) -> dict[str, Any]:
    """Train for a few steps; return what was captured, and how near to eager the numbers are.

    Nothing in the answer depends on time.
    """
    return checked(Training(name, road))[1]


def checked(training: Training) -> tuple[FirstSteps, dict[str, Any]]:
    import torch_ort

    before = torch_ort.counters()
    with noted_reasons() as reasons:
        first = training.begin()
    after = torch_ort.counters()
    changes = {key: value - before.get(key, 0) for key, value in after.items()}
    return first, {
        "graphs": first.graphs,
        "captures": changes["graphs_captured"],
        "handed_over": changes["recordings_handed_over"],
        "breaks": changes["graph_breaks"] + changes["frames_left_to_eager"],
        "refused": changes["captures_refused"],
        "fallbacks": changes["fallbacks"],
        "reasons": list(dict.fromkeys(reasons)),
        **differences(training.name, first),
    }


@contextlib.contextmanager
def noted_reasons() -> Iterator[list[str]]:
    """Give a list of why work is left to eager PyTorch, or a capture to AOTAutograd, meanwhile."""
    from torch_ort.dynamo import uncaptured
    from torch_ort.fallback import FallbackWarning

    reasons: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # What follows are lines of a trace.
            reasons.append(record.getMessage().splitlines()[0])

    recorder, notes = logging.getLogger("torch_ort.recorder"), Notes()
    level = recorder.level
    recorder.addHandler(notes)
    recorder.setLevel(logging.INFO)
    try:
        # Warnings would name the first break alone, and none that is meant, as a branch on data.
        with uncaptured.watching() as breaks, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", category=FallbackWarning)
            yield reasons
    finally:
        recorder.removeHandler(notes)
        recorder.setLevel(level)
    of_users = [each for each in breaks if each.is_users]
    reasons += map(str, of_users or breaks)
    reasons += [str(each.message) for each in seen if issubclass(each.category, FallbackWarning)]


def differences(name: str, ours: FirstSteps) -> dict[str, Any]:
    """Compare with an eager run of the same weights and batches.

    Raises RuntimeError if other parameters have a gradient there.
    """
    eager = Training(name, EAGER).begin()
    pairs = list(zip(ours.gradients, eager.gradients, strict=True))
    if any((got is None) != (want is None) for got, want in pairs):
        raise RuntimeError("other parameters have a gradient than in eager PyTorch")
    both = [(got.double(), want.double()) for got, want in pairs if want is not None]
    off = torch.stack([(got - want).norm() for got, want in both]).norm()
    size = torch.stack([want.norm() for _, want in both]).norm()
    return {
        "losses": ours.losses,
        "eager_losses": eager.losses,
        "loss_difference": loss_difference(ours.losses, eager.losses),
        "gradient_difference": (off / size).item(),
    }


def loss_difference(losses: list[float], wanted: list[float]) -> float:
    return max(abs(got - want) / abs(want) for got, want in zip(losses, wanted, strict=True))


def rounding_difference(name: str, wanted: list[float]) -> float:
    """Return how far eager PyTorch is from itself if all weights are moved by their last bit.

    No other order of sums can be expected to come nearer: some models are sensitive.
    """
    moved = Training(name, EAGER)
    with torch.no_grad():
        for parameter in moved.example.model.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
    return loss_difference(moved.begin().losses, wanted)


def measure(job: Job) -> dict[str, Any]:
    """Train one architecture on one road, and measure it."""
    training = Training(job.architecture, job.road)
    if job.road == EAGER:
        first = training.begin()
        rounding = rounding_difference(job.architecture, first.losses)
        return {"rounding_difference": rounding, **measured(training, first)}
    import torch_ort

    first, found = checked(training)
    found |= measured(training, first)
    before = torch_ort.counters()["steps_run"]
    training.step()
    found["kernel_calls"] = torch_ort.counters()["steps_run"] - before
    return found | {"profile": profile(training, found["kernel_calls"])}


def measured(training: Training, first: FirstSteps) -> dict[str, Any]:
    for _ in range(WARM_STEPS):
        training.step()
    seconds = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - begin)
    return {
        "first_step_s": first.seconds,
        "step_s": statistics.median(seconds),
        "peak_bytes": peak_bytes(training),
    }


def peak_bytes(training: Training) -> int | None:
    """Return what a step needs above parameters, optimizer state and batches.

    None if Linux does not let this process reset its high-water mark.
    """
    training.optimizer.zero_grad()
    pin_malloc()
    if training.road != EAGER:
        import torch_ort

        torch_ort.empty_cache()
    water = HighWater("cpu")
    try:
        water.start()
    except OSError:
        return None
    for _ in range(MEMORY_STEPS):
        training.step()
    return water.peak_bytes()


def profile(training: Training, kernel_calls: int) -> dict[str, float]:
    """Return how many kernels a forward and backward run, and their microseconds, by who runs them.

    `engine` are calls of the engine, `by_torch` those of them that call kernels of PyTorch's, and
    `eager` those of eager PyTorch between the engine's graphs.
    """
    unit = torch.ones(())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as events:
        for _ in range(PROFILED_STEPS):
            training.optimizer.zero_grad()
            # backward() makes this 1 by a kernel of its own.
            torch.autograd.backward(training.forward(), unit)
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in events.events():
        if event.cpu_parent is None and event.device_type == torch.autograd.DeviceType.CPU:
            add_up(event, calls, spent)
    return {
        "engine_calls": kernel_calls,
        "by_torch_calls": calls["by_torch"] / PROFILED_STEPS,
        "eager_calls": calls["eager"] / PROFILED_STEPS,
        "engine_us": spent["engine"] / PROFILED_STEPS,
        "by_torch_us": spent["by_torch"] / PROFILED_STEPS,
        "eager_us": spent["eager"] / PROFILED_STEPS,
    }


def add_up(event: Any, calls: Counter[str], spent: Counter[str]) -> None:
    """Add an event of torch.profiler, and those in it, to what has run it."""
    length = event.time_range.elapsed_us()
    if event.name.startswith("torch_ort::session "):
        spent["engine"] += length
        # Steps that call an operator of PyTorch's; a view of the engine's calls none.
        by_torch = [step for step in event.cpu_children if runs_operator(step)]
        calls["by_torch"] += len(by_torch)
        spent["by_torch"] += sum(step.time_range.elapsed_us() for step in by_torch)
    elif event.name.startswith("aten::"):
        if runs_kernel(event.name):
            calls["eager"] += 1
            spent["eager"] += length
    else:
        for child in event.cpu_children:
            add_up(child, calls, spent)


def runs_operator(event: Any) -> bool:
    if event.name.startswith("aten::"):
        return runs_kernel(event.name)
    return any(map(runs_operator, event.cpu_children))


@cache
def runs_kernel(name: str) -> bool:
    """Tell whether an operator computes: views and allocations do not."""
    operator = name.removeprefix("aten::")
    if operator.startswith(("empty", "new_empty")):
        return False
    packet = getattr(torch.ops.aten, operator, None)
    schemas = (
        [getattr(packet, overload)._schema for overload in packet.overloads()] if packet else []
    )
    return not any(
        result.alias_info is not None and not result.alias_info.is_write
        for schema in schemas
        for result in schema.returns
    )


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    # Libraries print; their words go to the log, away from the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(job.threads)
    try:
        answer = measure(job)
    except Exception as error:
        # The parent reports it in this job's row; the trace goes to the log.
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        answer = {"error": ": ".join([type(error).__name__, *first_line])}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
