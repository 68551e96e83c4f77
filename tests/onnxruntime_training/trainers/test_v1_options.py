"""Options and descriptions of the second ORTTrainer: defaults, and what is wrong in words."""

from __future__ import annotations

import pytest
import torch

from torch_ort.onnxruntime_training.trainers import unsupported
from torch_ort.onnxruntime_training.trainers.v1.model_desc import ModelDescription
from torch_ort.optim.lr_scheduler import LinearWarmupLRScheduler
from torch_ort.trainers.loss_scaler import DynamicLossScaler
from torch_ort.trainers.v1 import ORTTrainerOptions

# As the specification lists them.
DEFAULTS = {
    "batch.gradient_accumulation_steps": 1,
    "device.mem_limit": 0,
    "distributed.world_rank": 0,
    "distributed.world_size": 1,
    "distributed.local_rank": 0,
    "distributed.data_parallel_size": 1,
    "distributed.horizontal_parallel_size": 1,
    "distributed.pipeline_parallel.pipeline_parallel_size": 1,
    "distributed.allreduce_post_accumulation": False,
    "distributed.deepspeed_zero_optimization.stage": 0,
    "distributed.enable_adasum": False,
    "lr_scheduler": None,
    "mixed_precision.enabled": False,
    "mixed_precision.loss_scaler": None,
    "graph_transformer.attn_dropout_recompute": False,
    "graph_transformer.gelu_recompute": False,
    "graph_transformer.transformer_layer_recompute": False,
    "graph_transformer.number_recompute_layers": 0,
    "graph_transformer.propagate_cast_ops_config": {},
    "utils.frozen_weights": [],
    "utils.grad_norm_clip": True,
    "utils.memory_efficient_gradient": False,
    "utils.run_symbolic_shape_infer": False,
    "debug.deterministic_compute": False,
    "debug.check_model_export": False,
    "_internal_use.enable_internal_postprocess": True,
    "_internal_use.extra_postprocess": None,
    "_internal_use.onnx_opset_version": 14,
    "_internal_use.enable_onnx_contrib_ops": True,
    "provider_options": {},
    "session_options": None,
}


def read(options, path):
    for part in path.split("."):
        options = getattr(options, part)
    return options


def written(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("path", DEFAULTS)
def test_defaults(path):
    assert read(ORTTrainerOptions(), path) == DEFAULTS[path]
    assert read(ORTTrainerOptions({}), path) == DEFAULTS[path]
    assert read(ORTTrainerOptions(written(path, DEFAULTS[path])), path) == DEFAULTS[path]


def test_the_device_is_a_gpu_where_there_is_one():
    assert ORTTrainerOptions().device.id == ("cuda" if torch.cuda.is_available() else "cpu")


def test_options_do_not_share_lists():
    ORTTrainerOptions().utils.frozen_weights.append("w")
    assert ORTTrainerOptions().utils.frozen_weights == []


def test_given_options_stand_beside_defaults():
    scaler, schedule = DynamicLossScaler(), LinearWarmupLRScheduler(10)
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 4},
            "mixed_precision": {"enabled": True, "loss_scaler": scaler},
            "lr_scheduler": schedule,
            "distributed": {"deepspeed_zero_optimization": {"stage": 1}},
        }
    )
    assert options.batch.gradient_accumulation_steps == 4
    assert options.mixed_precision.loss_scaler is scaler
    assert options.lr_scheduler is schedule
    assert options.distributed.deepspeed_zero_optimization.stage == 1
    assert options.distributed.world_size == 1
    assert "deepspeed_zero_optimization" in repr(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (3, "ORTTrainerOptions: got int, want a dict"),
        ({"batches": {}}, r"batches: unknown, want one of batch, .*; did you mean batch\?"),
        ({"batch": 3}, "batch: got 3, want a dict"),
        ({"batch": {"size": 3}}, "batch.size: unknown, want one of gradient_accumulation_steps"),
        (written("batch.gradient_accumulation_steps", 0), "got 0, want a whole number, at least 1"),
        (written("batch.gradient_accumulation_steps", True), "got True, want a whole number"),
        (written("device.id", "gpu9"), "device.id: got 'gpu9', want a device"),
        (written("mixed_precision.enabled", 1), "enabled: got 1, want a bool"),
        (written("mixed_precision.loss_scaler", 1.0), "got 1.0, want an amp.LossScaler"),
        ({"lr_scheduler": "linear"}, "got 'linear', want a scheduler of optim.lr_scheduler"),
        (written("utils.frozen_weights", "w"), "got 'w', want a list of names"),
        ({"utils": {"clip": 1}, "debug": {"check_model_export": 2}},
         "utils.clip: unknown, .*; debug.check_model_export: got 2, want a bool"),
        (written("distributed.deepspeed_zero_optimization.stage", 2),
         "deepspeed_zero_stage: got 2, want 0 or 1; .*deepspeed.initialize"),
        (written("distributed.enable_adasum", True), "enable_adasum: got True, which torch_ort do"),
        (written("distributed.horizontal_parallel_size", 2),
         "horizontal_parallel_size: got 2, .*torch.distributed.tensor.parallel"),
        (written("distributed.pipeline_parallel.pipeline_parallel_size", 2),
         "pipeline_parallel: got {'pipeline_parallel_size': 2}, .*torch.distributed.pipelining"),
        (written("debug.graph_save_paths.model_with_gradient_graph_path", "m.onnx"),
         "graph_save_paths: got {'model_with_gradient_graph_path': 'm.onnx'}, .*save_onnx=True"),
        (written("_internal_use.extra_postprocess", print), "extra_postprocess: .*register_graph_"),
        (written("_internal_use.onnx_opset_version", 9), "onnx_opset_version: got 9, want from 12"),
    ],
)  # fmt: skip
def test_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        ORTTrainerOptions(options)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("device.mem_limit", 1000),
        ("graph_transformer.gelu_recompute", True),
        ("graph_transformer.propagate_cast_ops_config", {"level": 1}),
        ("utils.run_symbolic_shape_infer", True),
        ("_internal_use.enable_internal_postprocess", False),
        ("provider_options", {"cuda": {}}),
        ("session_options", object()),
        ("distributed.data_parallel_size", 3),
    ],
)
def test_what_changes_nothing_is_told_once(path, value, caplog, monkeypatch):
    monkeypatch.setattr(unsupported, "_warned", set())
    for _ in range(2):
        assert read(ORTTrainerOptions(written(path, value)), path) == value
    (record,) = (it for it in caplog.records if it.name == "torch_ort.trainers")
    assert record.getMessage().startswith(f"ORTTrainer: {path} changes nothing here: ")


def test_a_description():
    desc = ModelDescription(
        {"inputs": [("x", ["batch", 6])], "outputs": [("y", (3,)), ("loss", [], True)]}
    )
    assert [(it.name_, it.shape_) for it in desc.inputs] == [("x", ["batch", 6])]
    assert [(it.name_, it.shape_) for it in desc.outputs] == [("y", [3]), ("loss", [])]
    assert desc.loss == "loss"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([], "model_desc: got list, want a dict"),
        ({"labels": []}, "model_desc: labels: unknown, want inputs and outputs"),
        ({"inputs": []}, r"inputs: got \[\], want a list of \(name, shape\)"),
        ({"inputs": [("x",)]}, r"inputs\[0\]: got \('x',\), want \(name, shape\)"),
        ({"inputs": [(1, [])]}, r"inputs\[0\]: name: got 1, want a string"),
        ({"inputs": [("x", [1.5])]}, r"shape of x: got \[1.5\], want a list of numbers and names"),
        ({"inputs": [("x", []), ("x", [])]}, "inputs: the name 'x' comes twice"),
        ({"outputs": [("y", [], 1)]}, "is_loss of y: got 1, want a bool"),
        ({"outputs": [("y", [])]}, r"outputs: got 0 losses, want one, as \(name, \[\], True\)"),
        ({"outputs": [("y", [], True), ("z", [], True)]}, "outputs: got 2 losses, want one"),
        ({"inputs": [(1, [])], "outputs": [("y", 3)]}, "name: got 1.*; outputs.0.: shape of y"),
    ],
)
def test_wrong_descriptions(change, words):
    right = {"inputs": [("x", [])], "outputs": [("loss", [], True)]}
    with pytest.raises(ValueError, match=words):
        ModelDescription({**right, **change} if isinstance(change, dict) else change)
