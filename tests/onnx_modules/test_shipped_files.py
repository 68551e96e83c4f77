"""Files that the onnx package ships, which exporters wrote years ago, in opsets from 6 on."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx_cases import by_onnxruntime

import torch_ort
from torch_ort import Unsupported

pytestmark = pytest.mark.ort_only

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
NETWORKS = sorted(path.stem for path in (DATA / "light").glob("*.onnx"))
LAYERS = [
    path.parent
    for kind in ("pytorch-converted", "pytorch-operator")
    for path in sorted((DATA / kind).glob("*/model.onnx"))
]
needs_files = pytest.mark.skipif(not NETWORKS, reason="onnx was installed without its data")


def tensor(path: Path) -> torch.Tensor:
    proto = onnx.TensorProto.FromString(path.read_bytes())
    return torch.from_numpy(numpy_helper.to_array(proto).copy())


@needs_files
@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_layers(folder: Path) -> None:
    if "prelu" in folder.name.lower():
        with pytest.raises(Unsupported, match="PRelu: opset: got 6, want 7 or newer"):
            torch_ort.load_onnx(folder / "model.onnx")
        return
    loaded = torch_ort.load_onnx(folder / "model.onnx")
    data = folder / "test_data_set_0"
    inputs = [tensor(data / f"input_{i}.pb") for i in range(len(list(data.glob("input_*"))))]
    got = loaded(*inputs)
    for i, mine in enumerate(got if isinstance(got, tuple) else (got,)):
        want = tensor(data / f"output_{i}.pb")
        torch.testing.assert_close(mine.detach(), want, rtol=1e-3, atol=1e-5, equal_nan=True)


@needs_files
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name.endswith(("resnet50", "squeezenet")) else pytest.mark.slow
        )
        for name in NETWORKS
    ],
)
def test_networks_are_trained(name: str, tmp_path: Path) -> None:
    path = DATA / "light" / f"{name}.onnx"
    loaded = torch_ort.load_onnx(path)
    model = onnx.load(path)
    weights = {each.name for each in model.graph.initializer}
    (value,) = [each for each in model.graph.input if each.name not in weights]
    x = torch.randn([dim.dim_value for dim in value.type.tensor_type.shape.dim])
    want = by_onnxruntime(path, **{value.name: x})
    torch.testing.assert_close(loaded(x).detach(), want, rtol=1e-3, atol=1e-5)
    before = {key: each.clone() for key, each in loaded.state_dict().items()}
    call = torch.compile(loaded, backend="ort")
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    for _ in range(2):
        call(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(loaded.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert torch_ort.counters()["fallbacks"] == 0
    assert any(not torch.equal(each, before[key]) for key, each in loaded.state_dict().items())
    torch_ort.export_onnx(loaded, tmp_path / "net.onnx")
    got = by_onnxruntime(tmp_path / "net.onnx", **{value.name: x})
    torch.testing.assert_close(got, loaded(x).detach(), rtol=1e-3, atol=1e-4)
