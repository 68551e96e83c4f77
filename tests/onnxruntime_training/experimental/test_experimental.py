"""What scripts for the old package torch_ort import: its experimental names, and set_seed."""

from __future__ import annotations

import importlib
import logging
import re

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import DebugOptions, ORTModule, UserError, set_seed
from torch_ort.capture import logs
from torch_ort.experimental import (
    LogLevel,
    PropagateCastLevel,
    PropagateCastOpsStrategy,
    load_from_json,
    save_intermediate_onnx_graphs,
    set_log_level,
    set_propagate_cast_ops_optimization,
)

pytestmark = pytest.mark.ort_only

X = torch.ones(2, 4)
KINDS = ("torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Clear our variables, and let the log have said nothing."""
    for name in ("ORTMODULE_LOG_LEVEL", "ORTMODULE_SAVE_ONNX_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logs, "_said", set())


@pytest.fixture
def model():
    return ORTModule(nn.Linear(4, 4))


def train(model):
    model(X).sum().backward()


def saved(folder, prefix):
    return {path.name for path in folder.iterdir() if path.name.startswith(prefix)}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("debug", "save_intermediate_onnx_graphs set_log_level"),
        ("graph_config", "PropagateCastLevel PropagateCastOpsStrategy"),
        ("graph_config", "set_propagate_cast_ops_optimization"),
        ("json_config", "load_from_json"),
    ],
)
def test_names_of_the_modules(module, names):
    inner = importlib.import_module(f"torch_ort.experimental.{module}")
    for name in names.split():
        assert getattr(inner, name) is getattr(torch_ort.experimental, name)


def test_graphs_are_saved_from_then_on(model, tmp_path):
    train(model)
    assert save_intermediate_onnx_graphs(model, str(tmp_path / "net")) is True
    train(model)
    files = {f"net_{kind}_training.onnx" for kind in KINDS}
    assert saved(tmp_path, "net") == files
    assert (
        save_intermediate_onnx_graphs(model=model, prefix=f"{tmp_path}/off", enable=False) is False
    )
    train(model)
    assert saved(tmp_path, "") == files


def test_a_prefix_without_a_folder_means_this_one(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_intermediate_onnx_graphs(model, "net")
    train(model)
    assert len(saved(tmp_path, "net_")) == len(KINDS)


def test_what_was_set_before_stays(tmp_path):
    options = DebugOptions(LogLevel.ERROR, True, "first", tmp_path, {"opset": 17})
    model = ORTModule(nn.Linear(4, 4), options)
    set_log_level(model, LogLevel.FATAL)
    train(model)
    assert len(saved(tmp_path, "first")) == len(KINDS)
    save_intermediate_onnx_graphs(model, str(tmp_path / "second"))
    train(model)
    assert len(saved(tmp_path, "second")) == len(KINDS)
    assert model._debug_options.log_level == LogLevel.FATAL
    assert model._debug_options.config == {"opset": 17}


def test_levels(model, monkeypatch):
    logger = logging.getLogger("orttraining")
    for level in LogLevel:
        set_log_level(model=model, level=level)
        assert logger.level == logs.PYTHON_LEVELS[level]
    set_log_level(model)
    assert model._debug_options.log_level == LogLevel.WARNING
    configured = ORTModule(nn.Linear(4, 4), DebugOptions(config={"log_level": "ERROR"}))
    set_log_level(configured, LogLevel.VERBOSE)
    assert configured._debug_options.log_level == LogLevel.VERBOSE
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "FATAL")
    set_log_level(model, LogLevel.INFO)
    assert model._debug_options.log_level == LogLevel.FATAL


@pytest.mark.parametrize(
    ("prefix", "error", "words"),
    [
        ("/not/there/net", NotADirectoryError, "'/not/there/net', but there is no folder '/not/t"),
        ("{}/", NameError, "want the start of a name after the folder"),
        ("{}/ ", NameError, "want the start of a name after the folder"),
        (None, TypeError, "prefix: got None, want a string that is not empty"),
        (True, TypeError, "prefix: got True, want a string that is not empty"),
        ("", TypeError, "prefix: got '', want a string that is not empty"),
    ],
)
def test_prefixes_that_do_not_fit(model, tmp_path, prefix, error, words):
    prefix = prefix.format(tmp_path) if isinstance(prefix, str) else prefix
    with pytest.raises(error, match=re.escape(words)):
        save_intermediate_onnx_graphs(model, prefix)
    train(model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call",
    [
        lambda model: save_intermediate_onnx_graphs(model, "net"),
        lambda model: set_log_level(model, LogLevel.INFO),
        set_propagate_cast_ops_optimization,
    ],
)
@pytest.mark.parametrize("bad", [None, nn.Linear(1, 1)])
def test_other_models_are_refused(call, bad):
    words = f"model: got {type(bad).__name__}, want an object of ORTModule"
    with pytest.raises(TypeError, match=words):
        call(bad)


def test_other_classes_are_refused(model):
    with pytest.raises(TypeError, match="level: got int, want an object of LogLevel"):
        set_log_level(model, 1)
    strategy, words = PropagateCastOpsStrategy.FLOOD_FILL, "want an object of PropagateCast"
    with pytest.raises(TypeError, match=f"strategy: got str, {words}OpsStrategy"):
        set_propagate_cast_ops_optimization(model, strategy="FLOOD_FILL")
    with pytest.raises(TypeError, match=f"level: got int, {words}Level"):
        set_propagate_cast_ops_optimization(model, strategy, 1)


def test_casts_are_told_of_once_where_they_would_move(model, caplog):
    set_propagate_cast_ops_optimization(model)
    set_propagate_cast_ops_optimization(
        model, PropagateCastOpsStrategy.NONE, PropagateCastLevel.FASTER_KEEP_PRECISION
    )
    assert not caplog.records
    for _ in range(2):
        set_propagate_cast_ops_optimization(
            model,
            strategy=PropagateCastOpsStrategy.INSERT_AND_REDUCE,
            level=PropagateCastLevel.AGGRRESSIVE_MIXED_PRECISION,
        )
    (record,) = caplog.records
    assert record.getMessage() == (
        "set_propagate_cast_ops_optimization: INSERT_AND_REDUCE, AGGRRESSIVE_MIXED_PRECISION: "
        "never needed, ignored: casts are parts of fused kernels, which read and write each dtype"
    )
    train(model)


def test_values_of_the_enums():
    assert {level.name: level.value for level in PropagateCastLevel} == {
        "NOT_USED": -1, "FASTER_KEEP_PRECISION": 1, "AGGRRESSIVE_MIXED_PRECISION": 2,
    }  # fmt: skip


def test_settings_from_a_file(model, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"DebugOptions": {"LogLevel": "ERROR"}}')
    load_from_json(model, path)
    assert model._debug_options.log_level == LogLevel.ERROR
    path.write_text('{"Unheard": 1}')
    with pytest.raises(UserError, match="unknown key 'Unheard'"):
        load_from_json(model, path)


@pytest.mark.parametrize("exact_random", ["0", "1"])
def test_a_seed_repeats_dropout_in_the_engine(exact_random, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", exact_random)
    model = ORTModule(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    model(X)
    drawn = []
    for seed in (5, 6, 5):
        set_seed(seed)
        drawn.append((model(X), torch.rand(3)))
    torch.testing.assert_close(drawn[0], drawn[2], rtol=0, atol=0)
    assert not torch.equal(drawn[0][0], drawn[1][0])


@pytest.mark.parametrize("seed", [None, "1", 1.0, True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(TypeError, match=f"seed: got {type(seed).__name__}, want an int"):
        set_seed(seed)


@pytest.mark.parametrize("name", ["ORTInferenceModule", "OpenVINOProviderOptions"])
def test_names_of_packages_beside_it(name):
    words = f"torch_ort.{name}: this package has no such name, .* use ORTModule under"
    with pytest.raises(ImportError, match=words):
        exec(f"from torch_ort import {name}")
    assert name not in dir(torch_ort)


def test_whether_a_call_trains(model):
    assert model._is_training() is True
    with torch.no_grad():
        assert model._is_training() is False
    model.eval()
    assert model._is_training() is False
    assert model.module.training is False
