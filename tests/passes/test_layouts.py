"""Which strides a reader counts on: the rule, and that it is verified around each pass."""

from __future__ import annotations

import re

import pytest
from graph_text import read_body

from torch_ort import _C

edit = _C.testing

ATEN = (
    'org.pytorch.aten.ATen <operator = "aten::relu6", overload_name = "", tensor_args = ["self"]>'
)

# Nodes that read t, or what follows it, and whether t may lie in any order.
READERS = {
    "element by element": ("y = Tanh (t)", True),
    "along an axis": ("y = Softmax (t)", True),
    "an operator of PyTorch's": (f"y = {ATEN} (t)", False),
    "a view, and then by its elements": ("v = Transpose <perm = [1, 0]> (t)\ny = Tanh (v)", True),
    "a view, and then an operator": (f"v = Transpose <perm = [1, 0]> (t)\ny = {ATEN} (v)", False),
    "what is joined from it": (f"j = Concat <axis = 0> (t, t)\ny = {ATEN} (j)", True),
    "the caller, through a view": ("y = Transpose <perm = [1, 0]> (t)", False),
    "both": (f"a = {ATEN} (t)\ny = Add (a, t)", False),
    "the border": ("g = com.microsoft.YieldOp (t)\ny = Tanh (g)", False),
}


@pytest.mark.parametrize("case", READERS)
def test_what_takes_any_layout(case: str) -> None:
    nodes, wanted = READERS[case]
    graph = read_body(f"g (float[4,4] x) => (float[4,4] y)\n{{\nt = Exp (x)\n{nodes}\n}}")
    _C.infer_types(graph)
    assert edit.takes_any_layout(graph, "t") == wanted


def graph_with(reader: str, outputs: str = "float[4,4] y") -> _C.Graph:
    """Give a graph in which a node reads a row-major copy of a transposed tensor."""
    graph = read_body(
        f"""
        g (float[4,4] x, bool c) => ({outputs})
        <float[4,4] copy>
        {{
           turned = Transpose <perm = [1, 0]> (x)
           copy = Identity (turned)
           {reader}
        }}
        """
    )
    _C.infer_types(graph)
    assert graph.types()["turned"][2] == [1, 4]
    return graph


COUNTS = {
    "operator": (f"[reader] y = {ATEN} (copy)", "float[4,4] y",
        "node 'reader' counts on the strides of 'turned': got [1,4], want [4,1]"),
    "caller": ("y = Tanh (copy)", "float[4,4] copy, float[4,4] y",
        "output 0 counts on the strides"),
    "body": (
        "[branch] y = If (c) < then_branch = a () => (float[4,4] p) { p = Tanh (copy) },"
        " else_branch = b () => (float[4,4] q) { q = Neg (x) } >",
        "float[4,4] y",
        "node 'branch' counts on the strides of 'turned'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_a_reader_that_counts_on_strides_keeps_them(case: str) -> None:
    reader, outputs, words = COUNTS[case]
    graph = graph_with(reader, outputs)
    counted = edit.CountedStrides(graph)
    counted.verify(graph, "nothing")
    edit.replace_uses(graph, "copy", "turned")
    with pytest.raises(_C.InternalError, match=re.escape(f"verify after drop_copy: {words}")):
        counted.verify(graph, "drop_copy")


@pytest.mark.parametrize("reader", ["y = Tanh (copy)", "y = MatMul (copy, copy)"])
def test_others_read_by_index(reader: str) -> None:
    graph = graph_with(reader)
    counted = edit.CountedStrides(graph)
    edit.replace_uses(graph, "copy", "turned")
    counted.verify(graph, "drop_copy")
    assert graph.nodes()[-1]["inputs"][0] == "turned"


def aten(operator: str) -> str:
    return ATEN.replace("aten::relu6", operator)


def test_an_operator_by_index_takes_a_row_major_value() -> None:
    """Its result is row-major, so it does not follow the strides of the operand."""
    operator = aten("aten::gelu_backward").replace('["self"]', '["grad_output", "self"]')
    graph = graph_with(f"[reader] y = {operator} (turned, x)\n z = Tanh (copy)")
    counted = edit.CountedStrides(graph)
    edit.set_input(graph, "reader", 0, "copy")
    counted.verify(graph, "relayout")


@pytest.mark.parametrize("operator", ["aten::as_strided_copy", "mine::reads_memory"])
def test_others_keep_their_strides(operator: str) -> None:
    graph = graph_with(f"[reader] y = {aten(operator)} (turned)\n z = Tanh (copy)")
    counted = edit.CountedStrides(graph)
    edit.set_input(graph, "reader", 0, "copy")
    words = "node 'reader' counts on the strides of 'copy': got [4,1], want [1,4]"
    with pytest.raises(_C.InternalError, match=re.escape(words)):
        counted.verify(graph, "relayout")


def test_the_type_of_a_view_says_what_it_looks_at() -> None:
    graph = graph_with("[view] v = Transpose <perm = [1, 0]> (copy)\n y = Tanh (v)")
    counted = edit.CountedStrides(graph)
    edit.set_input(graph, "view", 0, "turned")
    words = re.escape("verify after relayout: view 'v': got strides [1,4], want [4,1]")
    with pytest.raises(_C.InternalError, match=words):
        counted.verify(graph, "relayout")


def test_a_node_that_is_new_counts_on_what_it_is_given() -> None:
    graph = graph_with("[last] y = Tanh (copy)")
    counted = edit.CountedStrides(graph)
    edit.insert_before(graph, "last", "Neg", ["turned"], ["turned"], "org.pytorch.aten", "made")
    counted.verify(graph, "write")
    assert "made" in edit.value_names(graph)
