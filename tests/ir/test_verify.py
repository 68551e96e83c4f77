# The verifier accepts legal graphs and names what is wrong with others.
from __future__ import annotations

import pytest
from graph_text import read_body

from torch_ort import _C

TEXT = """
g (float[4] x, float[4] b) => (float[4] y)
{
   [add] s = Add (x, b)
   [mul] y = Mul (s, s)
}
"""


@pytest.mark.parametrize(
    ("how", "value", "words"),
    [
        ("same name", "s", "two values have the name 'x'"),
        ("unknown name", "s", "the name of value 's_renamed' is not among the names of graph 'g'"),
        ("lost use", "s", "value 's' does not record its use by node 'mul'"),
        ("lost use", "y", "value 'y' does not record its use by output 0 of graph 'g'"),
        ("extra use", "x", "value 'x' records 1 uses that no node and no output has"),
        ("no producer", "s", "value 's' is used by node 'mul' but no node produces it"),
        ("wrong index", "s", "value 's' does not know that it is output 0 of node 'add'"),
        ("wrong index", "b", "input 'b' has index 2, want 1"),
        ("producer", "b", "input 'b' has a producer"),
        ("producer", "y", "value 'y' does not know that it is output 0 of node 'mul'"),
        ("input again", "x", "input 'x' has index 0, want 2"),
        ("foreign value", "x", "node 'add' reads a value that graph 'g' does not own"),
    ],
)
def test_broken_graphs(how: str, value: str, words: str) -> None:
    graph = read_body(TEXT)
    graph.verify()
    _C.testing.corrupt(graph, how, value)
    with pytest.raises(_C.InternalError, match=f"^verify after fuse_bias_gelu: {words}$"):
        graph.verify("after fuse_bias_gelu")


def test_nodes_stand_after_what_they_read() -> None:
    graph = read_body(TEXT)
    _C.testing.move_before(graph, "mul", "add")
    words = "verify graph: value 's' is used by node 'mul' but is not produced before it"
    with pytest.raises(_C.InternalError, match=words):
        graph.verify()


def test_at_most_one_yield() -> None:
    graph = read_body(
        """
        g (float[4] x) => (float[4] y)
        {
           [second] y = com.microsoft.YieldOp (x)
        }
        """
    )
    _C.testing.insert_before(graph, "second", "YieldOp", ["x"], ["x"], "com.microsoft", "first")
    words = "nodes 'first' and 'second' are both a YieldOp, want at most one"
    with pytest.raises(_C.InternalError, match=words):
        graph.verify()


def test_an_unused_value_and_a_tombstone_are_legal() -> None:
    graph = read_body(TEXT)
    _C.testing.replace_uses(graph, "y", "s")
    assert graph.verify() is None  # it raises what it finds
    _C.testing.erase_node(graph, "mul")
    assert graph.verify() is None


def test_a_subgraph_reads_only_what_stands_before_its_node() -> None:
    graph = read_body(
        """
        g (bool c, float[4] x) => (float[4] y)
        {
           [neg] a = Neg (x)
           [branch] y = If (c) <
             then_branch = yes () => (float[4] p) { p = Relu (a) },
             else_branch = no () => (float[4] q) { q = Abs (x) }
           >
        }
        """
    )
    graph.verify()
    _C.testing.move_before(graph, "branch", "neg")
    words = "value 'a' is used by node 'p' but no node produces it"
    with pytest.raises(_C.InternalError, match=words):
        graph.verify()


@pytest.mark.parametrize("sizes", ["rows = 3, columns = 4", "rows = 2, columns = 2"])
def test_regions_stand_in_their_rows_and_columns(sizes: str) -> None:
    text = """
        g (float[2,4] x) => (float[2,4] y)
        {
           [y] y = torch_ort.Region <rows = 2, columns = 4, spaces = ["full"],
              body = b (float[2,4] a) => (float[2,4] c)
                 <float[2,4] t> { t = Exp (a) c = Mul (t, a) }> (x)
        }
        """
    read_body(text).verify()
    broken = read_body(text.replace("rows = 2, columns = 4", sizes))
    with pytest.raises(_C.InternalError, match=r"^verify after fuse_regions: node 'y': Region: "):
        broken.verify("after fuse_regions")
