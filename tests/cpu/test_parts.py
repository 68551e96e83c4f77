"""Concatenations whose parts are made where they lie in the whole: unequal ones too."""

from __future__ import annotations

import re

import onnx.parser
import pytest
import regions
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_ort import _C


def session_of(graph: _C.Graph, place_parts: bool = True, isa: str = "") -> _C.Session:
    fused = regions.fuse(graph)
    return _C.Session.compile(
        fused, {}, _C.SessionOptions(verify=True, place_parts=place_parts, isa=isa)
    )


def parts_of(session: _C.Session, whole: str) -> set[str]:
    return {row["name"] for row in session.plan_table() if row["shares"] == whole}


def graph_of(nodes: list[str], outputs: tuple[str, ...], inputs: dict[str, str]) -> _C.Graph:
    return regions.read(inputs, nodes, outputs, ["int64[1] front = {0}", "int64[1] back = {-1}"])


UNEQUAL = {"x": "float[A,B,C]", "z": "float[A,D,C]"}
SIZES = [(2, 3, 5, 8), (1, 1, 1, 1), (3, 70, 2, 33), (2, 0, 3, 4), (0, 2, 1, 4), (2, 3, 1, 5000)]


@pytest.mark.parametrize("dtype", regions.REAL)
@pytest.mark.parametrize("isa", regions.ISAS)
def test_unequal_parts_of_symbolic_sizes(isa: str, dtype: torch.dtype) -> None:
    """Regions of different sizes, which are symbols, each write into the whole."""
    name = regions.NAMES[dtype]
    inputs = {"x": f"{name}[A,B,C]", "z": f"{name}[A,D,C]"}
    nodes = [
        "a = Exp (x)", "p = Mul (a, x)", "b = Tanh (z)", "q = Add (b, z)",
        "whole = Concat <axis = 1> (p, q)", "y = MatMul (whole, w)",
    ]  # fmt: skip
    session = session_of(graph_of(nodes, ("y",), {**inputs, "w": f"{name}[C,C]"}), isa=isa)
    for a, b, d, c in SIZES:
        if dtype != torch.float64 and c > 1000:
            continue  # sums of products round by their number
        x, z, w = torch.randn(a, b, c), torch.randn(a, d, c), torch.eye(c)
        x, z, w = x.to(dtype), z.to(dtype), w.to(dtype)
        got = session.run({"x": x, "z": z, "w": w})["y"]
        wide = x.double(), z.double()
        want = torch.cat([wide[0].exp() * wide[0], wide[1].tanh() + wide[1]], 1)
        regions.assert_near(got, want, atol=10 * regions.TOLERANCE[dtype])
        made = {name for name in parts_of(session, "whole") if "_to_" in name}  # regions
        assert made == {name for name, size in (("a_to_p", b), ("b_to_q", d)) if a * size * c}


def test_no_step_is_left_of_the_concatenation() -> None:
    nodes = ["p = Exp (x)", "q = Tanh (z)", "whole = Concat <axis = 1> (p, q)"]
    graph = graph_of([*nodes, "y = Softmax (whole)"], ("y",), UNEQUAL)
    with_parts, without = session_of(graph), session_of(graph, place_parts=False)
    inputs = {"x": torch.randn(2, 3, 4), "z": torch.randn(2, 5, 4)}
    assert torch.equal(with_parts.run(inputs)["y"], without.run(inputs)["y"])
    assert without.plan_report()["steps_forward"] == with_parts.plan_report()["steps_forward"] + 1
    assert without.plan_report()["peak_bytes"] > with_parts.plan_report()["peak_bytes"]
    assert parts_of(without, "whole") == set()


def test_what_comes_from_elsewhere_is_copied() -> None:
    """Key caches: what was there before is an input, what is new is made in place; both leave."""
    nodes = ["new = Exp (x)", "whole = Concat <axis = 1> (z, new)"]
    session = session_of(graph_of(nodes, ("whole",), UNEQUAL))
    wholes = []
    for length in (1, 5, 0):
        x, z = torch.randn(2, 3, 4), torch.randn(2, length, 4)
        wholes.append((session.run({"x": x, "z": z})["whole"], torch.cat([z, x.exp()], 1)))
        assert parts_of(session, "whole") == {"new"}
    for got, want in wholes:  # each call has given memory of its own
        torch.testing.assert_close(got, want)


def test_parts_behind_views() -> None:
    """A stack in the order of a later copy: views turn, split and join dims."""
    nodes = [
        "p = Exp (x)", "q = Tanh (z)", "pt = Transpose <perm = [1, 0, 2]> (p)",
        "qt = Transpose <perm = [1, 0, 2]> (q)", "pu = Unsqueeze (pt, front)",
        "qu = Unsqueeze (qt, front)", "whole = Concat <axis = 0> (pu, qu)",
        "y = Softmax (whole)",
    ]  # fmt: skip
    graph = graph_of(nodes, ("y",), dict.fromkeys(("x", "z"), "float[A,B,C]"))
    session = session_of(graph)
    x, z = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    got = session.run({"x": x, "z": z})["y"]
    want = torch.stack([x.exp().transpose(0, 1), z.tanh().transpose(0, 1)]).softmax(-1)
    torch.testing.assert_close(got, want)
    assert parts_of(session, "whole") == {"p", "q", "pt", "qt", "pu", "qu"}


@pytest.mark.parametrize(
    ("nodes", "outputs", "parts"),
    [
        # it leaves by itself as well
        (["p = Exp (x)", "whole = Concat <axis = 1> (p, z)", "y = Neg (whole)"], ("y", "p"), set()),
        # twice in one whole, and in two of them
        (["p = Exp (x)", "whole = Concat <axis = 1> (p, p, z)", "y = Neg (whole)"], ("y",), {"p"}),
        (["p = Exp (x)", "whole = Concat <axis = 1> (p, z)", "other = Concat <axis = 1> (z, p)",
         "y = Neg (whole)", "v = Neg (other)"], ("y", "v"), {"p"}),
        # a product wants dense memory
        (["p = Exp (x)", "v = MatMul (p, w)", "whole = Concat <axis = 1> (p, z)",
         "y = Neg (whole)"], ("y", "v"), set()),
        # of another kernel
        (["p = MatMul (x, w)", "whole = Concat <axis = 1> (p, z)", "y = Neg (whole)"], ("y",),
         set()),
        # a whole in a whole
        (["p = Exp (x)", "inner = Concat <axis = 1> (p, z)", "whole = Concat <axis = 1> (inner, z)",
         "y = Neg (whole)"], ("y", ), set()),
        # an alias that sees a part of it
        (["p = Exp (x)", "some = Slice (p, front, one)", "v = Neg (some)",
         "whole = Concat <axis = 1> (p, z)", "y = Neg (whole)"], ("y", "v"), set()),
    ],
)  # fmt: skip
def test_who_becomes_a_part(nodes: list[str], outputs: tuple[str, ...], parts: set[str]) -> None:
    words = set(re.findall(r"\w+", " ".join(nodes)))
    inputs = {**UNEQUAL, "w": "float[C,C]"}
    inputs = {name: text for name, text in inputs.items() if name in words}
    constants = ["int64[1] front = {0}", "int64[1] one = {1}"]
    graph = regions.read(inputs, nodes, outputs, constants)
    values = {
        "x": torch.randn(2, 3, 4), "z": torch.randn(2, 5, 4), "w": torch.randn(4, 4)
    }  # fmt: skip
    values = {name: values[name] for name in inputs}
    sessions = [session_of(graph, place) for place in (True, False)]
    got, want = (session.run(values) for session in sessions)
    for name in outputs:
        assert torch.equal(got[name], want[name])
    assert parts_of(sessions[0], "whole") == parts


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Write a model of point-wise nodes, views and concatenations; half of them train."""
    shapes = {"x": (4, 4), "w": (4, 4)}

    def nodes(prefix: str, count: int) -> list[str]:
        lines = []
        for number in range(count):
            name, one = f"{prefix}{number}", draw(st.sampled_from(sorted(shapes)))
            kind = draw(st.sampled_from(("unary", "unary", "concat", "concat", "turn", "binary")))
            if kind == "concat":
                axis = draw(st.integers(0, 1))
                fitting = [
                    other for other, shape in shapes.items()
                    if shape[1 - axis] == shapes[one][1 - axis]
                ]  # fmt: skip
                parts = [one, *draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=2))]
                size = sum(shapes[part][axis] for part in parts)
                other = shapes[one][1 - axis]
                shapes[name] = (size, other) if axis == 0 else (other, size)
                lines.append(f"{name} = Concat <axis = {axis}> ({', '.join(parts)})")
            elif kind == "turn":
                shapes[name] = shapes[one][::-1]
                lines.append(f"{name} = Transpose <perm = [1, 0]> ({one})")
            elif kind == "binary":
                same = [other for other, shape in shapes.items() if shape == shapes[one]]
                shapes[name] = shapes[one]
                lines.append(f"{name} = Add ({one}, {draw(st.sampled_from(same))})")
            else:
                shapes[name] = shapes[one]
                op = draw(st.sampled_from(("Exp", "Tanh", "Neg", "Softmax")))
                lines.append(f"{name} = {op} ({one})")
        return lines

    lines = nodes("f", draw(st.integers(2, 12)))
    made = [name for name in shapes if name.startswith("f")]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        gradients = [f"d{name}" for name in outputs]
        lines.append(f"{', '.join(gradients)} = com.microsoft.YieldOp ({', '.join(outputs)})")
        shapes.update({f"d{name}": shapes[name] for name in outputs})
        lines += nodes("b", draw(st.integers(2, 8)))
        made = [name for name in shapes if name.startswith("b")]
        outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    results = ", ".join(f"float[{shapes[n][0]},{shapes[n][1]}] {n}" for n in outputs)
    body = "\n".join(lines)
    return f"{regions.HEAD} g (float[4,4] x, float[4,4] w) => ({results}) {{ {body} }}"


def run_all(session: _C.Session, inputs: dict[str, Tensor]) -> list[Tensor]:
    if not session.is_training:
        return list(session.run(inputs).values())
    *outputs, token = _C.run_forward(session.id, list(inputs.values()), [], False)
    saved = [list(inputs.values())[i] for i in session.saved_inputs]
    saved += [outputs[i] for i in session.saved_outputs]
    tangents = [torch.cos(output) for output in outputs]
    return [*outputs, *_C.run_backward(token, saved, tangents)]


@settings(max_examples=200, deadline=None)
@given(programs())
def test_random_graphs_with_and_without_parts(text: str) -> None:
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    _C.infer_types(graph)
    _C.run_pass("replay_views", graph)
    inputs = {name: torch.randn(4, 4) for name in ("x", "w")}
    sessions = [session_of(graph, place) for place in (True, False)]
    for _ in range(2):  # the second call runs in contexts of the first
        got, want = (run_all(session, inputs) for session in sessions)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
