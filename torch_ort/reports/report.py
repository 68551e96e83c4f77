"""What the compiler did with a model: `torch_ort.explain`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch_ort import _C
from torch_ort.core import counting
from torch_ort.dynamo import uncaptured
from torch_ort.engine import watchers
from torch_ort.engine.budget import Recomputation
from torch_ort.engine.program import Program
from torch_ort.functions.capturing import functions_seen
from torch_ort.reports.moved import moved_bytes
from torch_ort.reports.roofline import Roofline, measure
from torch_ort.reports.row_lists import RowList, lines_of, row_lists
from torch_ort.reports.runs import compile_afresh, isa_of, run_backward
from torch_ort.reports.tables import bytes_text

# Dynamo until it calls the backend, recording or AOTAutograd's tracing, reading of the graph, and
# so on. Missing is what an equal graph, or an earlier one of the same capture, has done already.
COMPILE_STAGES = ("dynamo", "record", "aot", "read", "passes", "plan")


@dataclass
class GraphReport:
    """One graph: its nodes, its steps, its plan."""

    is_training: bool
    nodes: Counter[str]  # by "domain.Op"
    aten: Counter[str]  # operators that run through an ATen node
    fused: Counter[str]  # in the bodies of regions, ATen operators by their own name
    steps: Counter[str]  # by form: out, functional, view, ...
    functional: Counter[str]  # operators whose kernels make their own results
    plan: dict[str, Any]
    passes: list[tuple[str, int, float]]
    seconds: dict[str, float]  # by COMPILE_STAGES
    recomputation: Recomputation | None = None  # of a memory budget or level
    row_lists: list[RowList] = field(default_factory=list)  # rows beside which others are left out
    # Read and written by the operators that regions replace, and by what stands in their place.
    bytes_before: int = 0
    bytes_after: int = 0

    def rows_text(self) -> str:
        """Give what the report says of rows that are left out; empty if none are."""
        return "\n".join(lines_of(self.row_lists))


@dataclass
class Report:
    """Everything that `explain` found; prints as a table."""

    graphs: list[GraphReport] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    first_step_seconds: float = 0.0
    roofline: Roofline | None = None  # if it was asked for
    # torch.autograd.Functions that ran outside of the graphs: how often, by full name.
    functions_outside: Counter[str] = field(default_factory=Counter)
    # What Dynamo left to eager PyTorch, and why.
    breaks: list[uncaptured.Break] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"torch_ort: {len(self.graphs)} graph(s), first step {self.first_step_seconds:.2f} s, "
            f"fallbacks {self.counters.get('fallbacks', 0)}"
        ]
        tuned, loaded = (self.counters.get(f"products_{how}", 0) for how in ("tuned", "loaded"))
        if tuned or loaded:
            lines.append(f"kinds of products: {tuned} timed, {loaded} chosen for by files")
        if self.roofline is not None:
            lines.append(str(self.roofline))
        if self.functions_outside:
            lines += [
                f"custom functions outside of the graphs: {_counts(self.functions_outside)}",
                "  torch.compile cannot trace them, and broke the graph there; wrap each, as in",
                "  `call = torch_ort.python_op(TheFunction)`, and write `call(x)` for "
                "`TheFunction.apply(x)`",
            ]
        if self.breaks:
            lines.append("left to eager PyTorch by Dynamo:")
            lines += [f"  {each}" for each in dict.fromkeys(self.breaks)]
        for number, graph in enumerate(self.graphs):
            lines += ["", f"graph {number} ({'training' if graph.is_training else 'inference'})"]
            by_domain: defaultdict[str, int] = defaultdict(int)
            for op, count in graph.nodes.items():
                by_domain[op.rpartition(".")[0] or "standard ONNX"] += count
            lines.append("  nodes: " + _counts(Counter(by_domain)))
            lines.append("  ops: " + _counts(graph.nodes))
            lines.append(
                "  through ATen, no standard op says the same: " + (_counts(graph.aten) or "none")
            )
            lines.append(
                f"  regions: {graph.nodes['torch_ort.Region']} with {graph.fused.total()} nodes: "
                + (_counts(graph.fused) or "none")
            )
            if graph.bytes_before:
                lines.append(
                    f"  bytes moved: {bytes_text(graph.bytes_before)} by the operators that the "
                    f"regions replace, {bytes_text(graph.bytes_after)} by the regions"
                )
            lines += lines_of(graph.row_lists)
            lines.append("  steps: " + _counts(graph.steps))
            lines.append("  results made by the kernel: " + (_counts(graph.functional) or "none"))
            plan = graph.plan
            if plan:
                lines.append(
                    f"  memory: peak {bytes_text(plan['peak_bytes'])} "
                    f"(context {bytes_text(plan['context_bytes'])}, "
                    f"scratch {bytes_text(plan['scratch_bytes'])}), "
                    f"saved for backward {bytes_text(plan['saved_bytes'])}, "
                    f"in place {plan['in_place']}, planned in {plan['plan_ms']:.2f} ms"
                )
                if plan["segments"] > 1:
                    lines.append(f"  gradients leave early, in {plan['segments']} segments")
            if graph.recomputation is not None:
                lines += _recomputation_lines(graph.recomputation, plan)
            rewrites = ", ".join(f"{name} {count}" for name, count, _ in graph.passes if count)
            lines.append(f"  rewrites: {rewrites or 'none'}")
            times = [
                f"{name} {1000 * graph.seconds[name]:.1f} ms"
                for name in COMPILE_STAGES if name in graph.seconds
            ]  # fmt: skip
            lines.append(f"  compile time: {', '.join(times)}")
        return "\n".join(lines)


def explain(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    roofline: bool = False,
    **kwargs: Any,
) -> Report:
    """Compile `model` for `inputs`, run one step, and report.

    Backward runs if an output asks for it. With `roofline` more steps are run, also in eager
    PyTorch, to say how far from the least possible time the engine is, and its products from the
    machine's peak, which is measured; these steps leave no trace.
    The model's gradients are left as they were; buffers such as running statistics are updated as a
    step updates them. Raises what the model raises, and engine errors when TORCH_ORT_STRICT=1; what
    Dynamo leaves to eager PyTorch is listed then too, and not raised.
    """
    before = counting.counters()
    start = time.perf_counter()
    with (
        watchers.watching() as watched,
        functions_seen() as outside,
        uncaptured.watching() as breaks,
    ):
        compiled = compile_afresh(model, options)
        run_backward(model, compiled(*inputs, **kwargs), (inputs, kwargs))
    spent = time.perf_counter() - start
    after = counting.counters()
    changes = {name: after[name] - before.get(name, 0) for name in after}
    graphs = [_describe(program) for program in watched]
    for graph, program in zip(graphs, watched, strict=True):
        if graph.nodes["torch_ort.Region"] and program.session.plan_report() is not None:
            _note_bytes(graph, program)
    users = [each for each in breaks if each.is_users or not graphs]
    report = Report(graphs, changes, spent, functions_outside=outside, breaks=users)
    if roofline:
        report.roofline = measure(model, compiled, (inputs, kwargs), watched, isa_of(options))
    return report


def _note_bytes(report: GraphReport, program: Program) -> None:
    """Plan the graph once more without regions; what only one of both has is compared."""
    graph = program.captured.clone()
    have_run = {name for name, _, _ in program.passes}
    left_out = [each.name for each in _C.passes() if each.for_regions or each.name not in have_run]
    _C.run_pipeline(graph, left_out)
    session = _C.Session.compile(
        graph, program.constants, parameter_gradients=program.parameter_gradients
    )
    session.prepare_like(program.session)
    before = moved_bytes(graph, session)
    after = moved_bytes(program.graph, program.session)
    report.bytes_before = sum(sum(before[name]) for name in before.keys() - after.keys())
    report.bytes_after = sum(sum(after[name]) for name in after.keys() - before.keys())


def _describe(program: Program) -> GraphReport:
    nodes: Counter[str] = Counter()
    aten: Counter[str] = Counter()
    fused: Counter[str] = Counter()
    for node in program.graph.nodes():
        nodes[f"{node['domain']}.{node['op']}" if node["domain"] else node["op"]] += 1
        if node["op"] == "ATen":
            aten[node["attrs"]["operator"]] += 1
        elif node["op"] == "Region":
            for inner in node["attrs"]["body"].nodes():
                fused[inner["attrs"].get("operator", inner["op"])] += 1
    steps: Counter[str] = Counter()
    functional: Counter[str] = Counter()
    for _, op, form, _, _ in program.session.steps():
        steps[form] += 1
        if form == "functional":
            functional[op] += 1
    return GraphReport(
        program.is_training, nodes, aten, fused, steps, functional,
        program.session.plan_report() or {}, program.passes, program.seconds,
        program.recomputation, row_lists(program),
    )  # fmt: skip


def _recomputation_lines(recomputation: Recomputation, plan: dict[str, Any]) -> list[str]:
    planned = recomputation.planned
    saved = sum(num_bytes for *_, num_bytes, _ in planned.made)
    if recomputation.level is not None:
        asked = f"memory_opt_level {recomputation.level}"
        if recomputation.level:
            asked += f", {planned.num_layers} layer(s)"
        first = (
            f"  {asked}: {bytes_text(planned.dense_held_bytes)} at the border without "
            f"recomputation; planned {bytes_text(planned.held_bytes)} there, "
            f"{bytes_text(planned.peak_bytes)} at most, in {planned.plan_ms:.1f} ms"
        )
    else:
        first = (
            f"  memory budget: {bytes_text(planned.allowed_bytes)} of "
            f"{bytes_text(planned.dense_bytes)} without recomputation; planned "
            f"{bytes_text(planned.peak_bytes)} at most, {bytes_text(planned.held_bytes)} at the "
            f"border, in {planned.plan_ms:.1f} ms"
        )
    lines = [
        first,
        f"  made again: {len(planned.made)} nodes, {bytes_text(saved)} that cross no more, some "
        f"{planned.again_us / 1000:.2f} ms of a step: "
        + (_counts(Counter(op for _, op, *_ in planned.made)) or "none"),
    ]
    lines += [
        f"  by name: {row['name']}:{row['type']}:{row['count']}, {row['frequency']} of them, "
        f"{bytes_text(row['saved_bytes'])}"
        for row in planned.clusters
        if row["is_on"]
    ]
    if plan:
        off = plan["saved_bytes"] - planned.held_bytes
        sign = "-" if off < 0 else "+"
        lines.append(
            f"  held at the border: {bytes_text(plan['saved_bytes'])}, {sign}"
            f"{bytes_text(abs(off))} of what was planned"
        )
    return lines


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
