"""Times of the engine's steps, out of the events of torch.profiler."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torch_ort import _C
from torch_ort.engine.agreement import COLLECTIVES
from torch_ort.engine.program import Program
from torch_ort.reports.moved import VIEW_FORMS, moved_bytes
from torch_ort.reports.products import (
    Product,
    attention,
    convolution,
    product,
    rows_product,
    winograd,
    winograd_weight_gradient,
)
from torch_ort.reports.profile_result import Profile
from torch_ort.reports.profile_rows import (
    Bar,
    Collective,
    Flight,
    GraphProfile,
    RegionProfile,
    StepTimes,
)

REGION = "torch_ort.Region"

_WAIT = f"{COLLECTIVES}wait_tensor"

_WEIGHT_GRADIENTS = ("ConvolutionWeightGrad", "DepthwiseWeightGrad")
_PRODUCTS = {str(op).removeprefix("aten.") for op in flop_registry} | {
    "addmv", "addr", "dot", "mv", "RowsProduct", *_WEIGHT_GRADIENTS,
    "Convolution", "DepthwiseConvolution", "WinogradConvolution", "WinogradWeightGrad",
}  # fmt: skip
_RUN = "torch_ort::session "  # an event of the engine, with the number of the session that runs
_HALVES = {"torch_ort::run_forward": False, "torch_ort::run_backward": True}
# What the time outside of steps is spent on, by the beginning of the event's name.
_OUTSIDE = (
    ("TorchDynamo Cache Lookup", "Dynamo's guards"),
    ("Torch-Compiled Region", "Dynamo's code"),
    ("Pregraph bytecode", "Dynamo's code"),
    ("AOTDispatcher", "AOTAutograd's wrappers"),
    ("CompiledFunction", "AOTAutograd's wrappers"),
    ("aten::", "eager operators"),
    (_RUN, "engine, between steps"),
)


def time_steps(
    run: Callable[[], None], steps: int, programs: Sequence[Program], fallbacks: list[str]
) -> Profile:
    """Time the steps of `programs` while `run` runs a training step, `steps` times and one more."""
    timed = _record(run, steps)
    # Products are counted in a run of their own: the profiler records sizes slowly.
    counted = _record(run, 1, record_shapes=True)
    return _Reader(programs).read(timed, counted, fallbacks)


def _record(run: Callable[[], None], steps: int, **settings: Any) -> torch.profiler.profile:
    # The first step of the profiler is slow.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, **settings) as events:
        for _ in range(1 + steps):
            run()
            events.step()
    return events


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
        # Kernels of ours call no operators whose sizes the profiler could record.
        self._native_products = {
            (number, name): [found]
            for number, program in enumerate(self._programs)
            for name, found in _native_products(program)
        }
        self._collectives = [
            collective
            for number, program in enumerate(self._programs)
            for collective in _collectives_of(number, program, self._steps)
        ]
        self._outside: Counter[str] = Counter()

    def read(
        self, timed: torch.profiler.profile, counted: torch.profiler.profile, fallbacks: list[str]
    ) -> Profile:
        """Give the times by step; what is in no event of a measured step is Python's."""
        for _, events in _measured(counted):
            for event, _, step in self._walk(events):
                if step is not None:
                    step.calls += 1
                    step.products += _products(event)
                    step.products += self._native_products.get((step.graph, step.name), ())
        wall, bars = [], []
        for run, (marker, events) in enumerate(_measured(timed)):
            wall.append(marker.time_range.elapsed_us())
            bars.append(self._read_step(marker.time_range.start, events))
            _note_flights(run, self._collectives, bars[-1])
        steps = list(self._steps.values())
        known = sum(step.total for step in steps) + self._outside.total()
        self._outside["autograd and Python"] += sum(wall) - known
        middle = wall.index(statistics.median_low(wall))
        return Profile(
            [_describe(program) for program in self._programs], steps, wall,
            dict(self._outside.most_common()), bars[middle], middle, fallbacks, timed,
            collectives=[each for each in self._collectives if each.flights],
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


def _collectives_of(
    graph: int, program: Program, steps: Mapping[tuple[int, bool, str], StepTimes]
) -> Iterator[Collective]:
    """Give what a graph communicates and waits for."""
    found: dict[str, Collective] = {}  # by what is in flight
    by_name = {name: step for (number, _, name), step in steps.items() if number == graph}
    for node in program.graph.nodes():
        operator, step = str(node["attrs"].get("operator", "")), by_name.get(node["name"])
        if operator == _WAIT:
            collective = found.get(node["inputs"][0])
            if collective is not None and step is not None:
                collective.waits.append(step)
        elif operator.startswith(COLLECTIVES) and step is not None:
            group = str(node["attrs"].get("group_name", ""))
            found |= dict.fromkeys(node["outputs"], Collective(step, [], group))
    yield from {id(each): each for each in found.values() if each.waits}.values()


def _note_flights(run: int, collectives: Sequence[Collective], bars: Sequence[Bar]) -> None:
    """Add the flights of a measured step, whose steps ran one after the other."""
    starts = {id(each.start): each for each in collectives}
    waits = {id(step): each for each in collectives for step in each.waits}
    of_products = 0.0  # spent in products and attention so far
    begun: dict[int, tuple[float, float, list[Bar]]] = {}  # with that time, and the waits since
    for bar in bars:
        end = bar.start + bar.length
        if bar.step is not None and bar.step.kind in ("products", "attention"):
            of_products += bar.length
        elif collective := starts.get(id(bar.step)):
            begun[id(collective)] = (end, of_products, [])
        elif (collective := waits.get(id(bar.step))) and id(collective) in begun:
            begin, before, waited = begun[id(collective)]
            waited.append(bar)
            if len(waited) == len(collective.waits):
                del begun[id(collective)]
                spent = sum(each.length for each in waited)
                flight = Flight(run, begin, end - begin, spent, of_products - before)
                collective.flights.append(flight)


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
        # On some devices backward runs in a thread of its own.
        elsewhere = [
            event for event in events
            if event.cpu_parent is None and event.thread != marker.thread
            and marker.time_range.start <= event.time_range.start < marker.time_range.end
        ]  # fmt: skip
        yield marker, [*marker.cpu_children, *elsewhere]


def _products(event: Any) -> Iterator[Product]:
    """Give the products that run within an event; not those that make up a larger one."""
    if event.name.startswith(("aten::", "torch_ort::recurrent")):
        pairs = zip(event.input_shapes, event.concrete_inputs, strict=True)
        args = [shape if value is None else value for shape, value in pairs]
        if (found := product(event.name.removeprefix("aten::"), args)) is not None:
            yield found
            return
    for child in event.cpu_children:
        yield from _products(child)


def _native_products(program: Program) -> Iterator[tuple[str, Product]]:
    """Give the products in kernels of ours, by node; not where a size is open."""
    types = program.graph.types()
    listed = {name: count for name, count, _ in program.session.row_lists()}
    nodes = [node for node in program.graph.nodes() if node["domain"] == "torch_ort"]
    makers = {output: node["name"] for node in nodes for output in node["outputs"]}

    def shapes(operands: Sequence[str]) -> list[Any] | None:
        found = [types[name][1] for name in operands]
        are_known = all(shape and all(isinstance(size, int) for size in shape) for shape in found)
        return found if are_known else None

    for node in nodes:
        op, inputs, attrs = node["op"], node["inputs"], node["attrs"]
        if op in ("Attention", "AttentionGrad"):
            backward = op == "AttentionGrad"  # whose first input is the gradient
            if (found := shapes(inputs[1:4] if backward else inputs[:3])) is not None:
                yield node["name"], attention(*found, bool(attrs.get("is_causal")), backward)
        elif op in _WEIGHT_GRADIENTS:
            if (found := shapes([*inputs[:2], node["outputs"][0]])) is not None:
                gradient, image, weight = found
                groups = int(attrs.get("groups", image[1]))
                yield node["name"], convolution(gradient, weight, groups)
        elif op == "WinogradConvolution":
            if (found := shapes([inputs[0], node["outputs"][0]])) is not None:
                image, result = found
                yield node["name"], winograd(result, image[1])
        elif op == "WinogradWeightGrad":
            if (found := shapes(inputs)) is not None:
                gradient, image = found
                yield node["name"], winograd_weight_gradient(gradient, image[1])
        elif op in ("Convolution", "DepthwiseConvolution"):
            is_transposed = bool(attrs.get("transposed"))
            places = inputs[0] if is_transposed else node["outputs"][0]
            if (found := shapes([places, inputs[1]])) is not None:
                groups = int(attrs.get("groups", found[0][1]))
                yield node["name"], convolution(*found, groups)
        elif op == "RowsProduct":
            count = listed.get(makers.get(inputs[-1], ""))
            if count is not None and (found := shapes(inputs[:2])) is not None:
                yield node["name"], rows_product(*found, bool(attrs.get("sums")), count)


def _steps_of(graph: int, program: Program) -> Iterator[StepTimes]:
    moved, dtypes = moved_bytes(program.graph, program.session), _dtypes(program.graph)
    kernels = dict(program.session.programs())  # of ours, for the sizes of the latest run
    for name, op, form, backward, origin in program.session.steps():
        is_view = form in VIEW_FORMS and name not in moved
        yield StepTimes(
            graph, name, op, "views" if is_view else _kind(op),
            _where(op, form, name in kernels), backward, origin,
            *moved.get(name, (0, 0)), dtypes.get(name, ""),
        )  # fmt: skip


def _dtypes(graph: _C.Graph) -> dict[str, str]:
    """Give the dtype of the first result of each node that has one."""
    types = graph.types()
    return {
        node["name"]: types[made[0]][0]
        for node in graph.nodes()
        if (made := [name for name in node["outputs"] if name and types[name][0]])
    }


def _kind(op: str) -> str:
    if op == REGION:
        return "regions"
    if op.startswith(COLLECTIVES):
        return "collectives"
    name = op.removeprefix("torch_ort.").rpartition("::")[2].partition(".")[0].rstrip("_")
    if "attention" in name.lower():
        return "attention"
    return "products" if name in _PRODUCTS else "other"


def _where(op: str, form: str, has_kernel: bool) -> str:
    if form == "python":
        return "Python"
    if op == REGION:
        return "region"
    return "native" if has_kernel else "ATen"


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
            # A result that overwrites an operand counts from the time when the operand is dead.
            in_use[node["name"]] = sum(
                row["bytes"] for row in memory
                if row["first_step"] + bool(row["in_place_of"]) <= min(made) <= row["last_step"]
            )  # fmt: skip
    return in_use
