"""Rows of zeros stay zero through a point-wise op that gives zero for zeros: no other op."""

from __future__ import annotations

import pytest
from test_cases import assert_same, read_graph, run, run_pass

ATTRS = {"LeakyRelu": "<alpha = 0.25>", "Gelu": '<approximate = "tanh">'}
NUMBERS = [
    "Abs", "Add", "Ceil", "Cos", "Erf", "Exp", "Floor", "Gelu", "LeakyRelu", "Max", "Min", "Mul",
    "Neg", "Pow", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Swish", "Tanh",
]  # fmt: skip
TRUTHS = ["Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual"]
OF_TRUTHS = ["And", "Not", "Or", "Xor"]
ONE_OPERAND = {*NUMBERS, "IsNaN", "Not"} - {"Add", "Max", "Min", "Mul", "Pow", "Sub"}
# What cos(0), 1 / (1 + exp(-0)), 0 ** 0, 0 <= 0 and the like give is not zero.
GIVE_OTHERS = {
    "Cos", "Equal", "Exp", "GreaterOrEqual", "LessOrEqual", "Not", "Pow", "Sigmoid",
}  # fmt: skip

# `wide` is zero but for the first place of each sequence, and `y` reads all rows.
HEAD = """<ir_version: 10, opset_import: ["" : 24, "org.pytorch.aten" : 1, "torch_ort" : 1]>
g (float[2,4] g, float[4,4] w, float[2,3,4] x) => (float[6,4] y)
<float[2,1,1,3] mask = {0,0,-3e38,0,-3e38,-3e38}, int64[2] flat = {6,4},
 int64[4] heads = {2,3,1,4}, float[2,1,3,4] mixed, float[2,1,3] logarithms, float[2,3,4] wide>
{
   split = Reshape (x, heads)
   query = Transpose <perm = [0, 2, 1, 3]> (split)
   mixed, logarithms = torch_ort.Attention (query, query, query, mask)
   wide = org.pytorch.aten.ATen <operator = "aten::select_backward", overload_name = "", dim = 1,
     index = 0, input_sizes = [2, 3, 4], tensor_args = ["grad_output"]> (g)
"""
TAIL = """
   rows = Reshape (made, flat)
   y = MatMul (rows, w)
}"""


def body(op: str) -> str:
    """Write a use of the op, whose rows of zeros show in `made`."""
    of = "truth" if op in OF_TRUTHS else "wide"
    use = f"{op} {ATTRS.get(op, '')} ({of if op in ONE_OPERAND else f'{of}, {of}'})"
    if op not in TRUTHS + OF_TRUTHS:
        return f"   made = {use}"
    return f"""   size = Abs (wide)
   truth = Less (wide, size)
   told = {use}
   made = Where (told, x, wide)"""


@pytest.mark.parametrize("op", NUMBERS + TRUTHS + OF_TRUTHS)
def test_products_leave_out_rows_that_stay_zero(op: str) -> None:
    text = HEAD + body(op) + TAIL
    graph = read_graph(text)
    want = run(graph)
    run_pass("row_sparsity", graph)
    assert_same(run(graph), want, "row_sparsity", text)
    leaves_out = any(node["op"] == "RowsProduct" for node in graph.nodes())
    assert leaves_out == (op not in GIVE_OTHERS)
