"""What the compiler did with a model: `torch_ort.explain`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch_ort import _C, fallback
from torch_ort.core import counting
from torch_ort.dynamo import uncaptured
from torch_ort.engine import watchers
from torch_ort.engine.budget import Recomputation
from torch_ort.engine.program import Program
from torch_ort.engine.replays import Replays, replays_of
from torch_ort.functions.capturing import functions_seen
from torch_ort.reports.moved import moved_bytes
from torch_ort.reports.roofline import Roofline, measure
from torch_ort.reports.row_lists import RowList, lines_of, row_lists
from torch_ort.reports.runs import compile_afresh, isa_of, run_backward
from torch_ort.reports.tables import bytes_text

# The stages of compilation in order: Dynamo until it calls the backend; capture of the joint graph
# by the recorder ("record") or by AOTAutograd ("aot"); translation into the engine's graph
# ("read"); passes; memory plan. A stage is missing if an equal graph, or an earlier one of the same
# capture, has gone through it already.
COMPILE_STAGES = ("dynamo", "record", "aot", "read", "passes", "plan")


@dataclass
class GraphReport:
    """One graph: its nodes after all passes, its steps, its memory plan."""

    is_training: bool  # the graph has a backward
    nodes: Counter[str]  # by "domain.Op"; without a domain for standard ONNX ops
    aten: Counter[str]  # operators of PyTorch's that an ATen node calls
    fused: Counter[str]  # nodes inside of regions; ATen operators by their own name
    # A step runs one node: "region" as a fused kernel, "product" as a matrix product, "out" by an
    # operator of PyTorch's that writes into planned memory, "placed" by one whose allocation is
    # answered with planned memory, "functional" by one that allocates its results, "view" and
    # "reshape" without moving elements where possible, "mutation" in an argument.
    steps: Counter[str]  # by form
    functional: Counter[str]  # operators of "functional" steps
    plan: dict[str, Any]  # sizes in bytes; empty if the graph has not run
    passes: list[tuple[str, int, float]]  # name, number of rewrites, milliseconds
    seconds: dict[str, float]  # by stage, of COMPILE_STAGES
    recomputation: Recomputation | None = None  # by memory_budget or memory_opt_level
    row_lists: list[RowList] = field(default_factory=list)  # rows that alone are computed
    # Bytes read and written by the operators that regions replace, and by the regions themselves.
    bytes_before: int = 0
    bytes_after: int = 0
    replays: Replays | None = None  # what runs as CUDA graphs, if the option cuda_graphs is on

    def rows_text(self) -> str:
        """Give the lines of the report on rows that are not computed; empty if all are."""
        return "\n".join(lines_of(self.row_lists))


@dataclass
class Report:
    """What `explain` found; `str(report)` is text to read."""

    graphs: list[GraphReport] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)  # change of `torch_ort.counters()`
    first_step_seconds: float = 0.0  # with compilation
    roofline: Roofline | None = None  # with `roofline=True`
    # torch.autograd.Functions that ran outside of the graphs: number of calls by full name.
    functions_outside: Counter[str] = field(default_factory=Counter)
    # What Dynamo left to eager PyTorch: file, line and reason of each.
    breaks: list[uncaptured.Break] = field(default_factory=list)
    # Graphs that the engine could not run: stage, reason and line of each.
    fallbacks: list[fallback.Fallback] = field(default_factory=list)

    def __str__(self) -> str:
        graphs = f"{len(self.graphs)} graph(s) captured" if self.graphs else "no graph was captured"
        lines = [
            f"torch_ort: {graphs}; compilation and first step took {self.first_step_seconds:.2f} s"
        ]
        lines += self._lines_of_eager()
        lines += self._lines_of_tuning()
        if self.roofline is not None:
            lines.append(str(self.roofline))
        for number, graph in enumerate(self.graphs):
            lines += ["", f"graph {number} ({'training' if graph.is_training else 'inference'})"]
            lines += _graph_lines(graph)
        return "\n".join(lines)

    def _lines_of_tuning(self) -> list[str]:
        """Say for how many kinds of calls the kernel was measured, or read from a file."""
        lines = []
        for counter, what, kind in (
            ("products", "matrix products", "product"), ("attentions", "attention", "attention"),
        ):  # fmt: skip
            tuned, loaded = (
                self.counters.get(f"{counter}_{how}", 0) for how in ("tuned", "loaded")
            )
            if tuned or loaded:
                lines.append(
                    f"kernels of {what}: {tuned} kinds of {kind} were timed, for {loaded} a file "
                    "names the kernel"
                )
        return lines

    def _lines_of_eager(self) -> list[str]:
        """Say what ran in eager PyTorch, where in the user's program, and why."""
        lines = [
            f"fallbacks, where the engine failed and eager PyTorch ran instead: "
            f"{self.counters.get('fallbacks', 0)}"
        ]
        lines += [f"  {each}" for each in dict.fromkeys(self.fallbacks)]
        lines += uncaptured.lines_of(self.breaks)
        if self.functions_outside:
            lines += [
                f"custom functions outside of the graphs: {_counts(self.functions_outside)}",
                "  torch.compile cannot trace them, and broke the graph there; wrap each, as in",
                "  `call = torch_ort.python_op(TheFunction)`, and write `call(x)` for "
                "`TheFunction.apply(x)`",
            ]
        return lines


def _graph_lines(graph: GraphReport) -> list[str]:
    by_domain: defaultdict[str, int] = defaultdict(int)
    for op, count in graph.nodes.items():
        by_domain[op.rpartition(".")[0] or "standard ONNX"] += count
    lines = [
        "  nodes by domain: " + _counts(Counter(by_domain)),
        "  nodes by op: " + _counts(graph.nodes),
        "  PyTorch operators without a standard ONNX op: " + (_counts(graph.aten) or "none"),
    ]
    num_regions = graph.nodes["torch_ort.Region"]
    if num_regions:
        lines.append(
            f"  fused regions: {num_regions}, in place of {graph.fused.total()} nodes: "
            + _counts(graph.fused)
        )
    else:
        lines.append("  fused regions: none")
    if graph.bytes_before:
        lines.append(
            f"  bytes read and written: {bytes_text(graph.bytes_before)} by the operators that the "
            f"regions replace, {bytes_text(graph.bytes_after)} by the regions"
        )
    lines += lines_of(graph.row_lists)
    lines += [
        "  steps by form: " + _counts(graph.steps),
        "  results in memory that the kernel allocates, not the plan: "
        + (_counts(graph.functional) or "none"),
    ]
    plan = graph.plan
    if plan:
        lines.append(
            f"  planned memory: {bytes_text(plan['peak_bytes'])} at the peak "
            f"({bytes_text(plan['context_bytes'])} of a call from forward to backward, "
            f"{bytes_text(plan['scratch_bytes'])} of scratch), "
            f"saved for backward {bytes_text(plan['saved_bytes'])}; "
            f"{plan['in_place']} results in place of an input; planned in {plan['plan_ms']:.2f} ms"
        )
        if plan["segments"] > 1:
            lines.append(
                "  gradients are given to autograd as they become ready, in "
                f"{plan['segments']} groups"
            )
    if graph.replays is not None:
        lines.append(f"  CUDA graphs: {graph.replays}")
    if graph.recomputation is not None:
        lines += _recomputation_lines(graph.recomputation, plan)
    rewrites = ", ".join(f"{name} {count}" for name, count, _ in graph.passes if count)
    lines.append(f"  rewrites by pass: {rewrites or 'none'}")
    times = [
        f"{name} {1000 * graph.seconds[name]:.1f} ms"
        for name in COMPILE_STAGES if name in graph.seconds
    ]  # fmt: skip
    lines.append(f"  compile time: {', '.join(times)}")
    return lines


def explain(
    model: Any,
    *inputs: Any,
    options: dict[str, Any] | None = None,
    roofline: bool = False,
    **kwargs: Any,
) -> Report:
    """Compile a model for the engine, run one step, and report what was compiled and what was not.

    `model` is a module or function, called as `model(*inputs, **kwargs)`; `options` are those of
    `torch.compile(model, backend="ort", options=...)`. Backward runs if an output requires grad.
    `.grad` of parameters and inputs stays as it was; buffers such as running statistics are updated
    as in any other step.

    With `roofline=True` more steps are run, in the engine and in eager PyTorch, to compare the time
    of a step with the least time that it can take on this machine, whose peak is measured. These
    steps leave parameters, buffers, inputs and random generators as they were.

    The report lists every graph break and every fallback to eager PyTorch with the line of the
    user's program and the reason, then for each graph its nodes, fused regions, memory plan and
    compile time:

        report = torch_ort.explain(model, torch.randn(32, 64))
        print(report)
        assert not report.breaks and not report.fallbacks

    Raises what the model raises, UserError on an unknown option, and, with TORCH_ORT_STRICT=1,
    errors of the engine. Graph breaks are listed in strict mode as well, and not raised.
    """
    before = counting.counters()
    start = time.perf_counter()
    with (
        watchers.watching() as watched,
        functions_seen() as outside,
        uncaptured.watching() as breaks,
        fallback.watching() as fallbacks,
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
    users = uncaptured.of_users(breaks, bool(graphs))
    report = Report(
        graphs, changes, spent, functions_outside=outside, breaks=users, fallbacks=fallbacks
    )
    if roofline:
        report.roofline = measure(model, compiled, (inputs, kwargs), watched, isa_of(options))
    return report


def _note_bytes(report: GraphReport, program: Program) -> None:
    """Compare the bytes that move with and without regions, by a second plan without them.

    Nodes that both graphs have are left out of both sums.
    """
    graph = program.captured.clone()
    have_run = {name for name, _, _ in program.passes}
    left_out = [each.name for each in _C.passes() if each.for_regions or each.name not in have_run]
    _C.run_pipeline(graph, left_out)
    asked = _C.SessionOptions(parameter_gradients=program.parameter_gradients)
    session = _C.Session.compile(graph, program.constants, asked)
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
        program.recomputation, row_lists(program), replays=replays_of(program.session),
    )  # fmt: skip


def _recomputation_lines(recomputation: Recomputation, plan: dict[str, Any]) -> list[str]:
    planned = recomputation.planned
    saved = sum(num_bytes for *_, num_bytes, _ in planned.made)
    if recomputation.level is not None:
        asked = f"memory_opt_level {recomputation.level}"
        if recomputation.level:
            asked += f", {planned.num_layers} layer(s)"
        first = (
            f"  {asked}: {bytes_text(planned.dense_held_bytes)} saved for backward without "
            f"recomputation; planned {bytes_text(planned.held_bytes)}, "
            f"{bytes_text(planned.peak_bytes)} at the peak of backward; "
            f"planning took {planned.plan_ms:.1f} ms"
        )
    else:
        first = (
            f"  memory budget: {bytes_text(planned.allowed_bytes)} of "
            f"{bytes_text(planned.dense_bytes)} without recomputation; planned "
            f"{bytes_text(planned.peak_bytes)} at the peak of backward, "
            f"{bytes_text(planned.held_bytes)} saved for backward; "
            f"planning took {planned.plan_ms:.1f} ms"
        )
    lines = [
        first,
        f"  recomputed: {len(planned.made)} nodes, so that {bytes_text(saved)} less are saved, in "
        f"about {planned.again_us / 1000:.2f} ms of each step: "
        + (_counts(Counter(op for _, op, *_ in planned.made)) or "none"),
    ]
    lines += [
        f"  recomputed by name: {row['name']}:{row['type']}:{row['count']}, which occurs "
        f"{row['frequency']} times, {bytes_text(row['saved_bytes'])} less saved"
        for row in planned.clusters
        if row["is_on"]
    ]
    if plan:
        off = plan["saved_bytes"] - planned.held_bytes
        sign = "-" if off < 0 else "+"
        lines.append(
            f"  saved for backward by the first step: {bytes_text(plan['saved_bytes'])}, {sign}"
            f"{bytes_text(abs(off))} against the plan"
        )
    return lines


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
