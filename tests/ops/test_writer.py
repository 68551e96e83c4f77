"""ops::Writer: what it writes, where, of which type, and under which name."""

from __future__ import annotations

import onnx
import pytest
from graph_text import lines, read_body, show

from torch_ort import _C

Writer = _C.testing.Writer

BODY = """
g (float[N,4] x, float[4] b) => (float[N,4] y)
<float[N,4] add, float[N,4] gelu>
{
   [add] add = Add (x, b)
   [gelu] gelu = Gelu (add)
   [y] y = Mul (gelu, add)
}
"""

# What is asked of the writer; the line of the new node; dtype, shape and strides of its result.
WRITES = {
    "make": (lambda w: w.make("Mul", ["add", "b"]), "mul = Mul(add, b)",
        ("float32", ["N", 4], None)),
    "a name of two words": (lambda w: w.make("ReduceMean", ["add"]),
        "reduce_mean = ReduceMean(add)", ("float32", [1, 1], None)),
    "make_ours": (lambda w: w.make_ours("BernoulliMask", [], like="add"),
        "bernoulli_mask = BernoulliMask()", ("float32", ["N", 4], None)),
    "add_named": (lambda w: w.add_named("half", "Neg", ["b"]), "half = Neg(b)",
        ("float32", [4], None)),
    "ints that a call tells": (lambda w: w.ints("[2*N,4]"), "dims = Dims()", ("int64", [2], None)),
    "cast": (lambda w: w.cast("add", "float64"), "cast = Cast(add)", ("float64", ["N", 4], None)),
    "reshape": (lambda w: w.reshape("add", "[4,N]"), "reshape = Reshape(add, dims)",
        ("float32", [4, "N"], None)),
    "transpose": (lambda w: w.transpose("add", "[1,0]"), "transpose = Transpose(add)",
        ("float32", [4, "N"], [1, 4])),
    "reduce": (lambda w: w.reduce("ReduceSum", "add", "[1]", keeps_dims=False),
        "reduce_sum = ReduceSum(add, ints)", ("float32", ["N"], None)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITES)
def test_a_node_stands_in_front_of_another_with_its_type(case: str) -> None:
    ask, line, type_ = WRITES[case]
    graph = read_body(BODY)
    made = ask(Writer(graph, "gelu"))
    graph.verify()
    assert line in lines(graph)
    assert lines(graph).index(line) < lines(graph).index("gelu = Gelu(add)")
    assert graph.types()[made] == (*type_, "cpu")


def test_without_a_place_nodes_come_last() -> None:
    graph = read_body(BODY)
    Writer(graph).make("Neg", ["y"])
    assert lines(graph)[-1] == "neg = Neg(y)"


def test_what_is_there_is_not_written_again() -> None:
    graph = read_body(BODY)
    before = show(graph)
    assert Writer(graph, "gelu").cast("add", "float32") == "add"
    assert show(graph) == before


@pytest.mark.parametrize(
    ("number", "dtype", "name"),
    [(0.5, "float32", "constant"), (3, "int64", "constant"), (0.5, "int64", None),
     (0.1, "bfloat16", None), (300, "uint8", None)],
)  # fmt: skip
def test_a_number_is_an_initializer_if_the_dtype_holds_it(number, dtype, name) -> None:
    graph = read_body(BODY)
    assert Writer(graph, "gelu").scalar(number, dtype) == name
    assert lines(graph) == lines(read_body(BODY))
    if name is not None:
        assert graph.types()[name] == (dtype, [], None, "cpu")


def test_known_ints_are_an_initializer() -> None:
    graph = read_body(BODY)
    writer = Writer(graph, "gelu")
    assert [writer.ints("[2,3]"), writer.ints("[]")] == ["ints", "ints_1"]
    assert lines(graph) == lines(read_body(BODY))
    assert graph.types()["ints_1"] == ("int64", [0], None, "cpu")


def test_parts_of_a_composite_bear_its_name() -> None:
    graph = read_body(BODY)
    writer = Writer(graph, "gelu", "gelu")
    assert writer.make("Exp", ["add"]) == "gelu_exp"
    assert writer.reshape("add", "[N,2,2]") == "gelu_reshape"
    assert writer.make("Exp", ["b"]) == "gelu_exp_1"
    assert "gelu_reshape = Reshape(add, gelu_dims)" in lines(graph)


def tagged(checkpoint: int) -> _C.Graph:
    """Give the graph with an origin on each node and a tag on the first."""
    model = onnx.ModelProto.FromString(read_body(BODY).to_onnx())
    for i, node in enumerate(model.graph.node):
        node.metadata_props.add(key="origin", value=f"model.py:{i}")
    for key, value in {"recompute": "must_recompute", "checkpoint": str(checkpoint)}.items():
        model.graph.node[0].metadata_props.add(key=key, value=value)
    return _C.Graph.from_onnx(model.SerializeToString())


def facts(graph: _C.Graph, name: str) -> tuple:
    """Give origin and tags of a node."""
    node = next(node for node in graph.nodes() if node["name"] == name)
    return node["origin"], node["recompute"], node["checkpoint"]


def test_a_new_node_has_origin_and_tags_of_the_next() -> None:
    graph = tagged(checkpoint=3)
    Writer(graph, "add").make("Neg", ["x"])
    assert facts(graph, "neg") == ("model.py:0", "must_recompute", 3)


def test_a_copy_has_name_origin_and_tags_of_its_node() -> None:
    graph = tagged(checkpoint=3)
    name = Writer(graph, "y").copy("add", ["gelu", "b"], like="gelu")
    assert name == "add_1"
    assert lines(graph)[2] == "add_1 = Add(gelu, b)"
    assert facts(graph, name) == ("model.py:0", "must_recompute", 3)


def test_a_node_made_again_is_not_to_be_made_once_more() -> None:
    graph = tagged(checkpoint=3)
    name = Writer(graph, "y").again("add", ["gelu", "b"])
    assert name == "add_again"
    assert lines(graph)[2] == "add_again = Add(gelu, b)"
    assert facts(graph, name) == ("model.py:0", "", -1)
    assert graph.types()["add_again"] == graph.types()["add"]
