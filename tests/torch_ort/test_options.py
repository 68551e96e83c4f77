"""Options: one table, checked by name and by kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_ort import UserError
from torch_ort.core.switches import OWN_KERNELS
from torch_ort.options import NEWEST_OPSET, PROCESS_TABLE, TABLE, resolve, resolve_process


def test_defaults_stand_where_nothing_is_said(monkeypatch):
    for row in TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    options = resolve()
    assert {row.name: getattr(options, row.name) for row in TABLE} == {
        row.name: row.default for row in TABLE
    }


def test_environment_is_read_and_the_call_wins(monkeypatch):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "17")
    assert resolve().opset == 17
    assert resolve({"opset": 14}).opset == 14


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"save_onx": True}, "unknown option: got 'save_onx'.*did you mean save_onnx"),
        ({"save_onnx": 1}, "save_onnx: got 1, want a bool"),
        ({"opset": 11}, f"opset: got 11, want an integer from 12 to {NEWEST_OPSET}"),
        ({"disable": "merge_equals"}, "disable: got 'merge_equals', want one of merge_equal"),
        ({"dump": "irr"}, "dump: got 'irr', want one of ir"),
        ({"exact_random": "yes"}, "exact_random: got 'yes', want a bool"),
        (
            {"conv_algo_search": "fast"},
            "conv_algo_search: got 'fast', want HEURISTIC or EXHAUSTIVE",
        ),
        ({"isa": "sse9"}, "isa: got 'sse9', want one of portable"),
    ],
)
def test_bad_options(given, words):
    with pytest.raises(UserError, match=words):
        resolve(given)


def test_bad_environment(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_CHECK", "often")
    with pytest.raises(UserError, match="TORCH_ORT_CHECK: got 'often'"):
        resolve()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), (" 1 ", True), ("0", False), ("2", False)]
)
def test_flags_are_read_as_onnx_runtime_training_reads_them(text, value, monkeypatch):
    flags = [row for row in TABLE if row.kind == "flag"]
    assert len(flags) == 5
    for row in flags:
        monkeypatch.setenv(row.variable, text)
        assert getattr(resolve(), row.name) is value
        monkeypatch.setenv(row.variable, "true")
        with pytest.raises(UserError, match=f"{row.variable}: got 'true', invalid literal for int"):
            resolve()
        monkeypatch.delenv(row.variable)


def test_without_the_compute_optimizer_options_are_eagers():
    given = {"exact_random": False, "emulate_eager_casts": False, "disable": ("reorder",)}
    options = resolve({**given, "enable_compute_optimizer": False})
    assert options.disable == ("reorder", *OWN_KERNELS)
    assert options.exact_random
    assert options.emulate_eager_casts
    assert resolve({**given, "enable_compute_optimizer": True}).disable == ("reorder",)


def test_modes():
    assert resolve(mode="max-autotune") == resolve()
    with pytest.raises(
        UserError, match=r"mode: got 'max-autotun', want .*did you mean max-autotune"
    ):
        resolve(mode="max-autotun")


@pytest.mark.ort_only
def test_torch_compile_hands_options_on():
    with pytest.raises(Exception, match="did you mean save_onnx"):
        torch.compile(torch.sin, backend="ort", options={"save_onx": True})(torch.ones(2))


class TestProcess:
    @pytest.fixture(autouse=True)
    def nothing_set(self, monkeypatch):
        for row in PROCESS_TABLE:
            monkeypatch.delenv(row.variable, raising=False)

    def test_kernels_are_kept_in_the_folder_of_caches(self, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        assert resolve_process().kernel_cache_dir == "/caches/torch_ort/kernels"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert resolve_process().kernel_cache_dir == "/home/somebody/.cache/torch_ort/kernels"
        monkeypatch.setenv("HOME", "nowhere")
        assert resolve_process().kernel_cache_dir == ""
        monkeypatch.setenv("TORCH_ORT_KERNEL_CACHE_DIR", "here")
        assert resolve_process().kernel_cache_dir == str(Path("here").absolute())

    @pytest.mark.ort_only
    def test_a_bad_value_is_an_error_of_the_user(self, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        monkeypatch.setenv("TORCH_ORT_KERNEL_CACHE_BYTES", "many")
        with pytest.raises(Exception, match="TORCH_ORT_KERNEL_CACHE_BYTES: got 'many', invalid"):
            torch.compile(torch.sin, backend="ort")(torch.ones(2))


def test_the_page_is_what_the_module_prints():
    command = [sys.executable, "-m", "torch_ort.options"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    printed = result.stdout
    assert all(f"| `{row.name}` | `{row.variable}` |" in printed for row in TABLE)
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text() == printed, f"write it: python -m torch_ort.options > {page}"
