"""Random graphs: the pipeline changes no bit of any result; no two results share memory by it."""

from __future__ import annotations

import itertools

import onnx.parser
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

UNARY = ("Exp", "Tanh", "Neg", "Relu", "Identity", "Identity", "Transpose")
BINARY = ("Add", "Mul", "Sub")
SIZE = 4  # every value is SIZE x SIZE, so that any op takes any value


@st.composite
def node_lines(draw: st.DrawFn, names: list[str], prefix: str, count: int) -> list[str]:
    """Write nodes that read earlier values; `names` grows by their results."""
    lines = []
    for number in range(count):
        name, earlier = f"{prefix}{number}", st.sampled_from(names)
        kind = draw(
            st.sampled_from(("unary", "unary", "binary", "dropout", "constant", "reshape", "write"))
        )
        if kind == "unary":
            line = f"{draw(st.sampled_from(UNARY))} ({draw(earlier)})"
        elif kind == "binary":
            line = f"{draw(st.sampled_from(BINARY))} ({draw(earlier)}, {draw(earlier)})"
        elif kind == "dropout":
            line = f"Dropout ({draw(earlier)}, ratio, training)"
        elif kind == "reshape":
            lines.append(f"flat_{name} = Reshape ({draw(earlier)}, flat)")
            line = f"Reshape (flat_{name}, size)"
        elif kind == "constant":
            line = "ConstantOfShape <value = float[1] {0.5}> (size)"
        else:
            line = (
                'org.pytorch.aten.ATen <operator = "aten::erfc", overload_name = "", '
                f'tensor_args = ["self"]> ({draw(earlier)})'
            )
        lines.append(f"{name} = {line}")
        names.append(name)
    return lines


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Write a model; half of them have a backward half."""
    names = ["x", "w"]
    lines = draw(node_lines(names, "f", draw(st.integers(1, 12))))
    made = names[2:]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        gradients = [f"d{name}" for name in outputs]
        lines.append(f"{', '.join(gradients)} = com.microsoft.YieldOp ({', '.join(outputs)})")
        names.extend(gradients)
        lines += draw(node_lines(names, "b", draw(st.integers(1, 8))))
        made = [name for name in names if name.startswith("b")]
        outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    body = "\n".join(lines)
    matrix = f"float[{SIZE},{SIZE}]"
    results = ", ".join(f"{matrix} {name}" for name in outputs)
    # Of an ATen node, no rule tells the type.
    inner = ", ".join(f"{matrix} {name}" for name in names[2:] if name not in outputs)
    types = f", {inner}" if inner else ""
    return f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1]>
        random ({matrix} x, {matrix} w) => ({results})
        <float ratio = {{0.5}}, bool training = {{1}}, int64[1] flat = {{-1}},
         int64[2] size = {{{SIZE}, {SIZE}}}{types}>
        {{ {body} }}
    """


def run(graph: _C.Graph) -> tuple[list[torch.Tensor], set[tuple[int, int]]]:
    """Give the results, and which of them share memory with which inputs (-1, -2) and results."""
    names = list(graph.input_names)
    for node in graph.nodes():
        if node["op"] == "YieldOp":
            names += node["outputs"]
    torch.manual_seed(1)
    inputs = {name: torch.randn(SIZE, SIZE) for name in names}
    results = list(_C.run(graph, inputs).values())
    places = [result.untyped_storage().data_ptr() for result in results]
    sharing = {
        (i, j) for i, j in itertools.combinations(range(len(places)), 2) if places[i] == places[j]
    }
    for number, tensor in enumerate(inputs.values(), start=1):
        place = tensor.untyped_storage().data_ptr()
        sharing |= {(-number, i) for i in range(len(places)) if places[i] == place}
    return results, sharing


def views(graph: _C.Graph) -> set[tuple[int, int]]:
    """Give the pairs of results that the program itself makes views of one value."""
    viewed = {
        name: node["inputs"][0]
        for node in graph.nodes()
        for name in node["outputs"]
        if node["op"] in ("Identity", "Transpose", "Reshape")
    }

    def root(name: str) -> str:
        return root(viewed[name]) if name in viewed else name

    roots = [root(name) for name in results_of(graph)]
    return {(i, j) for i, j in itertools.combinations(range(len(roots)), 2) if roots[i] == roots[j]}


def results_of(graph: _C.Graph) -> list[str]:
    """Name the results in the order in which a run gives them: those of forward come first."""
    saved = [name for node in graph.nodes() if node["op"] == "YieldOp" for name in node["inputs"]]
    return [*saved, *graph.output_names]


# These compute the same numbers in another way; all others change no bit.
ROUNDS = [each.name for each in _C.passes() if each.rounds_elsewhere]
DRAWS = [each.name for each in _C.passes() if each.not_with == "exact_random"]


@settings(max_examples=150, deadline=None)
@given(text=programs())
def test_pipeline_keeps_results_apart_and_equal(text: str) -> None:
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    _C.infer_types(graph)
    before = graph.clone()
    want, sharing = run(before)
    # Results that are views of one value share its memory, unless backward reads the value too.
    without_dead = graph.clone()
    _C.run_pass("remove_dead", without_dead)
    sharing |= run(without_dead)[1] | views(graph)

    after = graph.clone()
    _C.run_pipeline(after, disabled=ROUNDS, check=2)
    got, sharing_after = run(after)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert sharing_after <= sharing

    smaller = graph.clone()
    # Views that both halves read are made twice.
    _C.run_pipeline(smaller, disabled=[*ROUNDS, "replay_views"], check=2)
    assert smaller.num_nodes <= before.num_nodes

    fused = graph.clone()
    _C.run_pipeline(fused, disabled=DRAWS, check=2)
    got, sharing_after = run(fused)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert sharing_after <= sharing

    for each in _C.passes():
        once = graph.clone()
        _C.run_pass(each.name, once)
        # What moves values between the halves weighs estimates, which its own rewrites change.
        if each.moves_border:
            _C.run_pass(each.name, once)
        assert _C.run_pass(each.name, once) == 0, each.name
