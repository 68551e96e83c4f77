"""The switches of an ORTModule: every variable, its values, its errors, and who wins."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_ort import DebugOptions, LogLevel, ORTModule, UserError, options
from torch_ort.capture import logs
from torch_ort.options import ORTMODULE_TABLE, resolve_ortmodule, split
from torch_ort.ortmodule import FallbackPolicy

FLAGS = {
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": True,
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": False,
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": True,
    "ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT": False,
    "ORTMODULE_PRINT_MEMORY_STATS": False,
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": False,
    "ORTMODULE_ENABLE_ZERO_STAGE3": False,
    "ORTMODULE_USE_EFFICIENT_ATTENTION": False,
    "ORTMODULE_USE_FLASH_ATTENTION": False,
}
TEXTS = (
    "ORTMODULE_SAVE_ONNX_PATH",
    "ORTMODULE_JSON_CONFIG_PATH",
    "ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS",
    "ORTMODULE_CACHE_DIR",
    "ORTMODULE_ATEN_SDPA_FALLBACK",
)
DEFAULT_POLICY = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)
CHECKS = ("SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT")
DEFAULTS = {
    "ORTMODULE_FALLBACK_POLICY": DEFAULT_POLICY,
    "ORTMODULE_FALLBACK_RETRY": False,
    "ORTMODULE_LOG_LEVEL": LogLevel.WARNING,
    "ORTMODULE_SKIPCHECK_POLICY": CHECKS,
    **FLAGS,
    **dict.fromkeys(TEXTS, ""),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Give each test an environment without our variables, and a log that has said nothing."""
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logs, "_said", set())


def value_of(variable: str, settings: Any = None) -> Any:
    name = next(row.name for row in ORTMODULE_TABLE if row.variable == variable)
    return getattr(settings or resolve_ortmodule(), name)


def level_of(debug_options: DebugOptions | None = None) -> int:
    """Give the level that the log of a new ORTModule has."""
    ORTModule(nn.Linear(2, 2), debug_options)
    return logging.getLogger("orttraining").level


def another_value(variable: str) -> str:
    """Give text for a value that is not the default."""
    if variable in FLAGS:
        return str(int(not FLAGS[variable]))
    return "something"


def asking_value(variable: str) -> str:
    """Give text for a value that asks for something, which may be the default."""
    return "1" if variable in FLAGS else another_value(variable)


def test_the_table_holds_these_variables():
    assert sorted(row.variable for row in ORTMODULE_TABLE) == sorted(DEFAULTS)


@pytest.mark.parametrize("variable", DEFAULTS)
def test_default(variable):
    value = value_of(variable)
    assert value == DEFAULTS[variable]
    assert type(value) is type(DEFAULTS[variable])


class TestAcceptedValues:
    @pytest.mark.parametrize("variable", FLAGS)
    @pytest.mark.parametrize(
        ("text", "value"), [("1", True), ("0", False), ("2", False), ("-1", False), (" 1 ", True)]
    )
    def test_flag(self, variable, text, value, monkeypatch):
        monkeypatch.setenv(variable, text)
        assert value_of(variable) is value

    @pytest.mark.parametrize(
        ("text", "value"),
        [("true", True), ("True", True), ("1", True), ("yes", True), ("YES", True),
         ("false", False), ("0", False), ("no", False), ("", False), ("on", False)],
    )  # fmt: skip
    def test_retry(self, text, value, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", text)
        assert resolve_ortmodule().fallback_retry is value

    @pytest.mark.parametrize("policy", FallbackPolicy)
    def test_policy(self, policy, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy.name)
        assert resolve_ortmodule().fallback_policy is policy

    @pytest.mark.parametrize("level", LogLevel)
    def test_level(self, level, monkeypatch):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", level.name)
        assert resolve_ortmodule().log_level is level

    @pytest.mark.parametrize("names", [("SKIP_CHECK_DISABLED",), *[(c,) for c in CHECKS], CHECKS])
    def test_skip_checks(self, names, monkeypatch):
        monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "|".join(names))
        assert resolve_ortmodule().skipcheck_policy == names

    @pytest.mark.parametrize("variable", TEXTS)
    @pytest.mark.parametrize("text", ["", "a/path with space", "module.Name,other.Name"])
    def test_text(self, variable, text, monkeypatch):
        monkeypatch.setenv(variable, text)
        assert value_of(variable) == text


class TestWrongValues:
    """A value that cannot be read is an error when the ORTModule is made."""

    def check(self, kind: type[Exception], words: str) -> None:
        for make in (resolve_ortmodule, lambda: ORTModule(nn.Linear(2, 2))):
            with pytest.raises(kind, match=words) as caught:
                make()
            assert isinstance(caught.value, UserError)

    @pytest.mark.parametrize("variable", FLAGS)
    @pytest.mark.parametrize("text", ["true", "", "1.0", "yes"])
    def test_flag(self, variable, text, monkeypatch):
        monkeypatch.setenv(variable, text)
        self.check(ValueError, f"options: {variable}: got '{text}', invalid literal for int")

    @pytest.mark.parametrize("text", ["", "FALLBACK_NEVER", "fallback_disable", "1"])
    def test_policy(self, text, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", text)
        self.check(
            KeyError,
            f"options: ORTMODULE_FALLBACK_POLICY: got '{text}', want one of FALLBACK_DISABLE, "
            ".*FALLBACK_BAD_INITIALIZATION",
        )

    @pytest.mark.parametrize("text", ["", "DEBUG", "info", "2"])
    def test_level(self, text, monkeypatch):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", text)
        self.check(
            KeyError,
            f"ORTMODULE_LOG_LEVEL: got '{text}', want one of "
            "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL$",
        )

    @pytest.mark.parametrize("text", ["", "SKIP_CHECK_ALL", "SKIP_CHECK_DEVICE,SKIP_CHECK_DEVICE"])
    def test_skip_checks(self, text, monkeypatch):
        monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", text)
        self.check(
            KeyError,
            f"ORTMODULE_SKIPCHECK_POLICY: got '{text}', want one of SKIP_CHECK_DISABLED, "
            r".*SKIP_CHECK_EXECUTION_AGENT, with \| between them",
        )

    def test_one_wrong_skip_check_among_right_ones(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DEVICE|SKIP_CHECK_ALL")
        self.check(KeyError, "want one of SKIP_CHECK_DISABLED")

    def test_an_unknown_name_is_printed_as_a_sentence(self, monkeypatch):
        """A KeyError prints its words in quotes, which ours must not."""
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
        with pytest.raises(KeyError) as caught:
            resolve_ortmodule()
        assert str(caught.value).startswith("options: ORTMODULE_LOG_LEVEL: got 'LOUD', want one")


class TestPrecedence:
    def test_level_of_the_environment_wins(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
        debug = DebugOptions(log_level=LogLevel.INFO)
        assert debug.log_level is LogLevel.ERROR
        assert debug.logging.log_level is LogLevel.ERROR
        assert level_of(debug) == logging.ERROR

    def test_level_of_debug_options_wins_over_the_default(self):
        assert level_of(DebugOptions(log_level=LogLevel.ERROR)) == logging.ERROR

    @pytest.mark.parametrize("debug", [None, DebugOptions], ids=["none", "empty"])
    def test_default_level(self, debug):
        assert level_of(debug and debug()) == logging.WARNING

    def test_path_of_the_environment_wins(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
        debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path="/nowhere")
        assert debug.save_path == str(tmp_path)
        assert debug.save_onnx_models.path == str(tmp_path)

    def test_path_of_debug_options_wins_over_the_default(self, tmp_path):
        assert DebugOptions(save_path=str(tmp_path)).save_onnx_models.path == str(tmp_path)

    def test_default_path_is_the_current_folder(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert os.path.samefile(DebugOptions().save_onnx_models.path, tmp_path)

    def test_options_by_name_win_over_the_environment(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
        module = nn.DataParallel(nn.Linear(2, 2))
        config = {"fallback_policy": "FALLBACK_UNSUPPORTED_TORCH_MODEL"}
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        with pytest.warns(UserWarning, match="not compatible with"):
            ORTModule(module, DebugOptions(config=config))

    def test_level_by_name(self):
        assert level_of(DebugOptions(config={"log_level": "ERROR"})) == logging.ERROR

    def test_path_by_name(self, tmp_path):
        debug = DebugOptions(config={"save_onnx_path": str(tmp_path)})
        assert debug.save_onnx_models.path == str(tmp_path)

    def test_a_wrong_level_of_the_environment_is_no_level_of_debug_options(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
        with pytest.raises(KeyError, match="ORTMODULE_LOG_LEVEL: got 'LOUD'"):
            DebugOptions(log_level=LogLevel.INFO)


class TestDebugOptions:
    def test_defaults(self):
        debug = DebugOptions()
        assert debug.log_level is LogLevel.WARNING
        assert debug.save_onnx is False
        assert debug.save_onnx_models.save is False
        assert debug.save_onnx_models.name_prefix == ""
        assert debug.torch_exporter_filter is None
        assert debug.onnxruntime_log_filter is None

    def test_what_is_saved(self, tmp_path):
        debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
        saved = debug.save_onnx_models
        assert (saved.save, saved.name_prefix, saved.path) == (True, "net", str(tmp_path))

    @pytest.mark.parametrize(
        ("given", "kind", "words"),
        [
            ({"log_level": 3}, TypeError, "log_level: got int, want a LogLevel"),
            ({"log_level": "INFO"}, TypeError, "log_level: got str, want a LogLevel"),
            ({"log_level": logging.INFO}, TypeError, "log_level: got int, want a LogLevel"),
            ({"onnx_prefix": 5}, TypeError, "onnx_prefix: got int, want a string"),
            ({"save_onnx": True, "onnx_prefix": Path("net")}, TypeError,
             "onnx_prefix: got .*Path, want a string"),
            ({"save_onnx": True}, ValueError, "onnx_prefix: got nothing, want a prefix"),
            ({"save_onnx": True, "onnx_prefix": "net", "save_path": "/nowhere/at/all"}, OSError,
             "save_path: cannot write to the folder '/nowhere/at/all'"),
            pytest.param({"save_path": 5}, TypeError, "save_path"),
        ],
    )  # fmt: skip
    def test_errors(self, given, kind, words):
        with pytest.raises(kind, match=words):
            DebugOptions(**given)

    def test_a_folder_of_the_environment_that_is_missing(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "/nowhere/at/all")
        with pytest.raises(OSError, match="cannot write to the folder '/nowhere/at/all'"):
            DebugOptions(save_onnx=True, onnx_prefix="net")

    def test_a_folder_without_saving_need_not_exist(self):
        debug = DebugOptions(save_path="/nowhere/at/all")
        assert not debug.save_onnx

    def test_files_are_written(self, tmp_path):
        debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
        ORTModule(nn.Linear(2, 2), debug)(torch.ones(1, 2))
        assert sorted(tmp_path.glob("net_*.onnx"))


class TestByName:
    """`config` holds options of both tables."""

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("fallback_polici", "fallback_policy"),
            ("falback_retry", "fallback_retry"),
            ("loglevel", "log_level"),
            ("save_onx", "save_onnx"),
            ("exact_randm", "exact_random"),
            ("use_tritn", "use_triton"),
        ],
    )
    def test_unknown_name_with_a_near_one(self, name, near):
        with pytest.raises(UserError, match=f"unknown option: got '{name}'; did you mean .*{near}"):
            ORTModule(nn.Linear(2, 2), DebugOptions(config={name: True}))

    def test_unknown_name_without_a_near_one(self):
        with pytest.raises(UserError, match=r"unknown option: got 'zzzzzz'$") as caught:
            split({"zzzzzz": 1})
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(
        ("config", "kind", "words"),
        [
            ({"fallback_policy": "NEVER"}, KeyError, "fallback_policy: got 'NEVER', want one of"),
            ({"fallback_policy": ["NEVER"]}, KeyError, r"fallback_policy: got \['NEVER'\], want"),
            ({"fallback_policy": 3.5}, ValueError, "fallback_policy: got 3.5"),
            ({"fallback_retry": 1}, ValueError, "fallback_retry: got 1, want a bool"),
            ({"fallback_retry": "yes"}, ValueError, "fallback_retry: got 'yes', want a bool"),
            ({"use_triton": "1"}, ValueError, "use_triton: got '1', want a bool"),
            ({"memory_opt_level": 3}, ValueError, "memory_opt_level: got 3, want an integer from"),
            ({"cache_dir": 5}, ValueError, "cache_dir: got 5, want a string"),
            ({"skipcheck_policy": "ALL"}, KeyError, "skipcheck_policy: got 'ALL', want one of"),
            ({"strict": "yes"}, ValueError, "strict: got 'yes', want a bool"),
        ],
    )
    def test_wrong_value(self, config, kind, words):
        with pytest.raises(kind, match=words) as caught:
            ORTModule(nn.Linear(2, 2), DebugOptions(config=config))
        assert isinstance(caught.value, UserError)

    def test_parts(self):
        config = {"strict": True, "fallback_retry": True, "opset": 17}
        assert split(config) == ({"strict": True, "opset": 17}, {"fallback_retry": True})

    def test_options_of_graphs_reach_the_graph(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        wrapped = ORTModule(nn.Linear(2, 2), DebugOptions(config={"strict": True}))
        with pytest.raises(Exception, match="got set"):
            wrapped({1})

    def test_config_is_copied(self):
        config = {"fallback_retry": True}
        debug = DebugOptions(config=config)
        config["nonsense"] = 1
        wrapped = ORTModule(nn.Linear(2, 2), debug)
        assert wrapped(torch.ones(1, 2)).shape == (1, 2)


class TestWhatWorks:
    @pytest.mark.parametrize("variable", sorted({*FLAGS, *TEXTS}))
    def test_nothing_waits_to_be_built(self, variable, monkeypatch, caplog):
        monkeypatch.setenv(variable, another_value(variable))
        ORTModule(nn.Linear(2, 2))
        assert not [r.message for r in caplog.records if "not available" in r.message]


class TestPage:
    def test_is_the_printed_one(self):
        page = Path(__file__).parents[2] / "docs" / "options.md"
        assert page.read_text() == options.page() + "\n"

    @pytest.mark.parametrize("variable", DEFAULTS)
    def test_has_one_line_for_each_variable(self, variable):
        lines = [ln for ln in options.page().splitlines() if ln.startswith(f"| `{variable}` |")]
        assert len(lines) == 1
        cells = lines[0].replace("\\|", "").split("|")
        assert len(cells) == 6
        if variable in FLAGS:
            assert cells[2].strip() == f"`{int(FLAGS[variable])}`"
