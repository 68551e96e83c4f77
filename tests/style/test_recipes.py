"""The recipes of CONTRIBUTING.md: which files know of an op, a word, a pass, and an option."""

import re
from pathlib import Path

import pytest

from torch_ort import _C

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CODE = {
    path.relative_to(ROOT).as_posix(): COMMENT.sub("", path.read_text())
    for folder in ("csrc", "torch_ort")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".h", ".cpp", ".cuh", ".py"}
}
# Memory formats of torch have this name too.
SHARED_NAMES = {"channels_last"}
ROUNDING = [
    each.name for each in _C.passes() if each.rounds_elsewhere and each.name not in SHARED_NAMES
]


def files_that_name(word: str) -> set[str]:
    whole = re.compile(rf"\b{word}\b")
    return {path for path, text in CODE.items() if whole.search(text)}


def test_of_an_op_and_the_operator_that_it_is_a_pair_with_one_file_knows():
    """Beside it there is the list of out forms, which is printed, and the cases."""
    printed = {"csrc/run/proved_out_forms.cpp"}
    assert files_that_name("Asinh") == {"csrc/ops/elementwise.cpp"}
    assert files_that_name("aten::asinh") - printed == {"csrc/ops/elementwise.cpp"}
    assert files_that_name("aten::leaky_relu") - printed == {"csrc/ops/activation.cpp"}


def test_of_a_word_four_files_know_and_the_one_that_writes_triton():
    assert files_that_name("k?LeakyReluGrad") == {
        "csrc/cpu/pointwise_loops.h",
        "csrc/cuda/prelude.cuh",
        "csrc/ops/activation.cpp",
        "csrc/ops/words.h",
        "torch_ort/triton/printer.py",
    }


@pytest.mark.parametrize("name", ROUNDING)
def test_of_a_pass_that_rounds_elsewhere_two_files_know(name):
    """Beside these there are its cases, and `docs/options.md`, which is printed.

    Python names passes in texts for users alone (test_passes.py).
    """
    files = {path for path in files_that_name(name) if path.startswith("csrc/")}
    header = f"csrc/passes/{name}.h"
    assert files - {header} == {f"csrc/passes/{name}.cpp", "csrc/passes/pipeline.cpp"}


def test_of_an_option_that_reaches_the_engine_four_files_know():
    assert files_that_name("search_convs") == {
        "torch_ort/options.py",
        "csrc/run/options.h",
        "csrc/python/bind_options.cpp",
        "csrc/run/runner.cpp",
    }
    assert files_that_name("conv_algo_search") == {"torch_ort/options.py"}
