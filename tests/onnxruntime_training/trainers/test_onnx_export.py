"""`save_as_onnx`: a file with the described names that onnxruntime runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from eager_loops import WithLoss, batches, net
from models import module_with

from torch_ort.optim import SGDConfig
from torch_ort.trainers import v0
from torch_ort.trainers.v1 import ORTTrainer, ORTTrainerOptions

pytestmark = pytest.mark.ort_only

DESC = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def make(model, desc=DESC, loss_fn=F.cross_entropy, **internal):
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "_internal_use": internal})
    return ORTTrainer(model, desc, SGDConfig(lr=0.1), loss_fn, options)


def run(path, **inputs):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: it.numpy() for name, it in inputs.items()})
    names = [it.name for it in session.get_outputs()]
    return {name: torch.from_numpy(np.asarray(it)) for name, it in zip(names, found, strict=True)}


def sizes_of(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("opset", [12, 14, 17])
def test_other_programs_compute_what_evaluation_does(opset, tmp_path):
    model = net()
    trainer = make(model, onnx_opset_version=opset)
    for x, y in batches():
        trainer.train_step(x, y)
    path = tmp_path / "folder" / "net.onnx"
    trainer.save_as_onnx(path)
    x, y = batches(2)[1]
    loss, logits = trainer.eval_step(x, y)
    torch.testing.assert_close(
        run(path, x=x, label=y), {"loss": loss, "logits": logits}, rtol=1e-4, atol=1e-5
    )
    onnx.checker.check_model(path, full_check=True)
    saved = onnx.load(path)
    sizes = {it.name: sizes_of(it) for it in (*saved.graph.input, *saved.graph.output)}
    assert sizes == {"x": ["batch", 6], "label": ["batch"], "loss": [], "logits": ["batch", 3]}
    assert saved.opset_import[0].version <= opset
    held = {it.name: onnx.numpy_helper.to_array(it) for it in saved.graph.initializer}
    for name, it in model.named_parameters():
        np.testing.assert_array_equal(held[name], it.detach().numpy())
    assert [it.name for it in path.parent.iterdir()] == ["net.onnx"]
    assert model.training


def test_the_first_trainer_writes_it_too(tmp_path):
    desc = v0.ModelDescription(
        [v0.IODescription("x", ["batch", 6]), v0.IODescription("label", ["batch"])],
        [v0.IODescription("loss", []), v0.IODescription("logits", ["batch", 3])],
    )
    rate = v0.IODescription("Learning_Rate", [1], torch.float32)
    trainer = v0.ORTTrainer(net(), F.cross_entropy, desc, "SGDOptimizer", None, rate, "cpu")
    with pytest.raises(RuntimeError, match="save_as_onnx: no step has run yet, which tells what"):
        trainer.save_as_onnx(tmp_path / "net.onnx")
    x, y = batches(1)[0]
    trainer.train_step(x, y, 0.1)
    trainer.save_as_onnx(tmp_path / "net.onnx")
    logits = trainer.eval_step(x, fetches=["logits"])
    got = run(tmp_path / "net.onnx", x=x, label=y)["logits"]
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-5)


def test_described_names_that_values_inside_have_too(tmp_path):
    desc = {
        "inputs": [("add", ["n"]), ("mul_1", ["n"])],
        "outputs": [("sum_1", [], True), ("mul", ["n"]), ("b", ["n"]), ("c", ["n"]), ("d", ["n"])],
    }
    model = module_with(lambda self, x, y: ((x * y).sum(), x * y, x * y, x + y, x))
    trainer = make(model, desc, None)
    x, y = torch.randn(4), torch.randn(4)
    trainer.eval_step(x, y)
    trainer.save_as_onnx(tmp_path / "net.onnx")
    got = run(tmp_path / "net.onnx", add=x, mul_1=y)
    want = dict(zip(("sum_1", "mul", "b", "c", "d"), model(x, y), strict=True))
    torch.testing.assert_close(got, want)


def test_outputs_by_name_and_an_order_of_their_own(tmp_path):
    desc = {
        "inputs": [("labels", ["batch"]), ("x", ["batch", 6])],
        "outputs": [("logits", ["batch", 3]), ("loss", [], True)],
    }
    trainer = make(WithLoss(net()), desc, None)
    x, y = batches(1)[0]
    trainer.train_step(y, x)
    trainer.save_as_onnx(tmp_path / "net.onnx")
    logits, loss = trainer.eval_step(y, x)
    got = run(tmp_path / "net.onnx", x=x, labels=y)
    torch.testing.assert_close(got, {"logits": logits, "loss": loss}, rtol=1e-4, atol=1e-5)
