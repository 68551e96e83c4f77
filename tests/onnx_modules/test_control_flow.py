"""Branches, loops and scans of files: against onnxruntime, trained, and copied."""

from __future__ import annotations

import copy
import pickle

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_cases import by_onnxruntime, model_of

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only

BRANCH = model_of(
    """(float[N, 3] y)
    <float[3, 3] weight = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}, float[3] bias = {1, 2, 3},
     float zero = {0}, int64[1] axes = {0}> {
      total = ReduceSum <keepdims = 0> (x)
      which = Greater(total, zero)
      h = MatMul(x, weight)
      y = If (which) <
        then_branch = t () => (float[N, 3] a) { a = Add(h, bias) },
        else_branch = e () => (float[N, 3] b) { c = Neg(h) b = Mul(c, weight_row) } >
    }"""
)
del BRANCH.graph.initializer[2:]
BRANCH.graph.initializer.extend(
    [
        helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
        helper.make_tensor("weight_row", TensorProto.FLOAT, [3], [2.0, 3.0, 4.0]),
    ]
)

LOOP = model_of(
    """(float[N, 3] y, float[M, N, 3] all)
    <int64 count = {4}, float[3] step = {0.5, 1, 1.5}, float limit = {1000}> {
      y, all = Loop (count, , x) <body = b (int64 i, bool go, float[N, 3] h)
        => (bool more, float[N, 3] next, float[N, 3] seen) {
          n = Cast <to = 1> (i)
          scaled = Mul(step, n)
          next = Add(h, scaled)
          seen = Tanh(next)
          total = ReduceSum <keepdims = 0> (next)
          more = Less(total, limit)
        }>
    }"""
)


def scan_model(axis: int, direction: int, out_axis: int, out_direction: int) -> onnx.ModelProto:
    """A running sum over an axis of x (N, L, 3), whose states are stacked."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "part"], ["next"]),
            helper.make_node("Mul", ["next", "factor"], ["seen"]),
        ],
        "running",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in ("state", "part")],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in ("next", "seen")],
    )
    node = helper.make_node(
        "Scan", ["start", "x"], ["last", "stacked"], body=body, num_scan_inputs=1,
        scan_input_axes=[axis], scan_input_directions=[direction], scan_output_axes=[out_axis],
        scan_output_directions=[out_direction],
    )  # fmt: skip
    sizes = ["L", "N", 3] if axis == 0 else ["N", "L", 3]
    graph = helper.make_graph(
        [node], "net",
        [helper.make_tensor_value_info("start", TensorProto.FLOAT, ["N", 3]),
         helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("last", TensorProto.FLOAT, None),
         helper.make_tensor_value_info("stacked", TensorProto.FLOAT, None)],
        [helper.make_tensor("factor", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def by_session(model: onnx.ModelProto, **inputs: torch.Tensor) -> list[torch.Tensor]:
    return by_onnxruntime(model.SerializeToString(), all_results=True, **inputs)


@pytest.mark.parametrize("sign", [1, -1], ids=["then", "else"])
def test_a_branch(sign: int) -> None:
    loaded = torch_ort.load_onnx(BRANCH)
    for rows in (2, 5):
        x = sign * torch.rand(rows, 3)
        (want,) = by_session(BRANCH, x=x)
        torch.testing.assert_close(loaded(x), want)


def test_weights_that_only_a_branch_reads_are_trained() -> None:
    loaded = torch_ort.load_onnx(BRANCH)
    assert {name for name, _ in loaded.named_parameters()} == {"weight", "bias", "weight_row"}
    loaded(torch.rand(2, 3)).sum().backward()
    torch.testing.assert_close(loaded.bias.grad, torch.full((3,), 2.0))
    assert loaded.weight_row.grad is None
    loaded(-torch.rand(2, 3)).sum().backward()
    assert loaded.weight_row.grad is not None
    with torch.no_grad():  # no body has a copy of its own
        before = loaded(torch.ones(1, 3))
        loaded.bias.add_(1)
        torch.testing.assert_close(loaded(torch.ones(1, 3)), before + 1)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_loop(count: int) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(LOOP)
    model.graph.initializer[0].CopyFrom(helper.make_tensor("count", TensorProto.INT64, [], [count]))
    loaded = torch_ort.load_onnx(model)
    x = torch.randn(2, 3)
    last, seen = loaded(x)
    want_last, want_seen = by_session(model, x=x)
    torch.testing.assert_close(last, want_last)
    assert len(seen) == count
    if count:
        torch.testing.assert_close(seen, want_seen)


def test_a_loop_ends_where_its_condition_does() -> None:
    loaded = torch_ort.load_onnx(LOOP)
    x = torch.full((1, 3), 400.0)
    last, seen = loaded(x)
    want_last, want_seen = by_session(LOOP, x=x)
    assert len(seen) == 1
    torch.testing.assert_close(last, want_last)
    torch.testing.assert_close(seen, want_seen)


def test_gradients_of_a_loop() -> None:
    loaded = torch_ort.load_onnx(LOOP).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loaded(x), (x,))
    loaded(x)[0].sum().backward()
    torch.testing.assert_close(loaded.step.grad, torch.full((3,), 2.0 * (0 + 1 + 2 + 3)).double())


@pytest.mark.parametrize("out", [(0, 0), (1, 0), (0, 1), (-1, 1)])
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan(axis: int, direction: int, out: tuple[int, int]) -> None:
    model = scan_model(axis, direction, *out)
    loaded = torch_ort.load_onnx(model)
    for length in (1, 4):
        x = torch.randn(*((length, 2) if axis == 0 else (2, length)), 3)
        given = {"start": torch.randn(2, 3), "x": x}
        for got, want in zip(loaded(**given), by_session(model, **given), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("model", [BRANCH, LOOP], ids=["branch", "loop"])
def test_a_copy_a_pickle_and_a_file(model: onnx.ModelProto, tmp_path) -> None:
    loaded, x = torch_ort.load_onnx(model), torch.rand(2, 3)
    want = loaded(x)
    for other in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        torch.testing.assert_close(other(x), want)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.5)
    torch_ort.export_onnx(loaded, tmp_path / "net.onnx")
    results = by_session(onnx.load(tmp_path / "net.onnx"), x=x)
    for got, saved in zip(loaded(x) if len(results) > 1 else (loaded(x),), results, strict=True):
        torch.testing.assert_close(got, saved)


def test_compiled() -> None:
    for model in (BRANCH, LOOP):
        loaded = torch_ort.load_onnx(model)
        compiled = torch.compile(loaded, backend="ort")
        for x in (torch.rand(2, 3), -torch.rand(2, 3)):
            torch.testing.assert_close(compiled(x), loaded(x))


def test_a_scan_of_batches_is_refused() -> None:
    model = scan_model(0, 0, 0, 0)
    model.opset_import[0].version = 8
    with pytest.raises(
        Unsupported, match="Scan: opset: got 8, which scans batches, want 9 or newer"
    ):
        torch_ort.load_onnx(model)


def test_a_scan_with_too_few_inputs() -> None:
    model = scan_model(0, 0, 0, 0)
    del model.graph.node[0].input[1]
    with pytest.raises(UserError, match=r"Scan: inputs: got 1, want 2 as its body has \(node ''\)"):
        torch_ort.load_onnx(model)
