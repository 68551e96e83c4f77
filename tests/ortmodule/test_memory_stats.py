# The lines of ORTMODULE_PRINT_MEMORY_STATS: their form, their schedule, the order of phases.
from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_ort import DebugOptions, ORTModule
from torch_ort.ortmodule import memory_stats

pytestmark = pytest.mark.ort_only

NUMBER = r"(\d+)"
CPU_NAMES = ("resident", "max resident", "arena", "max arena", "param", "grad", "buffer")
CUDA_NAMES = (
    "allocated", "max allocated", "cached", "max cached", "inactive", "max inactive", "param",
    "grad", "buffer",
)  # fmt: skip
TRAINING = ["pre_forward", "post_forward", "pre_backward", "post_backward"]
FORWARD = TRAINING[:2]
X = torch.ones(2, 4)
MIB = 2**18  # float32 numbers


@pytest.fixture(autouse=True)
def switched_on(monkeypatch) -> None:
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")


@pytest.fixture
def lines(capsys) -> Callable[[], list[str]]:
    """Return a function that gives the lines printed since it was last asked."""
    return lambda: capsys.readouterr().out.splitlines()


@pytest.fixture
def phases(lines) -> Callable[[], list[tuple[int, str]]]:
    """Return a function that gives step and phase of each new line."""

    def found() -> list[tuple[int, str]]:
        pattern = r"rank-0 step (\d+) memory \(MiB\) \| phase: (\w+) \|"
        matches = [re.match(pattern, line) for line in lines()]
        return [(int(match[1]), match[2]) for match in matches]

    return found


def line_of(names: tuple[str, ...]) -> re.Pattern:
    figures = r" \| ".join(f"{name}: {NUMBER}" for name in names)
    return re.compile(rf"rank-0 step {NUMBER} memory \(MiB\) \| phase: (\w+) \| {figures}")


def figures(line: str, names: tuple[str, ...] = CPU_NAMES) -> dict[str, int]:
    match = line_of(names).fullmatch(line)
    assert match, line
    return dict(zip(names, map(int, match.groups()[2:]), strict=True))


def train(module: nn.Module, steps: int) -> None:
    for _ in range(steps):
        module(X).sum().backward()


def test_lines(device, lines):
    module = ORTModule(nn.Linear(4, 3, device=device))
    module(X.to(device)).sum().backward()
    names = CUDA_NAMES if device == "cuda" else CPU_NAMES
    found = [line_of(names).fullmatch(line) for line in lines()]
    assert [(match[1], match[2]) for match in found] == [("0", phase) for phase in TRAINING]


def test_sizes_of_the_module(lines):
    class Held(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, MIB)  # 4 MiB of weights and 1 of biases
            self.register_buffer("kept", torch.zeros(2 * MIB))

    module = ORTModule(Held())
    train(module, 2)
    found = [figures(line) for line in lines()]
    assert {each["param"] for each in found} == {5}
    assert {each["buffer"] for each in found} == {2}
    assert [each["grad"] for each in found] == [0, 0, 0, 5, 5, 5, 5, 5]
    module.zero_grad()
    module(X)
    assert figures(lines()[0])["grad"] == 0


def test_figures_are_rounded(lines):
    module = ORTModule(nn.Linear(1, MIB // 4 * 3, bias=False))  # 0.75 MiB
    module(torch.ones(1, 1))
    assert figures(lines()[0])["param"] == 1


def test_figures_of_the_process(lines):
    module = ORTModule(nn.Sequential(nn.Linear(4, MIB), nn.GELU(), nn.Linear(MIB, 1)))
    train(module, 2)
    for line in lines():
        found = figures(line)
        # The kernel sums up the two by different ways, so that rounding may part them.
        assert 0 < found["resident"] <= found["max resident"] + 1
        assert found["arena"] <= found["max arena"]
    assert found["max arena"] > 0


def test_schedule_of_training(phases):
    train(ORTModule(nn.Linear(4, 3)), 40)
    steps = [*range(10), 16, 32]
    assert phases() == [(step, phase) for step in steps for phase in TRAINING]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_schedule_without_gradients(mode, phases):
    module = ORTModule(nn.Linear(4, 3)).eval()
    with mode():
        for _ in range(40):
            module(X)
    steps = [*range(10), 16, 32]
    assert phases() == [(step, phase) for step in steps for phase in FORWARD]


def test_schedule_of_evaluation_with_grad(phases):
    module = ORTModule(nn.Linear(4, 3)).eval()
    for _ in range(20):
        module(X)
    assert phases() == [(step, phase) for step in [*range(10), 16] for phase in FORWARD]


def test_evaluation_between_steps(phases):
    module = ORTModule(nn.Linear(4, 3))
    train(module, 1)
    with torch.no_grad():
        module.eval()(X)
    train(module.train(), 1)
    expected = [(0, phase) for phase in TRAINING] + [(1, phase) for phase in FORWARD]
    assert phases() == expected + [(2, phase) for phase in TRAINING]


def test_phases_stand_where_they_happen(phases):
    module = ORTModule(nn.Linear(4, 3))
    loss = module(X).sum()
    assert phases() == [(0, phase) for phase in FORWARD]
    module.weight.register_hook(lambda gradient: seen.extend(phases()))
    seen: list = []
    loss.backward()
    assert seen == [(0, "pre_backward")]
    assert phases() == [(0, "post_backward")]


def test_a_module_with_several_outputs_goes_back_once(phases):
    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"a": y.exp(), "b": [y.sin(), 3]}

    module = ORTModule(Two(4, 3))
    for _ in range(2):
        outputs = module(X)
        (outputs["a"].sum() + outputs["b"][0].sum()).backward()
    assert phases() == [(step, phase) for step in range(2) for phase in TRAINING]


def test_gradients_by_autograd_grad(phases):
    module = ORTModule(nn.Linear(4, 3))
    torch.autograd.grad(module(X).sum(), list(module.parameters()))
    assert phases() == [(0, phase) for phase in TRAINING]


def test_numbers_are_those_of_eager():
    eager = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    module = ORTModule(copy.deepcopy(eager))
    for each in (eager, module):
        train(each, 3)
    for want, got in zip(eager.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_other_ranks_say_nothing(lines, monkeypatch):
    monkeypatch.setattr(memory_stats, "rank_and_world", lambda: (1, 2))
    train(ORTModule(nn.Linear(4, 3)), 2)
    assert lines() == []


@pytest.mark.parametrize("value", ["0", None])
def test_switched_off(value, lines, monkeypatch):
    monkeypatch.delenv("ORTMODULE_PRINT_MEMORY_STATS")
    if value is not None:
        monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", value)
    train(ORTModule(nn.Linear(4, 3)), 2)
    assert lines() == []


def test_switched_on_by_config(lines, monkeypatch):
    monkeypatch.delenv("ORTMODULE_PRINT_MEMORY_STATS")
    train(ORTModule(nn.Linear(4, 3), DebugOptions(config={"print_memory_stats": True})), 1)
    assert len(lines()) == 4


def test_each_module_counts_its_own_steps(phases):
    first, second = (ORTModule(nn.Linear(4, 3)) for _ in range(2))
    train(first, 2)
    phases()
    train(second, 1)
    train(first, 1)
    assert [step for step, _ in phases()] == [0] * 4 + [2] * 4


@pytest.mark.hands_over("PyTorch words the error")
def test_an_error_in_forward_leaves_the_step_open(phases):
    module = ORTModule(nn.Linear(4, 3))
    with pytest.raises(Exception, match=r"cannot be multiplied|reduction dim"):
        module(torch.ones(2, 5))
    train(module, 1)
    assert phases() == [(0, "pre_forward"), *((0, phase) for phase in TRAINING)]
