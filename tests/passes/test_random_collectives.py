"""Random graphs that communicate: moving and joining collectives changes no result.

The group of ranks is one that spoils results until they are waited for, and reads operands then.
"""

from __future__ import annotations

import onnx.parser
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from late_group import NAME, late_group

from torch_ort import _C

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

SIZE = 4
MATRIX, GATHERED = f"float[{SIZE},{SIZE}]", f"float[{2 * SIZE},{SIZE}]"
SPEEDS = {"float32": 1e11, "float64": 5e10, "bfloat16": 1e11}, 1e10
BUDGETS = [_C.Budget(share, True, *SPEEDS) for share in (0.9, 0.7, 0.4)]
PASSES = ("join_collectives", "bucket_collectives", "overlap_collectives")


def call(operator: str, tensor: str, rest: str = "") -> str:
    return (
        f'org.pytorch.aten.ATen <operator = "{operator}", overload_name = "", effects = 1, '
        f'tensor_args = ["{tensor}"]{rest}>'
    )


def start(name: str, rest: str = "") -> str:
    return call(f"_c10d_functional::{name}", "input", f'{rest}, group_name = "{NAME}"')


WAIT = call("_c10d_functional::wait_tensor", "tensor")


@st.composite
def node_lines(
    draw: st.DrawFn, names: list[str], types: dict[str, str], prefix: str, count: int
) -> list[str]:
    """Write nodes that read earlier values; `names` grows by those that are matrices."""
    lines, late = [], []

    def add(name: str, line: str, kind: str = MATRIX) -> None:
        lines.append(f"{name} = {line}")
        types[name] = kind

    for number in range(count):
        name, earlier = f"{prefix}{number}", draw(st.sampled_from(names))
        kind = draw(st.sampled_from(("sum", "sum", "gather", "scatter", "unary", "add", "matmul")))
        if kind == "sum":
            how = draw(st.sampled_from(("sum", "sum", "max")))
            add(f"{name}_flying", f"{start('all_reduce', f', reduce_op = {how!r}')} ({earlier})")
            lines[-1] = lines[-1].replace("'", '"')
            if draw(st.booleans()):  # somebody waits at the end of the half
                late.append(name)
                continue
            add(name, f"{WAIT} ({name}_flying)")
        elif kind == "gather":
            gather = start("all_gather_into_tensor", ", group_size = 2")
            add(f"{name}_flying", f"{gather} ({earlier})", GATHERED)
            add(f"{name}_all", f"{WAIT} ({name}_flying)", GATHERED)
            add(name, f"Slice ({name}_all, zero, four, zero)")
        elif kind == "scatter":
            add(f"{name}_both", f"Concat <axis = 0> ({earlier}, {earlier})", GATHERED)
            scatter = start("reduce_scatter_tensor", ', reduce_op = "sum", group_size = 2')
            add(f"{name}_flying", f"{scatter} ({name}_both)")
            add(name, f"{WAIT} ({name}_flying)")
        elif kind == "add":
            add(name, f"Add ({earlier}, {draw(st.sampled_from(names))})")
        elif kind == "matmul":
            add(f"{name}_product", f"MatMul ({earlier}, {draw(st.sampled_from(names))})")
            add(name, f"Tanh ({name}_product)")
        else:
            add(name, f"{draw(st.sampled_from(('Tanh', 'Neg', 'Relu')))} ({earlier})")
        names.append(name)
    for name in late:
        add(name, f"{WAIT} ({name}_flying)")
        names.append(name)
    return lines


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Write a model; half of them have a backward half."""
    names, types = ["x", "w"], {}
    lines = draw(node_lines(names, types, "f", draw(st.integers(1, 12))))
    outputs = draw(st.lists(st.sampled_from(names[2:]), min_size=1, max_size=4, unique=True))
    if draw(st.booleans()):
        gradients = [f"d{name}" for name in outputs]
        lines.append(f"{', '.join(gradients)} = com.microsoft.YieldOp ({', '.join(outputs)})")
        types |= dict.fromkeys(gradients, MATRIX)
        names.extend(gradients)
        lines += draw(node_lines(names, types, "b", draw(st.integers(1, 10))))
        made = [name for name in names if name.startswith("b")]
        outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True))
    inner = "".join(f", {kind} {name}" for name, kind in types.items() if name not in outputs)
    results = ", ".join(f"{MATRIX} {name}" for name in outputs)
    body = "\n".join(lines)
    return f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1]>
        random ({MATRIX} x, {MATRIX} w) => ({results})
        <int64[1] zero = {{0}}, int64[1] four = {{4}}{inner}>
        {{ {body} }}
    """


def run(graph: _C.Graph) -> list[torch.Tensor]:
    names = list(graph.input_names)
    for node in graph.nodes():
        if node["op"] == "YieldOp":
            names += node["outputs"]
    torch.manual_seed(1)
    inputs = {name: torch.randn(SIZE, SIZE) / 4 for name in names}
    return list(_C.run(graph, inputs).values())


@settings(max_examples=200, deadline=None)
@given(text=programs())
def test_results_are_kept(text: str) -> None:
    model = onnx.parser.parse_model(text).SerializeToString()
    graph = _C.Graph.from_onnx(model, allow=["_c10d_functional"])
    with late_group():
        want = run(graph.clone())
        changed = graph.clone()
        for name in PASSES:
            _C.run_pass(name, changed)
            changed.verify(name)
            assert _C.run_pass(name, changed) == 0, name
            for ours, theirs in zip(run(changed.clone()), want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for budget in (None, *BUDGETS):
            whole = graph.clone()
            try:
                _C.run_pipeline(whole, check=2, budget=budget)
            except _C.UserError as error:
                assert "too small for this graph" in str(error)  # noqa: PT017
                continue
            for ours, theirs in zip(run(whole), want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
