"""Files that are quantized: against onnxruntime, and trained through their rounding."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx_cases import by_onnxruntime, model_of

import torch_ort

pytestmark = pytest.mark.ort_only

# A layer whose activations are quantized, by tensor, and whose weight is, by column.
LAYER = """(float[N, 4] y)
<float[3, 4] weight = {0.11, 0.22, -0.33, 0.44, 0.55, 0.66, 0.77, -0.88, 0.99, 0.1, 0.2, 0.3},
 float x_scale = {0.05}, uint8 x_zero = {100}, float[4] w_scale = {0.01, 0.02, 0.01, 0.02},
 int8[4] w_zero = {0, 0, 0, 0}> {
  xq = QuantizeLinear(x, x_scale, x_zero)
  xd = DequantizeLinear(xq, x_scale, x_zero)
  wq = QuantizeLinear <axis = 1> (weight, w_scale, w_zero)
  wd = DequantizeLinear <axis = 1> (wq, w_scale, w_zero)
  y = MatMul(xd, wd)
}"""


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_results_are_onnxruntimes(backend: str) -> None:
    model = model_of(LAYER)
    loaded = torch_ort.load_onnx(model)
    call = loaded if backend == "eager" else torch.compile(loaded, backend=backend)
    x = torch.cat([torch.randn(6, 3), torch.tensor([[100.0, -100.0, 0.025]])])
    got = call(x)
    torch.testing.assert_close(got, by_onnxruntime(model.SerializeToString(), x=x))


def test_gradients_pass_through_the_rounding() -> None:
    loaded = torch_ort.load_onnx(model_of(LAYER))
    assert {name for name, _ in loaded.named_parameters()} == {"weight", "w_scale"}
    x = torch.randn(6, 3)
    x[0, 0] = 1000  # beyond the greatest integer
    x.requires_grad_()
    loaded(x).sum().backward()
    assert x.grad[0, 0] == 0
    # That of a product with the rounded numbers.
    rounded = ((loaded.weight / loaded.w_scale).round() * loaded.w_scale).detach()
    torch.testing.assert_close(x.grad[1], rounded.sum(1))
    inputs = ((x.detach() / 0.05).round() + 100).clamp(0, 255).sub(100) * 0.05
    torch.testing.assert_close(loaded.weight.grad, inputs.sum(0).unsqueeze(1).expand(3, 4))


def test_training_lowers_the_loss_and_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded = torch_ort.load_onnx(model_of(LAYER), trainable="weight")
    call = torch.compile(loaded, backend="ort")
    x, target = torch.randn(32, 3), torch.randn(32, 4)
    optimizer = torch.optim.Adam(loaded.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = (call(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert torch_ort.counters()["fallbacks"] == 0
    torch_ort.export_onnx(loaded, tmp_path / "net.onnx")
    written = onnx.load(tmp_path / "net.onnx")
    assert [node.op_type for node in written.graph.node].count("QuantizeLinear") == 2
    got = by_onnxruntime(written.SerializeToString(), x=x)
    torch.testing.assert_close(got, loaded(x).detach(), rtol=1e-5, atol=1e-5)


def test_without_a_zero_point() -> None:
    model = model_of("""(float[N, 3] y) <float scale = {0.1}> {
      q = QuantizeLinear(x, scale)
      d = DequantizeLinear(q, scale)
      y = Neg(d)
    }""")
    loaded = torch_ort.load_onnx(model)
    x = torch.tensor([[0.26, -1.0, 30.0]], requires_grad=True)
    torch.testing.assert_close(loaded(x), by_onnxruntime(model.SerializeToString(), x=x.detach()))
    loaded(x).sum().backward()
    assert x.grad.tolist() == [[-1, 0, 0]]


def test_integers_that_others_read_stay() -> None:
    model = model_of("""(float[N, 3] y, uint8[N, 3] q)
    <float scale = {0.1}, uint8 zero = {3}, float other = {0.2}> {
      q = QuantizeLinear(x, scale, zero)
      d = DequantizeLinear(q, scale, zero)
      e = DequantizeLinear(q, other, zero)
      y = Add(d, e)
    }""")
    loaded, x = torch_ort.load_onnx(model), torch.randn(4, 3)
    want = by_onnxruntime(model.SerializeToString(), all_results=True, x=x)
    for got, each in zip(loaded(x), want, strict=True):
        torch.testing.assert_close(got, each)


def test_the_dtype_without_a_zero_point_is_the_nodes() -> None:
    model = model_of(
        """(float[N, 3] y) <float scale = {1}> {
          q = QuantizeLinear <output_dtype = 3> (x, scale)
          q_zero_point = Neg(x)
          d = DequantizeLinear(q, scale)
          y = Add(d, q_zero_point)
        }""",
        domains='"" : 21',
    )
    x = torch.tensor([[-5.0, 5.0, 200.0]])
    want = by_onnxruntime(model.SerializeToString(), x=x)
    torch.testing.assert_close(torch_ort.load_onnx(model)(x), want)
