"""The options of the second ORTTrainer: a dict of dicts, checked, as nested attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from torch_ort.onnxruntime_training.optim.lr_scheduler import LRScheduler
from torch_ort.onnxruntime_training.trainers.loss_scaler import LossScaler
from torch_ort.onnxruntime_training.trainers.unsupported import (
    checked_opset,
    checked_stage,
    refuse,
    tell_once,
)
from torch_ort.options import near


class ORTTrainerOptions:
    """All options of an ORTTrainer, those that are not given at their defaults.

    `docs/trainers.md` has the table. `ORTTrainerOptions({"batch": {"gradient_accumulation_steps":
    4}}).batch.gradient_accumulation_steps` is 4.

    Raises ValueError, which lists all unknown names and values of a wrong kind, and for what
    there is not here, with what to do.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"ORTTrainerOptions: got {type(options).__name__}, want a dict")
        problems: list[str] = []
        values = _filled("", _SCHEMA, options or {}, problems)
        if problems:
            raise ValueError(f"ORTTrainerOptions: {'; '.join(problems)}")
        vars(self).update({name: _as_attributes(value) for name, value in values.items()})
        _look_at(values)

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"ORTTrainerOptions({inner})"


class _Free(dict):
    """A dict whose keys are not options."""


def _is(kind: type | tuple[type, ...], words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        is_bool = isinstance(value, bool) and kind is int
        return "" if isinstance(value, kind) and not is_bool else words

    return check


def _whole(low: int) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        is_fit = isinstance(value, int) and not isinstance(value, bool) and value >= low
        return "" if is_fit else f"a whole number, at least {low}"

    return check


def _names(value: Any) -> str:
    is_fit = isinstance(value, list | tuple) and all(isinstance(it, str) for it in value)
    return "" if is_fit else "a list of names"


def _device(value: Any) -> str:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return "a device"
    return ""


_BOOL = _is(bool, "a bool")
_TEXT = _is(str, "a string")
_ANY = _is(object, "")


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# Each option with its default, and a function that says what is wrong with a value, or "". A
# default that is a function is called each time.
_SCHEMA: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": (1, _whole(1))},
    "device": {"id": (_default_device, _device), "mem_limit": (0, _whole(0))},
    "distributed": {
        "world_rank": (0, _whole(0)),
        "world_size": (1, _whole(1)),
        "local_rank": (0, _whole(0)),
        "data_parallel_size": (1, _whole(1)),
        "horizontal_parallel_size": (1, _whole(1)),
        "pipeline_parallel": {
            "pipeline_parallel_size": (1, _whole(1)),
            "num_pipeline_micro_batches": (1, _whole(1)),
            "pipeline_cut_info_string": ("", _TEXT),
            "sliced_schema": (_Free, _is(dict, "a dict")),
            "sliced_axes": (_Free, _is(dict, "a dict")),
            "sliced_tensor_names": (list, _names),
        },
        "allreduce_post_accumulation": (False, _BOOL),
        "deepspeed_zero_optimization": {"stage": (0, _whole(0))},
        "enable_adasum": (False, _BOOL),
    },
    "lr_scheduler": (None, _is((LRScheduler, type(None)), "a scheduler of optim.lr_scheduler")),
    "mixed_precision": {
        "enabled": (False, _BOOL),
        "loss_scaler": (None, _is((LossScaler, type(None)), "an amp.LossScaler")),
    },
    "graph_transformer": {
        "attn_dropout_recompute": (False, _BOOL),
        "gelu_recompute": (False, _BOOL),
        "transformer_layer_recompute": (False, _BOOL),
        "number_recompute_layers": (0, _whole(0)),
        "propagate_cast_ops_config": (_Free, _is(dict, "a dict")),
    },
    "utils": {
        "frozen_weights": (list, _names),
        "grad_norm_clip": (True, _BOOL),
        "memory_efficient_gradient": (False, _BOOL),
        "run_symbolic_shape_infer": (False, _BOOL),
    },
    "debug": {
        "deterministic_compute": (False, _BOOL),
        "check_model_export": (False, _BOOL),
        "graph_save_paths": {
            "model_after_graph_transforms_path": ("", _TEXT),
            "model_with_gradient_graph_path": ("", _TEXT),
            "model_with_training_graph_path": ("", _TEXT),
            "model_with_training_graph_after_optimization_path": ("", _TEXT),
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": (True, _BOOL),
        "extra_postprocess": (None, _ANY),
        "onnx_opset_version": (14, _whole(1)),
        "enable_onnx_contrib_ops": (True, _BOOL),
    },
    "provider_options": (_Free, _is(dict, "a dict")),
    "session_options": (None, _ANY),
}

# Options that do not change the numbers of a run, in the order of the table.
_WITHOUT_EFFECT = (
    "device.mem_limit",
    "distributed.local_rank",
    "graph_transformer.attn_dropout_recompute",
    "graph_transformer.gelu_recompute",
    "graph_transformer.transformer_layer_recompute",
    "graph_transformer.number_recompute_layers",
    "graph_transformer.propagate_cast_ops_config",
    "utils.memory_efficient_gradient",
    "utils.run_symbolic_shape_infer",
    "debug.check_model_export",
    "_internal_use.enable_internal_postprocess",
    "_internal_use.enable_onnx_contrib_ops",
    "provider_options",
    "session_options",
)


def _filled(
    above: str, schema: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Give a group with its defaults; adds to `problems` what is wrong with it."""
    for name in given:
        if name not in schema:
            known = ", ".join(schema)
            problems.append(f"{above}{name}: unknown, want one of {known}{near(name, [*schema])}")
    values: dict[str, Any] = {}
    for name, row in schema.items():
        path = f"{above}{name}"
        if isinstance(row, dict):
            inner = given.get(name, {})
            if not isinstance(inner, Mapping):
                problems.append(f"{path}: got {inner!r}, want a dict")
                inner = {}
            values[name] = _filled(f"{path}.", row, inner, problems)
            continue
        default, wanted = row
        value = given[name] if name in given else default() if callable(default) else default
        if name in given and (words := wanted(value)):
            problems.append(f"{path}: got {value!r}, want {words}")
        values[name] = _Free(value) if isinstance(value, dict) else value
    return values


def _as_attributes(value: Any) -> Any:
    if not isinstance(value, dict) or isinstance(value, _Free):
        return value
    return SimpleNamespace(**{name: _as_attributes(it) for name, it in value.items()})


def _look_at(values: Mapping[str, Any]) -> None:
    """Raise for options that there is no way to obey, and tell of those that change nothing."""
    distributed, internal = values["distributed"], values["_internal_use"]
    checked_stage(distributed["deepspeed_zero_optimization"]["stage"])
    checked_opset("_internal_use.onnx_opset_version", internal["onnx_opset_version"])
    refuse("distributed.enable_adasum", distributed["enable_adasum"])
    wide = distributed["horizontal_parallel_size"]
    refuse("distributed.horizontal_parallel_size", wide if wide > 1 else None)
    pipeline = {
        name: value
        for name, value in distributed["pipeline_parallel"].items()
        if value not in (1, "", {}, [])
    }
    refuse("distributed.pipeline_parallel", pipeline)
    paths = {name: path for name, path in values["debug"]["graph_save_paths"].items() if path}
    refuse("debug.graph_save_paths", paths)
    refuse("_internal_use.extra_postprocess", internal["extra_postprocess"])
    size = distributed["data_parallel_size"]
    tell_once("distributed.data_parallel_size", size not in (1, distributed["world_size"]))
    for path in _WITHOUT_EFFECT:
        group, row, value = values, None, _SCHEMA
        for part in path.split("."):
            group, value = group[part], value[part]
        row = value[0]
        tell_once(path, group != (row() if callable(row) else row))
