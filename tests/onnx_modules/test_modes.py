"""What a loaded module is beside its forward: its mode, and linear layers that others replace."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from onnx_cases import TWO_LAYERS, Tagger, by_onnxruntime, export, model_of
from torch import nn

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(),
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip


def exported_in_training_mode(module: nn.Module, x: torch.Tensor) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train(), (x,), file, dynamo=False, opset_version=17, input_names=["x"],
            training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
        )  # fmt: skip
    return file.getvalue()


# ---- batch norms


@pytest.mark.parametrize("road", ["eager", "ort", "ortmodule"])
def test_batch_norms_train_and_move_their_statistics(road: str) -> None:
    source, x = convolutions(), torch.randn(5, 3, 6, 6)
    loaded = torch_ort.load_onnx(export(source, x, {0: "batch"}, 17))
    assert not loaded.training
    torch.testing.assert_close(loaded(x), source.eval()(x), rtol=1e-4, atol=1e-5)
    roads = {"eager": lambda m: m, "ort": lambda m: torch.compile(m, backend="ort"),
             "ortmodule": torch_ort.ORTModule}  # fmt: skip
    call = roads[road](loaded)
    for model, run in ((source.train(), source), (loaded.train(), call)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    want = source.state_dict()
    for name, got in loaded.state_dict().items():
        torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loaded.eval()(x), source.eval()(x), rtol=1e-3, atol=1e-4)
    if road != "eager":
        assert torch_ort.counters()["fallbacks"] == 0


def test_moved_statistics_are_written(tmp_path: Path) -> None:
    x = torch.randn(5, 3, 6, 6)
    loaded = torch_ort.load_onnx(export(convolutions(), x, {0: "batch"}, 17)).train()
    loaded(x)
    loaded.eval()
    torch_ort.export_onnx(loaded, tmp_path / "net.onnx")
    got = by_onnxruntime((tmp_path / "net.onnx").read_bytes(), x=x)
    torch.testing.assert_close(got, loaded(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_file_that_says_that_it_trains_does_so_in_both_modes() -> None:
    source, x = convolutions(), torch.randn(5, 3, 6, 6)
    loaded = torch_ort.load_onnx(exported_in_training_mode(source, x))
    want = source.train()(x)
    torch.testing.assert_close(loaded(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loaded.train()(x), want, rtol=1e-4, atol=1e-5)


# ---- dropout

DROPOUT = """(float[N, 400] y) <float ratio = {0.25}> {
  h = Dropout(x, ratio)
  y = Mul(h, h)
}"""


@pytest.mark.parametrize("through", [lambda m: m, copy.deepcopy,
                                     lambda m: pickle.loads(pickle.dumps(m))])  # fmt: skip
def test_dropout_drops_in_training_alone(through) -> None:
    loaded = through(torch_ort.load_onnx(model_of(DROPOUT, "float[N, 400] x")))
    x = torch.ones(50, 400)
    torch.testing.assert_close(loaded(x), x, rtol=0, atol=0)
    dropped = loaded.train()(x)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert dropped.max().item() == pytest.approx((4 / 3) ** 2)
    torch.testing.assert_close(loaded.eval()(x), x, rtol=0, atol=0)


def test_dropout_in_a_compiled_module() -> None:
    loaded = torch_ort.load_onnx(model_of(DROPOUT, "float[N, 400] x"))
    compiled = torch.compile(loaded, backend="ort")
    x = torch.ones(50, 400)
    assert (compiled(x) == 0).sum() == 0
    loaded.train()
    assert (compiled(x) == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_dropout_of_a_file_that_trains() -> None:
    model = model_of(
        """(float[N, 400] y) <float ratio = {0.5}, bool train = {1}> {
          y = Dropout(x, ratio, train)
        }""",
        "float[N, 400] x",
    )
    loaded = torch_ort.load_onnx(model)
    assert (loaded(torch.ones(50, 400)) == 0).float().mean().item() == pytest.approx(0.5, abs=0.03)


# ---- linear layers


def test_products_with_weights_are_linear_layers() -> None:
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))
    layers = {n: each for n, each in loaded.named_modules() if isinstance(each, nn.Linear)}
    assert set(layers) == {"first.linear", "second.linear"}
    first, second = layers["first.linear"], layers["second.linear"]
    assert (first.in_features, first.out_features) == (3, 4)
    assert first.bias is None
    torch.testing.assert_close(first.weight, loaded.get_parameter("first.weight").t())
    assert second.bias is loaded.get_parameter("second.bias")
    # The parameters are those of the file alone, in its layout.
    assert set(loaded.state_dict()) == {"first.weight", "second.weight", "second.bias"}
    x = torch.randn(2, 3)
    before = loaded(x)
    with torch.no_grad():
        first.weight.mul_(2)
    torch.testing.assert_close(loaded.get_parameter("first.weight"), first.weight.t())
    assert not torch.allclose(loaded(x), before)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_linear_layers_of_a_copy_have_its_weights(through) -> None:
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))
    other = through(loaded)
    assert other.first.linear.weight.data_ptr() == other.first.weight.data_ptr()
    assert other.first.weight.data_ptr() != loaded.first.weight.data_ptr()
    loaded.double()
    assert loaded.first.linear.weight.dtype == torch.float64
    assert other.first.linear.weight.dtype == torch.float32


def test_a_weight_of_two_products_is_one_layer() -> None:
    model = model_of("""(float[N, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
      h = MatMul(x, w)
      g = MatMul(h, w)
      y = Gemm <transB = 1> (g, w)
    }""")
    loaded = torch_ort.load_onnx(model)
    names = [n for n, each in loaded.named_modules() if isinstance(each, nn.Linear)]
    assert names == ["w_linear", "linear_1"]
    x, w = torch.randn(2, 3), loaded.w
    torch.testing.assert_close(loaded(x), x @ w @ w @ w.t())
    loaded(x).sum().backward()
    assert loaded.w.grad is not None


# ---- values by name


@pytest.mark.parametrize("through", [lambda m: m, copy.deepcopy,
                                     lambda m: pickle.loads(pickle.dumps(m))])  # fmt: skip
def test_hooks_on_values(through) -> None:
    loaded = through(torch_ort.load_onnx(model_of(TWO_LAYERS)))
    assert {"x", "h", "scaled", "g", "y"} <= set(loaded.value_names)
    seen = []
    value = loaded.value("h")
    assert loaded.value("h") is value
    x = torch.randn(2, 3)
    before = loaded(x)
    handle = value.register_forward_hook(lambda module, args, result: seen.append(result))
    torch.testing.assert_close(loaded(x), before, rtol=0, atol=0)
    torch.testing.assert_close(seen[0], x @ loaded.get_parameter("first.weight"))
    handle.remove()
    value.register_forward_hook(lambda module, args, result: result * 0)
    bias = loaded.get_parameter("second.bias")
    torch.testing.assert_close(loaded(x), bias.expand(2, 2))
    again = copy.deepcopy(loaded)
    assert again.value("h") is not None
    assert "h" in again.value_names
    compiled = torch.compile(loaded, backend="ort")
    torch.testing.assert_close(compiled(x), bias.expand(2, 2))
    with pytest.raises(UserError, match="value: got 'factor', want one of value_names"):
        loaded.value("factor")


# ---- low-rank adapters


@pytest.mark.parametrize("targets", ["all-linear", ["head.linear"]])
def test_peft_adapts_a_loaded_module(targets, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(0, 50, (3, 7))
    source = Tagger()
    loaded = torch_ort.load_onnx(export(source, ids, {0: "batch", 1: "length"}, 17))
    want = loaded(ids).detach()
    frozen = {name: each.clone() for name, each in loaded.state_dict().items()}
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=True)
    if targets == "all-linear":
        config.target_modules = [
            name for name, each in loaded.named_modules() if isinstance(each, nn.Linear)
        ]
    adapted = peft.get_peft_model(loaded, config)
    torch.testing.assert_close(adapted(ids), want, rtol=1e-4, atol=1e-5)
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    call = torch.compile(adapted, backend="ort")
    optimizer = torch.optim.Adam(
        [each for each in adapted.parameters() if each.requires_grad], 0.05
    )
    losses = []
    for _ in range(6):
        loss = call(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch_ort.counters()["fallbacks"] == 0
    got = adapted(ids).detach()
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids), got, rtol=1e-3, atol=1e-4)
    changed = {n for n, each in merged.state_dict().items() if not torch.equal(each, frozen[n])}
    assert changed
    assert all(frozen[name].ndim == 2 for name in changed)
    torch_ort.export_onnx(merged, tmp_path / "merged.onnx")
    result = by_onnxruntime((tmp_path / "merged.onnx").read_bytes(), x=ids)
    torch.testing.assert_close(result, got, rtol=1e-3, atol=1e-4)
    onnx.checker.check_model(tmp_path / "merged.onnx")


def test_a_layer_that_was_replaced_is_not_written_as_it_was(tmp_path: Path) -> None:
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))

    class Other(nn.Module):
        def forward(self, x, weight):
            return x @ weight + 1

    loaded.first.linear = Other()
    with pytest.raises(
        UserError, match=r"module 'first\.linear': got Other, want what load_onnx made; merge"
    ):
        torch_ort.export_onnx(loaded, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_products_with_one_weight_and_other_biases_are_other_layers() -> None:
    model = model_of("""(float[N, 3] y)
    <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3] a = {1, 1, 1}, float[3] b = {5, 5, 5}> {
      h = Gemm(x, w, a)
      y = Gemm(h, w, b)
    }""")
    loaded = torch_ort.load_onnx(model)
    biases = [each.bias for each in loaded.modules() if isinstance(each, nn.Linear)]
    assert [each.tolist() for each in biases] == [[1, 1, 1], [5, 5, 5]]


def test_statistics_that_others_read_do_not_move() -> None:
    model = model_of(
        """(float[N, 3, 4] y)
        <float[3] scale = {1, 2, 3}, float[3] zero = {0, 0, 0}, float[3] one = {1, 1, 1}> {
          mean = Identity(zero)
          h = BatchNormalization(x, scale, zero, mean, one)
          y = BatchNormalization(h, scale, zero, mean, one)
        }""",
        "float[N, 3, 4] x",
    )
    loaded, x = torch_ort.load_onnx(model), torch.randn(2, 3, 4)
    assert {name for name, _ in loaded.named_parameters()} == {"scale"}
    torch.testing.assert_close(loaded(x).detach(), by_onnxruntime(model.SerializeToString(), x=x))
    with pytest.raises(Unsupported, match="other nodes read its running statistics, too"):
        loaded.train()(x)


def test_statistics_that_nodes_of_training_share() -> None:
    model = model_of(
        """(float[N, 3, 4] y)
        <float[3] scale = {1, 2, 3}, float[3] zero = {0, 0, 0}, float[3] one = {1, 1, 1}> {
          h, m1, v1 = BatchNormalization <training_mode = 1> (x, scale, zero, zero, one)
          y, m2, v2 = BatchNormalization <training_mode = 1> (h, scale, zero, zero, one)
        }""",
        "float[N, 3, 4] x",
    )
    loaded, x = torch_ort.load_onnx(model), torch.randn(2, 3, 4)
    scale = torch.tensor([1.0, 2.0, 3.0])
    want = x
    for _ in range(2):
        want = nn.functional.batch_norm(want, None, None, scale, training=True)
    torch.testing.assert_close(loaded(x).detach(), want, rtol=1e-4, atol=1e-5)


def test_statistics_behind_an_identity_move() -> None:
    model = model_of(
        """(float[N, 3, 4] y)
        <float[3] scale = {1, 2, 3}, float[3] shift = {0, 1, 0}, float[3] mean = {0, 0, 0},
         float[3] var = {1, 1, 1}> {
          same = Identity(mean)
          y = BatchNormalization(x, scale, shift, same, var)
        }""",
        "float[N, 3, 4] x",
    )
    loaded = torch_ort.load_onnx(model).train()
    loaded(torch.randn(2, 3, 4) + 5)
    assert loaded.mean.mean().item() > 0.1


def test_hooks_on_inputs_of_a_pickle() -> None:
    model = model_of("(float[N] y) { y = Sub(a, b) }", "float[N] a, float[N] b")
    loaded = torch_ort.load_onnx(model)
    assert loaded.value("a") is not loaded.value("b")
    again = pickle.loads(pickle.dumps(loaded))
    again.value("a").register_forward_hook(lambda module, args, result: result * 10)
    assert again(torch.ones(1), torch.ones(1)).tolist() == [9.0]
