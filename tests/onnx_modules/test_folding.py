"""What exporters compute from constants and sizes, and parts of sequences."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx_cases import by_onnxruntime, model_of

import torch_ort
from torch_ort import Unsupported

pytestmark = pytest.mark.ort_only


def check(model: onnx.ModelProto, *inputs: torch.Tensor) -> str:
    """Compare with onnxruntime; gives the code of the module."""
    loaded = torch_ort.load_onnx(model)
    for x in inputs:
        want = by_onnxruntime(model.SerializeToString(), all_results=True, x=x)
        got = loaded(x)
        for mine, theirs in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
            torch.testing.assert_close(mine, theirs)
    return loaded.code


def test_factors_that_are_joined() -> None:
    model = model_of(
        """(float[N, 2, M, M] y) <float[2] ones = {1, 1}> {
          first = Constant <value = float[2] {1, 1}> ()
          last = Constant <value_floats = [2.0, 2.0]> ()
          factors = Concat <axis = 0> (first, last)
          y = Resize <mode = "linear"> (x, , factors)
        }""",
        "float[N, 2, M, M] x",
    )
    check(model, torch.randn(1, 2, 3, 3), torch.randn(2, 2, 4, 4))


def test_sizes_of_a_weight() -> None:
    model = model_of("""(float[K] y)
    <float[3, 4] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
      h = MatMul(x, weight)
      all = Shape(weight)
      last = Shape <start = 1> (weight)
      count = ReduceProd <keepdims = 1> (all)
      four = Reshape(last, last_shape)
      y0 = ReduceSum <keepdims = 0> (h)
      y = Expand(y0, four)
    }""")
    model.graph.initializer.append(onnx.helper.make_tensor("last_shape", 7, [1], [1]))
    code = check(model, torch.randn(2, 3))
    assert "[4]" in code


@pytest.mark.parametrize("like", ["rows", "one"])
def test_numbers_like_sizes(like: str) -> None:
    model = model_of(f"""(int64[K] y) <int64 zero = {{0}}> {{
      shape = Shape(x)
      rows = Gather <axis = 0> (shape, zero)
      start = Constant <value = float {{0.0}}> ()
      one = Constant <value_int = 1> ()
      first = CastLike(start, {like})
      y = Range(first, rows, one)
    }}""")
    check(model, torch.randn(2, 3), torch.randn(5, 3))


@pytest.mark.parametrize("split", ["int64[3] split = {1, 2, 3}", "int64 split = {2}"])
def test_parts_of_sequences(split: str) -> None:
    model = model_of(
        f"""(float[N, K] y, float[N, L] z) <{split}, int64 zero = {{0}}, int64 two = {{2}}> {{
          parts = SplitToSequence <axis = 1> (x, split)
          first = SequenceAt(parts, zero)
          z = SequenceAt(parts, two)
          y = Neg(first)
        }}""",
        "float[N, 6] x",
    )
    check(model, torch.randn(3, 6))


def test_sequences_that_are_more_than_parts() -> None:
    model = model_of(
        """(float[N, K] y) <int64 two = {2}> {
          parts = SplitToSequence <axis = 1> (x, two)
          y = ConcatFromSequence <axis = 1> (parts)
        }""",
        "float[N, 6] x",
    )
    with pytest.raises(Unsupported, match="SplitToSequence: the engine has no such op"):
        torch_ort.load_onnx(model)


def test_weights_are_not_folded() -> None:
    model = model_of("""(float[N, 3] y) <float[1, 3] weight = {1, 2, 3}, float factor = {2}> {
      twice = Mul(weight, factor)
      y = Add(x, twice)
    }""")
    loaded = torch_ort.load_onnx(model)
    loaded(torch.zeros(2, 3)).sum().backward()
    torch.testing.assert_close(loaded.weight.grad, torch.full((1, 3), 4.0))


def test_only_integers_are_sizes() -> None:
    model = model_of(
        """(float[N] y, float[N] z) {
          shape = Shape(x)
          zeros = ConstantOfShape(shape)
          y = CastLike(x, zeros)
          wide = Cast <to = 1> (shape)
          z = CastLike(x, wide)
        }""",
        "float[N] x",
    )
    check(model, torch.tensor([1.5, 2.5]))


def test_what_a_cast_says_of_numbers_beyond_its_dtype() -> None:
    model = model_of(
        """(float[N] y) {
          like = Constant <value = float8e5m2[1] {0}> ()
          narrow = CastLike <saturate = 0> (x, like)
          y = Cast <to = 1> (narrow)
        }""",
        "float[N] x",
    )
    assert torch_ort.load_onnx(model)(torch.tensor([1e6, 1.0])).tolist() == [float("inf"), 1.0]


@pytest.mark.parametrize(
    "nodes",
    [
        "h = ConstantOfShape <value = int64[1] {1}> (many)",
        "h = Range(zero, most, one)",
        "h = Expand(one, many)",
    ],
)
def test_what_is_large_is_not_computed_beforehand(nodes: str) -> None:
    model = model_of(f"""(float[N, 3] y)
    <int64[2] many = {{1000000000, 1000000000}}, int64 zero = {{0}}, int64 one = {{1}},
     int64 most = {{1000000000000000}}> {{
      {nodes}
      y = Neg(x)
    }}""")
    x = torch.randn(2, 3)
    torch.testing.assert_close(torch_ort.load_onnx(model)(x), -x)
