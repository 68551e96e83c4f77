"""Models from PyTorch to a file, into training, and to a file again, by either exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from onnx_cases import by_onnxruntime
from round_trip_models import MODELS, library_models
from torch import nn

import torch_ort

pytestmark = pytest.mark.ort_only
STEPS = 20


def exported(
    source: nn.Module,
    x: torch.Tensor,
    names: dict[int, str],
    path: Path,
    opset: int,
    by_dynamo: bool,
) -> None:
    """Export the model as it evaluates; equal weights, which become one, are moved apart."""
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if by_dynamo:
            pytest.importorskip("onnxscript")
            logging.disable(logging.WARNING)
            try:
                torch.onnx.export(
                    source.eval(), (x,), path, dynamo=True, opset_version=opset, input_names=["x"],
                    output_names=["y"], dynamic_shapes=(dict(names),),
                    external_data=True, optimize=False,
                )  # fmt: skip
            finally:
                logging.disable(logging.NOTSET)
        else:
            torch.onnx.export(
                source.eval(), (x,), path, dynamo=False, opset_version=opset, input_names=["x"],
                output_names=["y"], dynamic_axes={"x": names}, do_constant_folding=False,
            )  # fmt: skip


def train(model: nn.Module, call, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(make, sample, names, tmp_path: Path, opset: int, by_dynamo: bool) -> None:
    torch.manual_seed(0)
    source, x = make(), sample()
    path = tmp_path / "net.onnx"
    exported(source, x, names, path, opset, by_dynamo)
    loaded = torch_ort.load_onnx(path)
    doubled = torch.cat([x, x])
    for given in (x, doubled):
        want = by_onnxruntime(path, x=given)
        torch.testing.assert_close(loaded(given).detach(), want, rtol=1e-3, atol=1e-4)
    losses = train(loaded, torch.compile(loaded, backend="ort"), x)
    # The source in evaluation, as the file was written.
    assert losses == pytest.approx(train(source.eval(), source, x), rel=2e-3)
    assert torch_ort.counters()["fallbacks"] == 0
    torch.testing.assert_close(loaded(x), source(x), rtol=1e-2, atol=1e-3)
    torch_ort.export_onnx(loaded, tmp_path / "trained.onnx")
    got = by_onnxruntime(tmp_path / "trained.onnx", x=doubled)
    torch.testing.assert_close(got, loaded(doubled).detach(), rtol=1e-3, atol=1e-4)
    written, read = onnx.load(tmp_path / "trained.onnx"), onnx.load(path)
    assert [each.name for each in written.graph.node] == [each.name for each in read.graph.node]


@pytest.mark.parametrize("name", MODELS)
def test_by_scripts(name: str, tmp_path: Path) -> None:
    # Scaled dot-product attention has been exported since opset 14.
    opset = 14 if name == "causal" else [12, 13, 15, 17][sorted(MODELS).index(name) % 4]
    check(*MODELS[name], tmp_path, opset, by_dynamo=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_by_dynamo(name: str, tmp_path: Path) -> None:
    opset = [18, 20, 23][sorted(MODELS).index(name) % 3]
    check(*MODELS[name], tmp_path, opset, by_dynamo=True)


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "distilbert", "gpt2", "llama", "resnet", "vit", "wav2vec"]
)
def test_of_transformers(name: str, tmp_path: Path) -> None:
    check(*library_models()[name], tmp_path, 18, by_dynamo=True)
