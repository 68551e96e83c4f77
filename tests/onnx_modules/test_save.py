"""What was loaded and trained, as a file again: for onnxruntime, and to be loaded once more."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx_cases import MODELS, TWO_LAYERS, by_onnxruntime, export, model_of
from torch import nn

import torch_ort
from torch_ort import UserError

pytestmark = pytest.mark.ort_only


def train(module: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    call = torch.compile(module, backend="ort")
    for _ in range(3):
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_trained_models_results(name, tmp_path: Path):
    make, sample, names = MODELS[name]
    data, x = export(make(), sample(), names, 17), sample()
    loaded = torch_ort.load_onnx(data)
    before = loaded(x)
    train(loaded, x)
    path = tmp_path / "trained.onnx"
    torch_ort.export_onnx(loaded, path)
    got = by_onnxruntime(path.read_bytes(), x=x)
    torch.testing.assert_close(got, loaded(x).detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, before, rtol=1e-3)
    torch.testing.assert_close(torch_ort.load_onnx(path)(x), loaded(x), rtol=0, atol=0)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_nothing_else_changes(through, tmp_path: Path):
    model = model_of(TWO_LAYERS)
    model.producer_name, model.doc_string = "by hand", "two layers"
    model.metadata_props.add(key="source", value="a test")
    model.graph.node[0].doc_string = "the first"
    loaded = through(torch_ort.load_onnx(model, trainable="second.*"))
    with torch.no_grad():
        loaded.get_parameter("second.bias").copy_(torch.tensor([7.0, 9.0]))
    torch_ort.export_onnx(loaded, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    tensors = {each.name: numpy_helper.to_array(each) for each in written.graph.initializer}
    assert tensors["second.bias"].tolist() == [7.0, 9.0]
    for each in model.graph.initializer:
        if each.name != "second.bias":
            assert (tensors[each.name] == numpy_helper.to_array(each)).all()
    for proto in (model, written):
        del proto.graph.initializer[:]
    assert written == model


def test_weights_have_the_dtype_of_the_file(tmp_path: Path):
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS)).to(torch.bfloat16)
    torch_ort.export_onnx(loaded, tmp_path / "out.onnx")
    again = torch_ort.load_onnx(tmp_path / "out.onnx")
    assert {each.dtype for each in again.parameters()} == {torch.float32}
    for name, tensor in again.named_parameters():
        torch.testing.assert_close(tensor, loaded.get_parameter(name).float(), rtol=0, atol=0)


def test_external_data_stays_external(tmp_path: Path):
    model = model_of("(float[N, 64] y) <float[64, 64] weight = {0}> { y = MatMul(x, weight) }",
                     "float[N, 64] x")  # fmt: skip
    weight = torch.randn(64, 64)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight.numpy(), "weight"))
    source = tmp_path / "in.onnx"
    onnx.save(model, source, save_as_external_data=True, size_threshold=0, location="in.data")
    before = (tmp_path / "in.data").read_bytes()
    loaded, x = torch_ort.load_onnx(source), torch.randn(2, 64)
    with torch.no_grad():
        loaded.get_parameter("weight").mul_(2)
    for _ in range(2):  # the second replaces the first
        torch_ort.export_onnx(loaded, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size == weight.numel() * 4
    assert (tmp_path / "out.onnx").stat().st_size < 1000
    assert (tmp_path / "in.data").read_bytes() == before
    torch.testing.assert_close(torch_ort.load_onnx(tmp_path / "out.onnx")(x), x @ weight * 2)


def test_what_cannot_be_written(tmp_path: Path):
    path = tmp_path / "out.onnx"
    loaded = torch_ort.load_onnx(model_of(TWO_LAYERS))
    loaded.second.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"sizes of 'second\.bias': got \[3\], want \[2\]"):
        torch_ort.export_onnx(loaded, path)
    assert not path.exists()


def test_external_data_that_the_module_does_not_hold(tmp_path: Path):
    model = model_of(TWO_LAYERS)
    for each in model.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each), each.name))
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="net.data")
    loaded, x = torch_ort.load_onnx(path), torch.randn(2, 3)
    torch_ort.export_onnx(loaded, tmp_path / "out.onnx")
    torch.testing.assert_close(torch_ort.load_onnx(tmp_path / "out.onnx")(x), loaded(x))
