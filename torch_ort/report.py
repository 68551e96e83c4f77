"""What the compiler did with a model: `torch_ort.explain`."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort import counting
from torch_ort.capture.aot_compat import pytree
from torch_ort.compiler import Program

# Dynamo until it calls the backend, AOTAutograd's tracing, reading of its graph, and so on. Missing
# is what an equal graph, or an earlier one of the same capture, has done already.
COMPILE_STAGES = ("dynamo", "aot", "read", "passes", "plan")

_watchers: list[list[Program]] = []


def note(programs: list[Program]) -> None:
    """Tell whoever is watching that graphs were compiled."""
    for watcher in _watchers:
        watcher.extend(programs)


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


@dataclass
class Report:
    """Everything that `explain` found; prints as a table."""

    graphs: list[GraphReport] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    first_step_seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"torch_ort: {len(self.graphs)} graph(s), first step {self.first_step_seconds:.2f} s, "
            f"fallbacks {self.counters.get('fallbacks', 0)}"
        ]
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
            lines.append("  steps: " + _counts(graph.steps))
            lines.append("  results made by the kernel: " + (_counts(graph.functional) or "none"))
            plan = graph.plan
            if plan:
                lines.append(
                    f"  memory: peak {_bytes(plan['peak_bytes'])} "
                    f"(context {_bytes(plan['context_bytes'])}, "
                    f"scratch {_bytes(plan['scratch_bytes'])}), "
                    f"saved for backward {_bytes(plan['saved_bytes'])}, "
                    f"in place {plan['in_place']}, planned in {plan['plan_ms']:.2f} ms"
                )
            rewrites = ", ".join(f"{name} {count}" for name, count, _ in graph.passes if count)
            lines.append(f"  rewrites: {rewrites or 'none'}")
            times = [
                f"{name} {1000 * graph.seconds[name]:.1f} ms"
                for name in COMPILE_STAGES if name in graph.seconds
            ]  # fmt: skip
            lines.append(f"  compile time: {', '.join(times)}")
        return "\n".join(lines)


def explain(
    model: Any, *inputs: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Compile `model` for `inputs`, run one step, and report.

    Backward runs if an output asks for it.
    The model's gradients are left as they were; buffers such as running statistics are updated as a
    step updates them. Raises what the model raises, and engine errors when TORCH_ORT_STRICT=1.
    """
    watched: list[Program] = []
    _watchers.append(watched)
    before = counting.counters()
    start = time.perf_counter()
    try:
        compiled = torch.compile(model, backend=_fresh_backend(options))
        result = compiled(*inputs, **kwargs)
        _backward(model, result)
    finally:
        _watchers.remove(watched)
    spent = time.perf_counter() - start
    after = counting.counters()
    changes = {name: after[name] - before.get(name, 0) for name in after}
    return Report([_describe(program) for program in watched], changes, spent)


def _fresh_backend(options: dict[str, Any] | None) -> Any:
    """The backend as an object of its own: Dynamo gives nothing that it has compiled before."""
    from torch_ort.backend import ort

    backend = functools.partial(ort, options=options)
    backend.reset = ort.reset
    return backend


def _backward(model: Any, result: Any) -> None:
    outputs = [
        leaf for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point()
    ]  # fmt: skip
    parameters = [p for p in getattr(model, "parameters", list)() if p.requires_grad]
    if outputs and parameters:
        total = sum(output.float().sum() for output in outputs)
        torch.autograd.grad(total, parameters, allow_unused=True)


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
    )  # fmt: skip


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
