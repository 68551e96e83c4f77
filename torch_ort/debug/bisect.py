"""Finds the rewrite, kernel or part of the memory plan that makes a graph's numbers wrong."""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort import _C
from torch_ort.debug.numbers import Difference, Results, differences, names_of, with_noise
from torch_ort.engine import compiler
from torch_ort.engine.passes import asked_of_passes, disabled_passes
from torch_ort.engine.program import Program
from torch_ort.options import Options, resolve
from torch_ort.pytorch.generators import TorchGenerators

_PLAN_SWITCHES = ("reorder", "in_place", "place_parts")
_PLAINEST = (*_PLAN_SWITCHES, "products")
_SEED = 20


@dataclass
class Finding:
    """What makes the numbers of a graph wrong for the inputs of one call; prints as text."""

    graph: int  # number of the program, as in dumps; -1: more than one
    cause: str  # "pass", "kernel", "plan" or "capture"
    name: str  # of the pass, of the region, or of the switch without which the numbers are right
    differences: list[Difference]
    rewrite: int = 0  # of a pass: which of `num_rewrites`, counted as by TORCH_ORT_BISECT
    num_rewrites: int = 0
    nodes: list[str] = field(default_factory=list)  # nodes that the rewrite wrote, with their lines
    # The first value that differs, among those that the graphs before and after both have.
    value: str = ""
    message: str = ""  # of TORCH_ORT_CHECK=3, about a kernel
    folder: str = ""

    def __str__(self) -> str:
        if self.cause == "capture":
            return (
                f"torch_ort: results differ from eager PyTorch's:\n{names_of(self.differences)}\n"
                "each graph gives what its nodes give: the capture is at fault, or a conversion."
            )
        lines = [f"torch_ort: graph {self.graph} gives wrong numbers:", names_of(self.differences)]
        if self.cause == "pass":
            lines.append(
                f"rewrite {self.rewrite} of {self.num_rewrites} makes them wrong, of pass "
                f"{self.name} (TORCH_ORT_BISECT={self.rewrite - 1} leaves it out). It wrote:"
            )
        elif self.cause == "kernel" and self.name == "products":
            lines.append("TORCH_ORT_DISABLE=products makes them right: the products are at fault.")
        elif self.cause == "kernel":
            lines.append(f"the kernel of region '{self.name}' makes them wrong: {self.message}")
            lines.append("TORCH_ORT_DISABLE=region_kernels leaves all such kernels out.")
        else:
            lines.append(f"TORCH_ORT_DISABLE={self.name} makes them right: the plan is at fault.")
        lines += [f"  {node}" for node in self.nodes]
        if self.value:
            lines.append(f"the first value that differs: '{self.value}'")
        if self.folder:
            lines.append(f"to see it again: python -m torch_ort.debug --again {self.folder}")
        return "\n".join(lines)


@dataclass
class Case:
    """A captured graph with the inputs of one call, which can be run in many ways."""

    program: Program
    options: Options
    inputs: dict[str, torch.Tensor]  # including symbols, and the gradients of outputs

    def rewritten(self, count: int) -> tuple[_C.Graph, list[tuple[str, int]]]:
        """Give the graph after so many rewrites (-1: all), and how many each pass made.

        Masks are drawn as PyTorch draws them, so that all graphs draw the same.
        """
        graph = self.program.captured.clone()
        options = dataclasses.replace(self.options, exact_random=True)
        disabled = disabled_passes(options)
        reports = _C.run_pipeline(graph, disabled, count, **asked_of_passes(options))
        optional = {each.name for each in _C.passes() if not each.is_needed}
        return graph, [(name, made) for name, made, _ in reports if name in optional]

    def run(
        self, graph: _C.Graph, *, inputs: Mapping[str, torch.Tensor] | None = None,
        disable: tuple[str, ...] = (), check: int = 0,
    ) -> Results:  # fmt: skip
        """Run a graph; give its results, gradients among them, by name."""
        program = dataclasses.replace(self.program, graph=graph, parameter_gradients=[])
        switched_off = (*self.options.disable, *disable)
        options = dataclasses.replace(self.options, disable=switched_off, check=check)
        session = compiler.compile_session(program, options)
        given = {name: x.detach().clone() for name, x in (inputs or self.inputs).items()}
        state = TorchGenerators()
        try:
            torch.manual_seed(_SEED)
            return session.run(given)
        finally:
            state.restore()

    def run_nodes(self, inputs: Mapping[str, torch.Tensor] | None = None) -> Results:
        """Run each node of the captured graph by PyTorch's own kernels, nothing in place."""
        graph, _ = self.rewritten(0)
        return self.run(graph, inputs=inputs, disable=_PLAINEST)


def find(case: Case) -> Finding | None:
    """Give what makes the numbers of a case wrong; None if they are right."""
    want = case.run_nodes()
    noisy = case.run_nodes(with_noise(case.inputs))

    def wrong(graph: _C.Graph, **how: Any) -> list[Difference]:
        return differences(case.run(graph, **how), want, noisy)

    def right_without(graph: _C.Graph) -> str:
        for switches in (*((name,) for name in _PLAN_SWITCHES), _PLAN_SWITCHES):
            if not wrong(graph, disable=switches):
                return ",".join(switches)
        return ""

    whole, counts = case.rewritten(-1)
    found = wrong(whole)
    if not found:
        return None
    number = case.program.number
    total = sum(made for _, made in counts)
    bare, _ = case.rewritten(0)
    at_fault = _kernel_at_fault(case, whole, Finding(number, "kernel", "", found))
    if at_fault is not None:
        return at_fault
    if not wrong(whole, disable=("products",)):
        return Finding(number, "kernel", "products", found)
    for graph in (bare, whole):
        if (graph is whole or wrong(graph)) and (switch := right_without(graph)):
            return Finding(number, "plan", switch, found)
    # Without rewrites the numbers are right, with all of them they are wrong.
    count = bisect_left(
        range(total), True, min(1, total), key=lambda n: bool(wrong(case.rewritten(n)[0]))
    )
    before, after = case.rewritten(count - 1)[0], case.rewritten(count)[0]
    return Finding(
        number, "pass", _pass_of(count, counts), found, count, total, _written(before, after),
        _first_value(case, before, after),
    )  # fmt: skip


def _pass_of(count: int, counts: list[tuple[str, int]]) -> str:
    for name, made in counts:
        if count <= made:
            return name
        count -= made
    raise AssertionError("a rewrite is one of a pass")


def _written(before: _C.Graph, after: _C.Graph) -> list[str]:
    """List the nodes that only the second graph has."""
    old = {_node_key(node) for node in before.nodes()}
    lines = []
    for node in after.nodes():
        if _node_key(node) not in old:
            origin = f" ({node['origin']})" if node["origin"] else ""
            op = f"{node['domain']}.{node['op']}".lstrip(".")
            lines.append(f"{node['name']} = {op}({', '.join(node['inputs'])}){origin}")
    return lines


def _node_key(node: dict[str, Any]) -> tuple[Any, ...]:
    return (node["name"], node["op"], tuple(node["inputs"]), tuple(node["outputs"]))


def _kernel_at_fault(case: Case, graph: _C.Graph, finding: Finding) -> Finding | None:
    """Name the first region whose kernel differs from its nodes; None where none does."""
    try:
        case.run(graph, check=3)
    except _C.InternalError as error:
        return dataclasses.replace(finding, message=str(error), name=str(error).split("'")[1])
    return None


def _first_value(case: Case, before: _C.Graph, after: _C.Graph) -> str:
    """Name the first value, in the order of the second graph, that the graphs disagree on."""
    known = {name for node in before.nodes() for name in node["outputs"]}
    shared = [name for node in after.nodes() for name in node["outputs"] if name in known]
    one, other = before.clone(), after.clone()
    outputs = set(before.output_names)
    for name in shared:
        if name and name not in outputs:
            _C.testing.add_output(one, name)
            _C.testing.add_output(other, name)
    want = case.run(one)
    noisy = case.run(one, inputs=with_noise(case.inputs))
    got = case.run(other)
    wrong = {each.name for each in differences(got, want, noisy)}
    return next((name for name in shared if name in wrong), "")


# The folder that reproduces a finding.


def write(case: Case, finding: Finding, folder: str) -> None:
    """Write the graphs on both sides of a finding, the inputs, and what was found."""
    os.makedirs(folder, exist_ok=True)
    if finding.cause == "pass":
        before, after = (case.rewritten(finding.rewrite - i)[0] for i in (1, 0))
    else:
        before, after = (case.rewritten(count)[0] for count in (0, -1))
    for name, graph in (("before", before), ("after", after)):
        with open(os.path.join(folder, f"{name}.onnx"), "wb") as file:
            file.write(graph.to_onnx(_C.required_opset(graph)))
        with open(os.path.join(folder, f"{name}.onnxtxt"), "w", encoding="utf-8") as file:
            file.write(compiler.onnx_text(graph))
    torch.save(
        {"inputs": case.inputs, "constants": dict(case.program.constants)},
        os.path.join(folder, "inputs.pt"),
    )
    finding.folder = folder
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
        file.write(_PAGE.format(finding=finding))


_PAGE = """\
# Numbers that differ

```
{finding}
```

`before.onnx` gives the right numbers, `after.onnx` the wrong ones; `.onnxtxt` are the same as text.
`inputs.pt` holds the inputs of the call by name (`torch.load(path, weights_only=True)`).
"""


def again(folder: str) -> list[Difference]:
    """Run both graphs of a folder; list what differs. Raises FileNotFoundError without a folder."""
    held = torch.load(os.path.join(folder, "inputs.pt"), weights_only=True)
    program = Program(graph=None, constants=held["constants"], is_training=True)
    case = Case(program, resolve(), held["inputs"])
    graphs = []
    for name in ("before", "after"):
        with open(os.path.join(folder, f"{name}.onnx"), "rb") as file:
            graphs.append(_C.Graph.from_onnx(file.read()))
    want = case.run(graphs[0], disable=_PLAINEST)
    noisy = case.run(graphs[0], inputs=with_noise(case.inputs), disable=_PLAINEST)
    return differences(case.run(graphs[1]), want, noisy)
