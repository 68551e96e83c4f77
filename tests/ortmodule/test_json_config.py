# Settings of an ORTModule from a JSON file: every key, wrong values, and what a change makes anew.
from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import DebugOptions, LogLevel, ORTModule, UserError
from torch_ort.capture import logs
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException, load_from_json

pytestmark = pytest.mark.ort_only

KEYS = (
    "DebugOptions", "EnableCustomAutogradFunction", "FallbackPolicy", "OnnxOpsetVersion",
    "SkipCheck", "UseExternalGPUAllocator", "RunSymbolicShapeInference", "PropagateCastOps",
    "EnableGradAccOptimization", "UseStaticShape", "UseMemoryEfficientGradient",
)  # fmt: skip
BOOLS = (
    "EnableCustomAutogradFunction", "UseExternalGPUAllocator", "RunSymbolicShapeInference",
    "EnableGradAccOptimization", "UseStaticShape", "UseMemoryEfficientGradient",
)  # fmt: skip
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """Give each test an environment without our variables, and a log that has said nothing."""
    for name in os.environ:
        if name.startswith("ORTMODULE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(logs, "_said", set())


@pytest.fixture
def write(tmp_path) -> Callable[[Any], Path]:
    """Return a function that writes settings, or plain text, into a file."""

    def to_file(config: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return to_file


@pytest.fixture
def load(write) -> Callable[..., ORTModule]:
    """Return a function that gives an ORTModule with settings from a file."""

    def loaded(settings: Any, module: nn.Module | None = None, **debug: Any) -> ORTModule:
        wrapped = ORTModule(module or nn.Linear(4, 3), DebugOptions(**debug))
        load_from_json(wrapped, write(settings))
        return wrapped

    return loaded


class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y * 3


@pytest.mark.parametrize("as_type", [str, Path])
def test_path_by_argument(as_type, write):
    module = ORTModule(nn.Linear(4, 3))
    load_from_json(module, as_type(write({"DebugOptions": {"LogLevel": "ERROR"}})))
    assert module._debug_options.log_level is LogLevel.ERROR


def test_path_by_environment(write, monkeypatch):
    monkeypatch.setenv(
        "ORTMODULE_JSON_CONFIG_PATH", str(write({"DebugOptions": {"LogLevel": "INFO"}}))
    )
    module = ORTModule(nn.Linear(4, 3))
    assert module._debug_options.log_level is LogLevel.WARNING
    load_from_json(module)
    assert module._debug_options.log_level is LogLevel.INFO


def test_an_argument_wins_over_the_environment(write, monkeypatch):
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", "/nowhere/at/all.json")
    load_from_json(ORTModule(nn.Linear(4, 3)), write({}))


def test_no_path():
    words = "load_from_json: got no path, want one as argument or in ORTMODULE_JSON_CONFIG_PATH"
    with pytest.raises(UserError, match=words):
        load_from_json(ORTModule(nn.Linear(4, 3)))


def test_no_file():
    with pytest.raises(FileNotFoundError, match="/nowhere/at/all"):
        load_from_json(ORTModule(nn.Linear(4, 3)), "/nowhere/at/all.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"load_from_json: .*config\.json: Expecting property name"),
        ("", r"load_from_json: .*config\.json: Expecting value"),
        ('{"UseStaticShape": True}', r"load_from_json: .*config\.json: Expecting value"),
        ("[]", r"load_from_json: .*config\.json: got list, want an object"),
        ("3", r"load_from_json: .*config\.json: got int, want an object"),
    ],
)
def test_no_settings(text, words, load):
    with pytest.raises(UserError, match=words):
        load(text)


@pytest.mark.parametrize("key", ["debugOptions", "LogLevel", "UseGPU", ""])
def test_unknown_key(key, load):
    with pytest.raises(
        UserError, match=f"load_from_json: unknown key '{key}', want one of"
    ) as info:
        load({key: True})
    assert set(re.split("want one of |, |; ", str(info.value))) >= set(KEYS)


def test_unknown_key_of_debug_options(load):
    words = (
        "load_from_json: unknown key 'Prefix' of DebugOptions, want one of "
        "LogLevel, SaveONNX, ONNXPrefix, SaveONNXPath"
    )
    with pytest.raises(UserError, match=words):
        load({"DebugOptions": {"Prefix": "x"}})


@pytest.mark.parametrize(
    ("key", "value"), zip(BOOLS, [1, 0, "true", None, [True], 1.0], strict=True)
)
def test_a_bool_has_to_be_one(key, value, load):
    with pytest.raises(UserError, match=f"load_from_json: {key}: got .*, want true or false"):
        load({key: value})


@pytest.mark.parametrize("value", [1, "true", None])
def test_save_onnx_has_to_be_a_bool(value, load):
    with pytest.raises(UserError, match=r"SaveONNX: got .*, want true or false"):
        load({"DebugOptions": {"SaveONNX": value}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"OnnxOpsetVersion": 11}, "opset: got 11, want an integer from 12 to"),
        ({"OnnxOpsetVersion": "17"}, "opset: got '17', want an integer from 12 to"),
        ({"OnnxOpsetVersion": True}, "opset: got True, want an integer from 12 to"),
        ({"FallbackPolicy": ["FALLBACK_NEVER"]}, "fallback_policy: .*want one of FALLBACK_DISABLE"),
        ({"FallbackPolicy": 5}, "fallback_policy: got 5"),
        ({"SkipCheck": ["SKIP_ALL"]}, "skipcheck_policy: .*want one of SKIP_CHECK_DISABLED"),
        ({"SkipCheck": 5}, "skipcheck_policy: got 5"),
        ({"DebugOptions": {"LogLevel": "LOUD"}}, "log_level: got 'LOUD', want one of VERBOSE"),
        ({"DebugOptions": {"LogLevel": 2}}, "log_level: got 2"),
    ],
)
def test_wrong_value(config, words, load):
    with pytest.raises(UserError, match=words):
        load(config)


@pytest.mark.parametrize(
    "config",
    [
        {"DebugOptions": 3},
        {"DebugOptions": None},
        {"DebugOptions": [["LogLevel", "INFO"]]},
        {"DebugOptions": {"ONNXPrefix": 5}},
        {"DebugOptions": {"ONNXPrefix": None}},
        {"DebugOptions": {"SaveONNXPath": True}},
    ],
)
def test_wrong_type(config, load):
    with pytest.raises(UserError, match=r"load_from_json: (DebugOptions|ONNXPrefix|SaveONNXPath)"):
        load(config)


@pytest.mark.parametrize(
    ("debug", "kind", "words"),
    [
        ({"SaveONNX": True}, ValueError, "onnx_prefix: got nothing, want a prefix"),
        (
            {"SaveONNX": True, "ONNXPrefix": "m", "SaveONNXPath": "/nowhere/at/all"},
            OSError,
            "save_path: cannot write to the folder '/nowhere/at/all'",
        ),
    ],
)
def test_errors_of_debug_options_are_its_own(debug, kind, words, load):
    with pytest.raises(kind, match=words):
        load({"DebugOptions": debug})


@pytest.mark.parametrize(
    "config",
    [
        {"UseStaticShapes": True},
        {"UseStaticShape": 1},
        {"DebugOptions": {"LogLevel": "LOUD"}},
        pytest.param({"OnnxOpsetVersion": 11}),
        pytest.param({"FallbackPolicy": ["FALLBACK_NEVER"]}),
    ],
)
def test_an_error_changes_nothing(config, write, graphs_captured):
    module = ORTModule(nn.Linear(4, 3))
    want = module(X)
    with pytest.raises(UserError):
        load_from_json(module, write(config))
    torch.testing.assert_close(module(X), want)
    assert graphs_captured() == 1
    torch.testing.assert_close(copy.deepcopy(module)(X), want)


def test_saved_files(load, tmp_path):
    debug = {"SaveONNX": True, "ONNXPrefix": "net", "SaveONNXPath": str(tmp_path)}
    module = load({"DebugOptions": debug, "OnnxOpsetVersion": 14})
    module(X)
    files = sorted(tmp_path.glob("*.onnx"))
    assert len(files) == 5
    assert all(file.name.startswith("net_") for file in files)
    for file in files:
        standard = [each for each in onnx.load(file).opset_import if not each.domain]
        assert all(each.version <= 14 for each in standard)


def test_the_environment_wins_over_the_file(load, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    debug = {"LogLevel": "INFO", "SaveONNX": True, "ONNXPrefix": "m", "SaveONNXPath": "/nowhere"}
    options = load({"DebugOptions": debug})._debug_options
    assert options.log_level is LogLevel.ERROR
    assert options.save_path == str(tmp_path)


def test_log_level(load):
    load({"DebugOptions": {"LogLevel": "ERROR"}})
    assert logging.getLogger("orttraining").level == logging.ERROR


def test_what_the_file_leaves_out_stays(load, tmp_path):
    module = load(
        {"OnnxOpsetVersion": 15, "DebugOptions": {"ONNXPrefix": "other"}},
        log_level=LogLevel.ERROR, save_onnx=True, onnx_prefix="m", save_path=tmp_path,
        config={"fallback_retry": True, "opset": 14},
    )  # fmt: skip
    options = module._debug_options
    assert (options.log_level, options.save_onnx) == (LogLevel.ERROR, True)
    assert (options.onnx_prefix, options.save_path) == ("other", str(tmp_path))
    assert options.config == {"fallback_retry": True, "opset": 15}


def test_a_later_file_adds_to_an_earlier_one(load, write):
    module = load({"OnnxOpsetVersion": 15, "DebugOptions": {"LogLevel": "ERROR"}})
    load_from_json(module, write({"SkipCheck": ["SKIP_CHECK_DEVICE"]}))
    options = module._debug_options
    assert options.log_level is LogLevel.ERROR
    assert options.config == {"opset": 15, "skipcheck_policy": ["SKIP_CHECK_DEVICE"]}


@pytest.mark.hands_over("forward branches on data")
@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", ["FALLBACK_DISABLE"]])
def test_a_policy_that_raises(policy, load, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = load({"FallbackPolicy": policy}, Branches(4, 3))
    with pytest.raises(ORTModuleONNXModelException):
        module(X)


@pytest.mark.hands_over("forward branches on data")
def test_a_policy_that_falls_back(load, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    names = ["FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_ONNX_MODEL"]
    module = load({"FallbackPolicy": names}, Branches(4, 3))
    with pytest.warns(FallbackWarning):
        got = module(X)
    torch.testing.assert_close(got, module.module(X))


def test_all_keys_at_once(load):
    eager = nn.Linear(4, 3)
    config = dict.fromkeys(BOOLS, True) | {
        "PropagateCastOps": {"Strategy": "FLOOD_FILL", "Level": 1, "Allow": ["ABC"]},
        "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT"],
        "DebugOptions": {"LogLevel": "VERBOSE"},
        "FallbackPolicy": ["FALLBACK_DISABLE"],
        "OnnxOpsetVersion": 17,
    }
    assert set(config) == set(KEYS)
    module = load(config, copy.deepcopy(eager))
    for each in (eager, module):
        each(X).pow(2).sum().backward()
    torch.testing.assert_close(module.weight.grad, eager.weight.grad)
    assert torch_ort.counters()["backward_runs"] == 1


CHECKED = ["SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT"]


@pytest.mark.parametrize("key", KEYS)
def test_what_does_nothing_is_said_once(key, load, caplog):
    values = {
        "DebugOptions": {}, "FallbackPolicy": [], "OnnxOpsetVersion": 17,
        "SkipCheck": CHECKED, "PropagateCastOps": {"Level": 1},
    }  # fmt: skip
    for _ in range(2):
        load({key: values.get(key, True)})
    said = [record.getMessage() for record in caplog.records if record.name == "orttraining"]
    reasons = {
        "PropagateCastOps": "casts are parts of fused kernels, which read and write each dtype",
        "EnableGradAccOptimization": "all weights are cast in one launch per call",
        "UseStaticShape": "each set of sizes has a memory plan of its own",
        "UseMemoryEfficientGradient": "what backward reads of forward is chosen by its bytes",
    }
    if key == "SkipCheck":
        (line,) = said
        assert line.startswith("ORTMODULE_SKIPCHECK_POLICY: never needed, ignored: all checks of")
    else:
        words = [f"{key}: never needed, ignored: {reasons[key]}"] if key in reasons else []
        assert said == words


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("SkipCheck", [], "all checks of a call take microseconds"),
        ("UseExternalGPUAllocator", False, "PyTorch's allocator gives all memory"),
        ("RunSymbolicShapeInference", False, "a capture knows all sizes as symbols"),
    ],
)
def test_what_is_never_needed_is_said_once(key, value, why, load, caplog):
    for _ in range(2):
        load({key: value})
    (said,) = [record.getMessage() for record in caplog.records if record.name == "orttraining"]
    assert f": never needed, ignored: {why}" in said


def test_what_was_captured_is_captured_again(write, graphs_captured):
    module = ORTModule(nn.Linear(4, 3))
    want = module(X)
    load_from_json(module, write({}))
    torch.testing.assert_close(module(X), want)
    assert graphs_captured() == 2


@pytest.mark.hands_over("forward branches on data")
def test_a_module_in_plain_pytorch_gets_another_chance(write, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = ORTModule(Branches(4, 3))
    with pytest.warns(FallbackWarning):
        module(X)
    load_from_json(module, write({"FallbackPolicy": ["FALLBACK_DISABLE"]}))
    with pytest.raises(ORTModuleONNXModelException):
        module(X)


def test_copies_keep_the_settings(load):
    module = load({"OnnxOpsetVersion": 15})
    assert copy.deepcopy(module)._debug_options.config == {"opset": 15}
