"""If and Loop of graphs from files, against onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

import torch_ort
from torch_ort import _C

sys.path.insert(0, str(Path(__file__).parents[1] / "ir"))
from graph_text import read_body

pytestmark = pytest.mark.ort_only
HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'

BRANCHES = """
branches (bool c, float[N,4] x) => (float[M,P] y, float[N,4] z)
<float two = {2}, int64[2] flat = {1, -1}>
{
   w = Exp (x)
   y, u = If (c) <
      then_branch = then_branch () => (float[A,B] a, float[N,4] d) {
         a = Mul (w, two)
         d = Identity (x)
      },
      else_branch = else_branch () => (float[E,F] b, float[N,4] e) {
         b = Reshape (x, flat)
         s = Shape (x)
         f = Expand (two, s)
         e = Add (f, w)
      }
   >
   z = Add (u, w)
}
"""
LOOP = """
loop (int64 m, bool c, float[N,2] x, float limit) => (float[R,2] y, int64 t, float[K] sums)
<int64 zero = {0}, int64 one = {1}, int64 axis = {0}>
{
   y, t, sums = Loop (m, c, x, zero) <
      body = body (int64 i, bool go, v, n) => (bool on, next, count, float sum) {
         sum = ReduceSum <keepdims = 0> (v)
         on = Less (sum, limit)
         next = Concat <axis = 0> (v, x)
         count = Add (n, i)
      }
   >
}
"""
NESTED = """
nested (int64 m, float[N,4] x, float[4] w) => (float[N,4] y)
<float half = {0.5}, float zero = {0}>
{
   y = Loop (m, , x) <
      body = body (int64 i, bool go, float[N,4] v) => (bool on, float[N,4] next) {
         on = Identity (go)
         s = ReduceSum <keepdims = 0> (v)
         up = Greater (s, zero)
         next = If (up) <
            then_branch = t () => (float[N,4] a) {
               h = Mul (v, half)
               k = Cast <to = 1> (i)
               a = Sub (h, k)
            },
            else_branch = e () => (float[N,4] b) { b = Add (v, w) }
         >
      }
   >
}
"""
SIZES = """
sizes (int64 m, float[N,4] x) => (float[N,4] y, float[K,N,2] parts)
<int64[2] pair = {-1, 2}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}>
{
   shape = Shape (x)
   rows = Gather (shape, zero)
   target = Concat <axis = 0> (rows, two)
   y, parts = Loop (m, , x) <
      body = body (int64 i, bool go, float[N,4] v) => (bool on, float[N,4] next, float[N,2] part) {
         on = Identity (go)
         next = Mul (v, v)
         start = Unsqueeze (i, zero)
         end = Add (start, two)
         cut = Slice (v, start, end, one)
         part = Reshape (cut, target)
      }
   >
}
"""


def compare(text: str, *calls: dict[str, torch.Tensor]) -> None:
    model = onnx.parser.parse_model(HEAD + text)
    onnx.checker.check_model(model)
    other = onnxruntime.InferenceSession(model.SerializeToString())
    session = _C.Session.from_onnx(model.SerializeToString())
    graph = read_body(text)
    for inputs in calls:
        want = other.run(None, {name: x.numpy() for name, x in inputs.items()})
        for got in (_C.run(graph, inputs), session.run(inputs)):
            for name, value in zip([x.name for x in model.graph.output], want, strict=True):
                value = torch.from_numpy(np.asarray(value))
                torch.testing.assert_close(got[name], value, check_stride=False)


def flag(value: bool) -> torch.Tensor:
    return torch.tensor(value)


def count(value: int) -> torch.Tensor:
    return torch.tensor(value)


def test_branches_of_two_sizes():
    calls = [{"c": flag(c), "x": torch.rand(n, 4)} for n in (3, 1) for c in (True, False)]
    compare(BRANCHES, *calls)


def test_loops_that_carry_what_grows():
    calls = [
        {"m": count(m), "c": flag(c), "x": torch.ones(n, 2), "limit": torch.tensor(limit)}
        for m, c, n, limit in [(3, True, 2, 99.0), (0, True, 2, 99.0), (9, True, 1, 7.0),
                               (5, False, 3, 9.0), (9, True, 2, 0.0)]
    ]  # fmt: skip
    compare(LOOP, *calls)


def test_branches_in_loops():
    calls = [
        {"m": count(m), "x": torch.rand(2, 4) * 4 - 2, "w": torch.rand(4)} for m in (0, 1, 2, 5)
    ]
    compare(NESTED, *calls)


def test_sizes_from_around_and_integers_of_a_round():
    compare(SIZES, *({"m": count(m), "x": torch.rand(3, 4)} for m in (1, 3, 2)))


def test_counters_count_calls_alone():
    session = _C.Session.from_onnx(onnx.parser.parse_model(HEAD + NESTED).SerializeToString())
    inputs = {"m": count(3), "x": torch.rand(2, 4), "w": torch.rand(4)}
    torch_ort.reset_counters()
    for _ in range(4):
        session.run(inputs)
    counters = torch_ort.counters()
    assert counters["forward_runs"] == 4
    assert counters["contexts_created"] == counters["plans"] <= 4  # of the graph and its bodies


ON = {"c": flag(True), "x": torch.rand(2, 4)}
ONCE = {"m": count(1), "x": torch.rand(2, 4), "w": torch.rand(4)}
INTEGERS = BRANCHES.replace("float[E,F] b", "int64[E] b").replace("Reshape (x, flat)", "Shape (x)")
WITHOUT_CONDITION = NESTED.replace("bool go, ", "").replace("Identity (go)", "Cast <to = 9> (i)")
CLOSED = """
    closed (bool c, float[N,4] x) => (float[N,4] y) {
       y = torch_ort.Loop <carried = 7,
          body = body (int64 i, bool go, float[N,4] v) => (bool on, float[N,4] next) {
             on = Identity (go)
             next = Exp (v)
          }
       > ( , c, x)
    }
"""


@pytest.mark.parametrize(
    ("text", "inputs", "words"),
    [
        (BRANCHES, {**ON, "c": torch.tensor([True])}, "input 'c': got 1 dims, want 0"),
        (BRANCHES.replace("bool c", "bool[K] c"), {**ON, "c": torch.ones(2, dtype=torch.bool)},
         "condition: got 2 elements, want one"),
        (NESTED.replace("next)", "next, float[N,4] v)"), ONCE, "outputs of body: got 3, want 2"),
        (NESTED.replace("float[N,4] v) =>", "int64[N,4] v) =>"), ONCE,
         "dtype of input 1: got float32, want int64"),
        (WITHOUT_CONDITION, ONCE,
         "Loop: inputs of body: got 3, want 4"),
        (CLOSED, {**ON, "w": torch.rand(4)}, "Loop: carried: got 7, want 0 to 1"),
        (INTEGERS, ON, "If: 'y': got float32 and int64, want one dtype"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_said(text, inputs, words):
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(read_body(text), inputs)


def test_a_body_that_writes_is_refused():
    text = """
        writes (bool c, float[2] x) => (float[2] y) {
           y = If (c) <
              then_branch = t () => (float[2] a) {
                 a = org.pytorch.aten.ATen <operator = "aten::neg_", effects = 1,
                                            tensor_args = ["self"]> (x)
              },
              else_branch = e () => (float[2] b) { b = Neg (x) }
           >
        }
    """
    graph = read_body(text, allow=["aten::neg_"])
    with pytest.raises(torch_ort.Unsupported, match="then_branch writes into a value from outside"):
        _C.run(graph, {"c": flag(True), "x": torch.ones(2)})
