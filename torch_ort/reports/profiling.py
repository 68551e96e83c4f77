"""Where a step spends its time: `torch_ort.profile`."""

from __future__ import annotations

import os
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torch_ort import _C
from torch_ort._C import Unsupported, UserError
from torch_ort.engine import watchers
from torch_ort.engine.program import Program
from torch_ort.fallback import FallbackWarning
from torch_ort.reports import report
from torch_ort.reports.profile_result import Profile
from torch_ort.reports.profile_rows import Bar, GraphProfile, RegionProfile, StepTimes

WARM_STEPS = 3  # capture, the guarded first runs, and one more
REGION = "torch_ort.Region"

_PRODUCTS = {str(op).removeprefix("aten.") for op in flop_registry} | {"addmv", "addr", "dot", "mv"}
_RUN = "torch_ort::session "  # an event of the engine, with the number of the session that runs
_HALVES = {"torch_ort::run_forward": False, "torch_ort::run_backward": True}
# Who spends the time outside the steps, by the start of the event's name.
_OUTSIDE = (
    ("TorchDynamo Cache Lookup", "Dynamo's guards"),
    ("Torch-Compiled Region", "Dynamo's code"),
    ("Pregraph bytecode", "Dynamo's code"),
    ("AOTDispatcher", "AOTAutograd's wrappers"),
    ("CompiledFunction", "AOTAutograd's wrappers"),
    ("aten::", "eager operators"),
    (_RUN, "engine, between steps"),
)


def profile(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    steps: int = 10,
    path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Profile:
    """Compile `model` for `inputs`, run it `steps` times, and time every step of the engine.

    Backward runs if an output asks for it. Parameters, buffers, gradients, inputs and random
    generators come out as they went in. With `path` the page is written to `<path>.html` and the
    trace to `<path>.json`.
    Raises what the model raises, UserError on bad arguments, and Unsupported with the reason if
    nothing of the model runs in the engine.
    """
    _check_arguments(model, steps, path)

    def run() -> None:
        report.run_backward(model, compiled(*inputs, **kwargs), (inputs, kwargs))

    with (
        report.kept(model, (inputs, kwargs)),
        watchers.watching() as programs,
        _fallback_reasons() as fallbacks,
    ):
        compiled = report.compile_afresh(model, options)
        for _ in range(WARM_STEPS):
            run()
        timed = _record(run, steps)
        # Apart from the timed steps: to count operations the profiler notes shapes, slowly.
        counted = _record(run, 1, with_flops=True)
    result = _Reader(programs).read(timed, counted, fallbacks)
    if not any(step.microseconds for step in result.steps):
        raise _nothing_ran(fallbacks)
    if path is not None:
        result.save_html(f"{os.fspath(path)}.html")
        result.save_trace(f"{os.fspath(path)}.json")
    return result


def _check_arguments(model: Any, steps: Any, path: Any) -> None:
    if not callable(model):
        raise UserError(f"profile: model: got {model!r}, want a module or a function")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UserError(f"profile: steps: got {steps!r}, want an integer of at least 1")
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):
            raise UserError(f"profile: path: got {path!r}, want the start of two file names")
        folder = os.path.dirname(os.fspath(path)) or "."
        if not os.path.isdir(folder):
            raise UserError(f"profile: path: got {path!r}, want a name in a folder that exists")


def _record(run: Callable[[], None], steps: int, **settings: Any) -> torch.profiler.profile:
    # The profiler's own first step is slow.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, **settings) as events:
        for _ in range(1 + steps):
            run()
            events.step()
    return events


def _nothing_ran(fallbacks: list[str]) -> Exception:
    if fallbacks:
        reasons = "; ".join(dict.fromkeys(fallbacks))
        return Unsupported(f"profile: nothing of the model runs in the engine: {reasons}")
    return UserError(
        "profile: the model has no step to measure: Dynamo captured nothing of it that computes"
    )


@contextmanager
def _fallback_reasons() -> Iterator[list[str]]:
    """Give a list that the reasons of fallbacks are added to; warnings show as they would."""
    reasons: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: type[Warning], *place: Any) -> None:
            if issubclass(category, FallbackWarning):
                reasons.append(str(message))
            show(message, category, *place)

        warnings.filterwarnings("always", category=FallbackWarning)
        warnings.showwarning = note
        yield reasons


class _Reader:
    """Reads the profiler's events into a Profile."""

    def __init__(self, programs: Sequence[Program]) -> None:
        # Equal graphs share a session.
        self._programs = list({program.session.id: program for program in programs}.values())
        self._graphs = {program.session.id: i for i, program in enumerate(self._programs)}
        self._steps: dict[tuple[int, bool, str], StepTimes] = {}
        for number, program in enumerate(self._programs):
            for step in _steps_of(number, program):
                known = self._steps.setdefault((number, step.backward, step.name), step)
                known.join(step)
        self._outside: Counter[str] = Counter()

    def read(
        self, timed: torch.profiler.profile, counted: torch.profiler.profile, fallbacks: list[str]
    ) -> Profile:
        """Give the times by step; what is in no event of a measured step is Python's."""
        for _, events in _measured(counted):
            for event, _, step in self._walk(events):
                if step is not None:
                    step.flops = _flops(event)
        wall, bars = [], []
        for marker, events in _measured(timed):
            wall.append(marker.time_range.elapsed_us())
            bars.append(self._read_step(marker.time_range.start, events))
        steps = list(self._steps.values())
        known = sum(step.total for step in steps) + self._outside.total()
        self._outside["autograd and Python"] += sum(wall) - known
        middle = wall.index(statistics.median_low(wall))
        return Profile(
            [_describe(program) for program in self._programs], steps, wall,
            dict(self._outside.most_common()), bars[middle], middle, fallbacks, timed,
        )  # fmt: skip

    def _read_step(self, start: float, events: Sequence[Any]) -> list[Bar]:
        bars = []
        for event, backward, step in self._walk(events):
            length = event.time_range.elapsed_us()
            if step is not None:
                step.microseconds.append(length)
            else:
                inside = "engine, between steps" if backward is not None else None
                self._outside[inside or _outside_name(event.name)] += event.self_cpu_time_total
            if step is not None or event.name in _HALVES:
                bars.append(Bar(event.name, event.time_range.start - start, length, step))
        return bars

    def _walk(
        self, events: Sequence[Any], graph: int | None = None, backward: bool | None = None
    ) -> Iterator[tuple[Any, bool | None, StepTimes | None]]:
        """Give the events, with the half of a graph and the step they are; not what steps call."""
        for event in events:
            owner, half = graph, _HALVES.get(event.name, backward)
            if event.name.startswith(_RUN):
                owner = self._graphs.get(int(event.name.removeprefix(_RUN)))
            step = self._steps.get((owner, half, event.name))
            yield event, half, step
            if step is None:
                yield from self._walk(event.cpu_children, owner, half)


def _outside_name(event: str) -> str:
    for start, name in _OUTSIDE:
        if event.startswith(start):
            return name
    return "autograd and Python"


def _measured(profiler: torch.profiler.profile) -> Iterator[tuple[Any, list[Any]]]:
    """Give each measured step, and the events that begin in it and in no other event."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]
    for marker in sorted(
        (e for e in events if e.name.startswith("ProfilerStep")), key=lambda e: e.time_range.start
    ):
        # Backward runs in a thread of its own for some devices.
        elsewhere = [
            event for event in events
            if event.cpu_parent is None and event.thread != marker.thread
            and marker.time_range.start <= event.time_range.start < marker.time_range.end
        ]  # fmt: skip
        yield marker, [*marker.cpu_children, *elsewhere]


def _flops(event: Any) -> int:
    return event.flops + sum(map(_flops, event.cpu_children))


def _steps_of(graph: int, program: Program) -> Iterator[StepTimes]:
    moved = report.moved_bytes(program.graph, program.session)
    for name, op, form, backward, origin in program.session.steps():
        is_view = form in report.VIEW_FORMS and name not in moved
        yield StepTimes(
            graph, name, op, "views" if is_view else _kind(op), _where(op, form), backward, origin,
            *moved.get(name, (0, 0)),
        )  # fmt: skip


def _kind(op: str) -> str:
    if op == REGION:
        return "regions"
    name = op.removeprefix("torch_ort.").rpartition("::")[2].partition(".")[0].rstrip("_")
    if "attention" in name.lower():
        return "attention"
    return "products" if name in _PRODUCTS else "other"


def _where(op: str, form: str) -> str:
    if form == "python":
        return "Python"
    if form != "region":
        return "ATen"
    return "region" if op == REGION else "native"


def _describe(program: Program) -> GraphProfile:
    texts = dict(program.session.programs())
    regions = [
        RegionProfile(
            node["name"], node["attrs"]["body"].num_nodes, _body(node["attrs"]["body"]),
            texts.get(node["name"], ""),
        ) for node in program.graph.nodes() if node["op"] == "Region"
    ]  # fmt: skip
    plan = program.session.plan_report() or {}
    memory = _planned(program.session)
    return GraphProfile(program.is_training, plan, memory, _in_use(program, memory), regions)


def _planned(session: _C.Session) -> list[dict[str, Any]]:
    """Give the rows of tensors with a place of their own; views keep alive what they look at."""
    rows = [row for row in session.plan_table() if row["first_step"] is not None]
    ends: Counter[str] = Counter()
    for row in rows:
        owner = row["shares"] or row["name"]
        ends[owner] = max(ends[owner], row["last_step"])
    return [
        {**row, "last_step": ends[row["name"]]}
        for row in rows if row["area"] != "none" and not row["shares"]
    ]  # fmt: skip


def _body(body: _C.Graph) -> str:
    return "\n".join(
        f"{', '.join(node['outputs'])} = {node['attrs'].get('operator', node['op'])}"
        f"({', '.join(node['inputs'])})"
        for node in body.nodes()
    )


def _in_use(program: Program, memory: list[dict[str, Any]]) -> dict[str, int]:
    """Give the bytes of planned areas that hold live tensors while each step runs."""
    begins = {row["name"]: row["first_step"] for row in program.session.plan_table()}
    in_use = {}
    for node in program.graph.nodes():
        made = [begins[name] for name in node["outputs"] if begins.get(name) is not None]
        if made and node["op"] != "YieldOp":
            # A result in place of an operand counts when the operand is dead.
            in_use[node["name"]] = sum(
                row["bytes"] for row in memory
                if row["first_step"] + bool(row["in_place_of"]) <= min(made) <= row["last_step"]
            )  # fmt: skip
    return in_use
