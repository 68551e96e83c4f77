"""Wrong numbers are found, and what makes them.

| what                               | where it is planted                          |
| ---------------------------------- | -------------------------------------------- |
| nothing is wrong                   | models with dropout, symbols, effects        |
| a pass                             | one rewrite of many gives another node       |
| a kernel                           | the code generator, for one node             |
| the plan                           | a switch without which numbers are right     |
| the capture                        | a graph that computes something else         |
| a script                           | `python -m torch_ort.debug`, and its folder  |
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_process import run_fork
from own_process import run_python
from torch import nn

import torch_ort
from torch_ort import _C, debug
from torch_ort.debug import bisect, numbers
from torch_ort.debug.__main__ import main

pytestmark = pytest.mark.ort_only


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.25)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x.softmax(-1), x.sum()


def ids() -> torch.Tensor:
    return torch.arange(12).reshape(3, 4) % 17


@pytest.fixture
def plant_codegen():
    yield _C.testing.plant_codegen
    _C.testing.plant_codegen("own")


@pytest.fixture
def plant_rewrite(monkeypatch):
    """Let the rewrite of a number give wrong numbers, in the pipelines that the search runs."""

    def plant(number: int, node: str, attribute: str, value: Any) -> None:
        def run_pipeline(graph, disabled, count, **more):
            reports = _C.run_pipeline(graph, disabled, count, **more)
            if count < 0 or count >= number:
                _C.testing.set_attr(graph, node, attribute, value)
            return reports

        names = {name: getattr(_C, name) for name in dir(_C) if not name.startswith("__")}
        monkeypatch.setattr(
            bisect, "_C", SimpleNamespace(**{**names, "run_pipeline": run_pipeline})
        )

    return plant


def test_right_numbers_are_no_finding():
    torch.manual_seed(0)
    assert debug.compare(Model(), ids()) is None
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_right_numbers_of_other_types(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    assert debug.compare(model.to(dtype), torch.randn(6, 8, dtype=dtype)) is None


def test_functions_of_arguments_are_compared():
    def function(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": (x * y).tanh(), "count": x.argmax()}

    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    assert debug.compare(function, x, y=y) is None
    assert x.grad is None


def checked(function: Any, *args: Any, **options: Any) -> debug.watch.Checks:
    torch.compiler.reset()
    with debug.checking(options=options) as checks:
        result = torch.compile(function, backend="ort", options={"strict": True})(*args)
        if result.requires_grad:
            result.sum().backward()
    return checks


def test_each_graph_is_checked_once_and_random_numbers_stay():
    def function(x):
        return nn.functional.dropout(x, 0.5).exp()

    x = torch.randn(8, 8, requires_grad=True)
    options = {"exact_random": True, "strict": True}
    torch.manual_seed(3)
    want = torch.compile(function, backend="ort", options=options)(x)
    torch.compiler.reset()
    with debug.checking() as checks:
        call = torch.compile(function, backend="ort", options=options)
        torch.manual_seed(3)
        got = call(x)
        call(x)
    assert torch.equal(got, want)
    assert len(checks.checked) == 1
    assert str(checks).startswith("torch_ort: 1 graphs checked, 0 wrong")


def test_symbols_and_inference(capsys):
    @torch.no_grad()
    def function(x):
        return (x * 2).softmax(-1)

    torch.compiler.reset()
    with debug.checking() as checks:
        call = torch.compile(function, backend="ort", options={"strict": True})
        for size in (4, 6, 9):
            call(torch.randn(size, 5))
    assert len(checks.checked) == 2  # the second makes a symbol
    assert not checks.findings
    assert not checks.left_out
    assert capsys.readouterr().err == ""


def test_a_wrong_kernel_is_named(plant_codegen, capsys):
    def function(x):
        return (x.sin() * 3).exp()

    x = torch.randn(6, 5, requires_grad=True)
    plant_codegen("wrong", "exp")
    checks = checked(function, x)
    (finding,) = checks.findings
    assert (finding.cause, finding.name) == ("kernel", "sin_to_exp")
    assert finding.message.startswith("check: region 'sin_to_exp'")
    assert finding.differences[0].place == (0, 0)
    text = capsys.readouterr().err
    assert "torch_ort: graph" in text
    assert "the kernel of region 'sin_to_exp' makes them wrong: check: region" in text
    assert "TORCH_ORT_DISABLE=region_kernels leaves all such kernels out." in text


def test_wrong_products_are_named(plant_codegen, capsys):
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    plant_codegen("wrong", "product")
    checks = checked(lambda x, weight: x @ weight, x, weight)
    (finding,) = checks.findings
    assert (finding.cause, finding.name) == ("kernel", "products")
    text = capsys.readouterr().err
    assert "TORCH_ORT_DISABLE=products makes them right: the products are at fault." in text


def test_a_wrong_rewrite_is_named(plant_rewrite, tmp_path, capsys):
    def function(x):
        y = torch.softmax(x.exp() @ x.exp(), -1)
        return torch.logit(nn.functional.layer_norm(y @ x, (4,)) + y, 0.2)

    x = torch.randn(4, 4)
    torch.compiler.reset()
    with debug.checking() as checks:
        torch.compile(function, backend="ort", options={"strict": True})(x)
    assert not checks.findings
    (program,) = checks._programs
    optional = {each.name for each in _C.passes() if not each.is_needed}
    counts = [(name, made) for name, made, _ in program.passes if name in optional]
    total = sum(made for _, made in counts)
    assert total >= 4
    name = next(n["name"] for n in program.graph.nodes() if n["op"] == "ATen")
    for number in range(1, total + 1):
        plant_rewrite(number, name, "eps", 0.4)
        torch.compiler.reset()
        with debug.checking(str(tmp_path / str(number))) as checks:
            torch.compile(function, backend="ort", options={"strict": True})(x)
        (finding,) = checks.findings
        assert (finding.cause, finding.rewrite, finding.num_rewrites) == ("pass", number, total)
        made = [name for name, count in counts for _ in range(count)]
        assert finding.name == made[number - 1]
        assert finding.value == name
        text = capsys.readouterr().err
        assert f"rewrite {number} of {total} makes them wrong, of pass {finding.name}" in text
        (folder,) = (tmp_path / str(number)).iterdir()
        assert f"--again {folder}" in text
        assert {path.name for path in folder.iterdir()} == {
            "README.md", "inputs.pt", "after.onnx", "after.onnxtxt", "before.onnx",
            "before.onnxtxt",
        }  # fmt: skip
        assert [each.name for each in debug.again(str(folder))] == [finding.differences[0].name]


def test_what_cannot_be_checked_is_told(monkeypatch):
    def refuse(case):
        raise _C.Unsupported("Gather: no kernel")

    monkeypatch.setattr(bisect, "find", refuse)
    checks = checked(torch.exp, torch.randn(3, 3))
    assert not checks.checked
    assert "not checked: graph" in str(checks)
    assert ": Gather: no kernel" in str(checks)


def test_a_wrong_plan_is_named(monkeypatch):
    def function(x):
        return (x @ x).exp() @ x

    run = bisect.Case.run

    def wrong_in_place(self, graph, *, inputs=None, disable=(), check=0):
        results = run(self, graph, inputs=inputs, disable=disable, check=check)
        wrong = "in_place" not in disable
        return {name: x + 1 if wrong else x for name, x in results.items()}

    monkeypatch.setattr(bisect.Case, "run", wrong_in_place)
    (finding,) = checked(function, torch.randn(3, 3)).findings
    assert (finding.cause, finding.name) == ("plan", "in_place")
    assert "TORCH_ORT_DISABLE=in_place makes them right: the plan is at fault." in str(finding)


def test_a_wrong_capture_is_told():
    calls = []

    def function(x):
        # Eager PyTorch sees another number in each of its calls than the engine does.
        return x * (1.0 if torch.compiler.is_compiling() else 2.0 + 0 * len(calls))

    finding = debug.compare(function, torch.ones(3))
    assert finding.cause == "capture"
    assert [each.name for each in finding.differences] == ["result 0"]
    assert "each graph gives what its nodes give" in str(finding)


@pytest.mark.parametrize(
    ("got", "want", "noisy", "differs"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.001], [1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.001], [1.0, 2.0], [1.0, 2.0001], False),  # noise grows as far
        ([float("nan"), 2.0], [float("nan"), 2.0], [float("nan"), 2.0], False),
        ([0.0, 2.0], [float("nan"), 2.0], [float("nan"), 2.0], True),
        ([float("inf"), 2.0], [3e38, 2.0], [float("inf"), 2.0], False),
        ([float("inf"), 2.0], [1.0, 2.0], [1.0, 2.0], True),
        ([], [], [], False),
    ],
)
def test_what_a_difference_is(got, want, noisy, differs):
    results = [{"y": torch.tensor(x)} for x in (got, want, noisy)]
    assert bool(numbers.differences(*results)) == differs


def test_a_few_elements_of_many_may_fall_either_way():
    want = torch.zeros(20000)
    one = want.clone()
    one[7] = 1
    many = want.clone()
    many[:3] = 1
    assert not numbers.differences({"y": one}, {"y": want}, {"y": want})
    (found,) = numbers.differences({"y": many}, {"y": want}, {"y": want})
    assert str(found) == "'y': 3 of 20000 elements differ; the worst, [0]: got 1, want 0"


SCRIPT = """
import sys
import torch
from torch_ort import _C

if "wrong" in sys.argv:
    _C.testing.plant_codegen("wrong", "exp")
call = torch.compile(lambda x: (x.sin() * 3).exp(), backend="ort")
print(call(torch.ones(2, 3)).shape)
"""


TOOL = """
import sys
from torch_ort.debug.__main__ import main
sys.exit(main())
"""


def test_scripts_are_checked(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL)
    right = run_python("-m", "torch_ort.debug", script)
    assert right.returncode == 0, right.stderr
    assert right.stdout == "torch.Size([2, 3])\n"
    assert "torch_ort: 1 graphs checked, 0 wrong" in right.stderr
    wrong = run_fork(tool, "--folder", tmp_path / "found", script, "wrong")
    assert wrong.returncode == 1, wrong.stderr
    assert "the kernel of region 'sin_to_exp' makes them wrong" in wrong.stderr
    (folder,) = (tmp_path / "found").iterdir()
    assert "'sin_to_exp'" in (folder / "README.md").read_text()
    again = run_fork(tool, "--again", folder)  # where nothing is planted
    assert (again.returncode, again.stdout) == (0, "the graphs give the same numbers\n")


@pytest.mark.parametrize("arguments", [(), ("--again", "a", "b.py")])
def test_a_script_or_a_folder_is_wanted(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    words = "got neither a script nor --again, or both; want one of them"
    assert words in capsys.readouterr().err
