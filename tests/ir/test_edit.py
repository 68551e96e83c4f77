# The edit verbs: what each does, and that any sequence of them leaves a legal graph.
from __future__ import annotations

import pytest
from graph_text import lines, read_body, show
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

edit = _C.testing

CHAIN = """
g (float[N,4] x, float[4] b) => (float[N,4] y)
<float[N,4] s, float[N,4] t>
{
   [add] s = Add (x, b)
   [gelu] t = Gelu (s)
   [mul] y = Mul (t, s)
}
"""

SUBGRAPH = """
g (bool c, float[4] x) => (float[4] y)
<float[4] a>
{
   a = Neg (x)
   [branch] y = If (c) <
     then_branch = yes () => (float[4] p) { p = Relu (a) },
     else_branch = no () => (float[4] q) {
        q = If (c) <
          then_branch = deep () => (float[4] r) { r = Add (a, x) },
          else_branch = deep2 () => (float[4] u) { u = Identity (a) }
        >
     }
   >
}
"""


def test_insert_before_names_and_connects() -> None:
    graph = read_body(CHAIN)
    outputs = edit.insert_before(graph, "gelu", "Split", ["s", None], ["s", "t"], hint="parts")
    assert outputs == ["parts", "parts_1"]
    assert lines(graph)[1] == "parts, parts_1 = Split(s, )"
    assert graph.types()["parts_1"] == ("float32", ["N", 4], None, "cpu")
    graph.verify()


def test_names_are_made_unique() -> None:
    graph = read_body(CHAIN)
    names = [edit.insert_before(graph, "gelu", "Neg", ["s"], ["s"])[0] for _ in range(3)]
    assert names == ["Neg", "Neg_1", "Neg_2"]
    assert edit.insert_before(graph, "gelu", "Neg", ["s"], ["s"], hint="x") == ["x_1"]
    graph.verify()


def test_insert_before_takes_origin_and_tags() -> None:
    import onnx

    model = onnx.ModelProto.FromString(read_body(CHAIN).to_onnx())
    for key, value in {"origin": "model.py:7", "recompute": "must_save", "checkpoint": "3"}.items():
        model.graph.node[1].metadata_props.add(key=key, value=value)
    graph = _C.Graph.from_onnx(model.SerializeToString())
    edit.insert_before(graph, "gelu", "Neg", ["s"], ["s"], hint="n")
    node = graph.nodes()[1]
    assert (node["name"], node["origin"], node["recompute"], node["checkpoint"]) == (
        "n",
        "model.py:7",
        "must_save",
        3,
    )


def test_replace_uses_reaches_every_reader() -> None:
    graph = read_body(CHAIN)
    edit.replace_uses(graph, "s", "x")
    assert lines(graph) == ["s = Add(x, b)", "t = Gelu(x)", "y = Mul(t, x)"]
    graph.verify()


def test_outputs_keep_their_names() -> None:
    graph = read_body(CHAIN)
    (new,) = edit.insert_before(graph, "mul", "Sum", ["t", "s"], ["y"], hint="total")
    edit.replace_uses(graph, "y", new)
    edit.erase_node(graph, "mul")
    edit.sweep(graph)
    graph.verify()
    assert graph.output_names == ["y"]
    assert lines(graph)[-1] == "y = Sum(t, s)"


def test_nodes_whose_results_get_another_name_keep_theirs() -> None:
    """What a profile knows a step by is the name of its node."""
    graph = read_body(CHAIN)
    (first,) = edit.insert_before(graph, "mul", "Sum", ["t", "s"], ["y"], hint="total")
    edit.replace_uses(graph, "y", first)
    (second,) = edit.insert_before(graph, "mul", "Sum", ["t", "s"], ["y"], hint="total")
    assert (first, second) == ("total", "total_1")
    names = [node["name"] for node in graph.nodes()]
    assert len(set(names)) == len(names)


def test_an_input_can_become_an_output() -> None:
    graph = read_body(CHAIN)
    edit.replace_uses(graph, "y", "x")
    graph.verify()
    assert graph.output_names == ["x"]
    assert graph.input_names == ["x", "b"]


def test_replace_by_itself_changes_nothing() -> None:
    graph = read_body(CHAIN)
    before = show(graph)
    edit.replace_uses(graph, "y", "y")
    assert show(graph) == before


def test_erase_leaves_a_tombstone_until_sweep() -> None:
    graph = read_body(CHAIN)
    edit.replace_uses(graph, "y", "t")
    edit.erase_node(graph, "mul")
    graph.verify()
    assert graph.num_nodes == 2
    assert len(edit.value_names(graph)) == 5
    edit.sweep(graph)
    graph.verify()
    assert sorted(edit.value_names(graph)) == ["b", "s", "x", "y"]
    # The freed name can be given again.
    assert edit.insert_before(graph, "gelu", "Neg", ["s"], ["s"], hint="t") == ["t"]


def test_erase_refuses_a_node_that_is_read() -> None:
    graph = read_body(CHAIN)
    words = "edit: erase of node 'add': its output 's' has 2 uses, want none"
    with pytest.raises(_C.InternalError, match=words):
        edit.erase_node(graph, "add")
    graph.verify()


def test_rename() -> None:
    graph = read_body(CHAIN)
    edit.rename(graph, "s", "sum")
    assert lines(graph)[:2] == ["sum = Add(x, b)", "t = Gelu(sum)"]
    graph.verify()
    with pytest.raises(_C.InternalError, match="rename of value 'sum': another value has the name"):
        edit.rename(graph, "sum", "x")


def test_set_input() -> None:
    graph = read_body(CHAIN)
    edit.set_input(graph, "gelu", 0, "x")
    edit.set_input(graph, "mul", 1, None)
    edit.set_input(graph, "add", 3, "b")
    assert lines(graph) == ["s = Add(x, b, , b)", "t = Gelu(x)", "y = Mul(t, )"]
    graph.verify()
    with pytest.raises(_C.InternalError, match="input of node 'add': got slot -1, want one from 0"):
        edit.set_input(graph, "add", -1, None)


def test_move_before() -> None:
    graph = read_body(CHAIN)
    edit.insert_before(graph, "mul", "Neg", ["x"], ["x"], hint="n")
    edit.move_before(graph, "n", "add")
    assert [node["name"] for node in graph.nodes()] == ["n", "add", "gelu", "mul"]
    graph.verify()
    # A moved node still knows its place.
    edit.insert_before(graph, "n", "Neg", ["x"], ["x"], hint="m")
    assert [node["name"] for node in graph.nodes()] == ["m", "n", "add", "gelu", "mul"]


def test_sweep_drops_constants_that_nothing_reads() -> None:
    graph = read_body(
        """
        g (float[4] x) => (float[4] y)
        <float[2] used = {1, 2}, float[2] spare = {1, 2}>
        {
           y, ours, more = torch_ort.Three (x, used)
           a, theirs = Dropout (x)
           z = Relu (a)
        }
        """
    )
    edit.add_parameter(graph, "weight", "x")
    edit.sweep(graph)
    graph.verify()
    # A parameter is bound by its place, and the number of outputs has a meaning.
    assert graph.initializer_names == ["used", "weight"]
    assert lines(graph) == [
        "y, ours, more = Three(x, used)",
        "a, theirs = Dropout(x)",
        "z = Relu(a)",
    ]


def test_clone_is_equal_and_apart() -> None:
    graph = read_body(SUBGRAPH)
    edit.insert_before(graph, "branch", "Relu", ["a"], ["a"], hint="r")
    edit.erase_node(graph, "r")
    copy = graph.clone()
    copy.verify()
    assert copy.to_onnx() == graph.to_onnx()
    edit.rename(copy, "a", "b")
    copy.verify()
    assert "Relu (a)" in show(graph)
    assert "Relu (b)" in show(copy)
    graph.verify()


def test_subgraphs_follow_the_values_that_they_read() -> None:
    graph = read_body(SUBGRAPH)
    graph.verify()
    with pytest.raises(_C.InternalError, match="its output 'a' has 1 uses"):
        edit.erase_node(graph, "a")
    (new,) = edit.insert_before(graph, "branch", "Abs", ["x"], ["x"], hint="n")
    edit.replace_uses(graph, "a", new)
    graph.verify()
    edit.erase_node(graph, "a")
    edit.sweep(graph)
    graph.verify()
    assert "Relu (n)" in show(graph)
    assert "Add (n, x)" in show(graph)
    # Two captured values become one.
    edit.replace_uses(graph, "n", "x")
    graph.verify()
    assert "Add (x, x)" in show(graph)
    edit.replace_uses(graph, "y", "x")
    edit.erase_node(graph, "branch")
    edit.sweep(graph)
    graph.verify()
    assert lines(graph) == ["n = Abs(x)"]


def test_values_of_bodies_get_names_of_their_own():
    graph = read_body("""
        branches (bool c, float[4] x) => (float[4] w) {
           y = If (c) <
              then_branch = t () => (float[4] a) { w = Exp (x)  a = Mul (w, x) },
              else_branch = e () => (float[4] b) { b = Identity (x) }
           >
           w = Abs (y)
        }
    """)
    _C.separate_names(graph)
    graph.verify()
    assert "w_1 = Exp (x)" in show(graph)
    assert "a = Mul (w_1, x)" in show(graph)
    assert "w = Abs (y)" in show(graph)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_edits_leaves_a_legal_graph(data: st.DataObject) -> None:
    graph = read_body(CHAIN)
    is_rewired = False
    for number in range(data.draw(st.integers(1, 12))):
        order = [node["name"] for node in graph.nodes()]
        if not order:
            break
        place = data.draw(st.integers(0, len(order) - 1))
        produced = [name for node in graph.nodes()[:place] for name in node["outputs"]]
        visible = graph.input_names + produced
        verb = data.draw(st.sampled_from(["insert", "replace", "erase", "set", "rename", "sweep"]))
        if verb == "insert":
            inputs = data.draw(st.lists(st.sampled_from([*visible, None]), max_size=3))
            count = data.draw(st.integers(1, 3))
            like = graph.input_names[:1] * count
            # Nodes are found by name here; one whose output was renamed keeps its own.
            hint = f"inserted{number}"
            edit.insert_before(graph, order[place], "Op", inputs, like, "torch_ort", hint)
        elif verb == "replace":
            old = graph.nodes()[place]["outputs"][0]
            edit.replace_uses(graph, old, data.draw(st.sampled_from(visible)))
        elif verb == "erase":
            try:
                edit.erase_node(graph, order[place])
            except _C.InternalError as error:
                # A node that is read is refused.
                if "want none" not in str(error):
                    raise
        elif verb == "set":
            is_rewired = True
            index = data.draw(st.integers(0, 3))
            edit.set_input(graph, order[place], index, data.draw(st.sampled_from([*visible, None])))
        elif verb == "rename":
            taken = edit.value_names(graph)
            name = data.draw(st.sampled_from([f"v{i}" for i in range(30)]))
            if name not in taken:
                edit.rename(graph, data.draw(st.sampled_from(visible)), name)
        else:
            edit.sweep(graph)
        graph.verify(f"after {verb}")
    assert graph.clone().to_onnx() == graph.to_onnx()
    # A file is held to the inputs of its ops.
    if not is_rewired:
        assert _C.Graph.from_onnx(graph.to_onnx()).to_onnx() == graph.to_onnx()
