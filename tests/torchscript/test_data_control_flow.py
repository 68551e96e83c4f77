# Branches and loops on data: one graph with ONNX's If and Loop serves every way of a script.
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import torch_ort
from torch_ort import _C
from torch_ort.ortmodule import ORTModuleONNXModelException


def rows(step: int, offset: float = 0.0) -> Tensor:
    return torch.rand(2 + step, 4) - 0.5 + offset


UP = [rows(step, 1.0) for step in range(2)]  # sums above 0
DOWN = [rows(step, -1.0) for step in range(2)]
BOTH = [*UP, *DOWN, UP[0]]


def check(
    scripted: Callable[..., object], calls: Sequence[Tensor | tuple], *, graphs: int = 1
) -> None:
    """Compare calls without gradients; all of them run in `graphs` graphs of the engine."""
    ours = torch_ort.compile(scripted, options={"check": 2})
    torch_ort.reset_counters()
    with torch.no_grad():
        for call in calls:
            args = call if isinstance(call, tuple) else (call,)
            torch.manual_seed(3)
            want = scripted(*args)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            torch.testing.assert_close(ours(*args), want)
            torch.testing.assert_close(torch.get_rng_state(), after)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0, counters
    assert counters["graphs_captured"] == counters["graphs_recorded"] == graphs, counters
    assert counters["forward_runs"] == len(calls), counters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)


class OneWay(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if bool(x.sum() > 0):
            y = y * 2
        return y


class BothWays(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            y = self.layer(x)
        else:
            x = self.other(x)
            y = self.norm(x) - x
        return y * x


class EarlyReturn(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.layer(x)
        y = self.other(x)
        if float(y.mean()) > 0.01 and not bool((x < -1.4).any()):
            return y * 2
        return y + 1


class Chain(Net):
    def forward(self, x: Tensor) -> Tensor:
        mean = float(x.mean())
        if mean > 0.9 or mean < -3:
            return x.exp()
        elif mean > 0 and not bool(x[0, 0] > x[1, 1]):
            return self.layer(x)
        elif int(x.argmax(1)[0]) % 2 == 0:
            return x.sin()
        return -x


class Numbers(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale, count, is_up = 1.0, 1, False
        if bool(x.sum() > 0):
            scale, count, is_up = 2.5, x.size(0), True
        y = x * scale + count
        if is_up:
            y = y - min(count, 2) // 2 - max(scale, 1.5) / 2
        return y + abs(-count) * 0.5


class Several(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        parts = [x, x + 1]
        if bool(x.sum() > 0):
            first, parts, second = self.layer(x), [x * 2, x], x > 0
        else:
            first, second = x.t().contiguous().t(), x < 0
        return first, parts, second


class Views(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        z = y.t() if bool(x.sum() > 0) else y.reshape(4, -1)
        w = y.t() if bool(x.sum() > 0.5) else self.layer.weight.sum() + y
        return torch.tanh(y).t() + z, w.sum() + z


class Sizes(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y = self.layer(x)
        if bool(x.sum() > 0):
            y = torch.cat([y, y * 2])
        elif bool(x.sum() < -6):
            y = y[:1]
        z = torch.softmax(torch.relu(y) + 1, 1)
        return z, z.sum(0) + torch.cat([z, x]).mean(), z.size(0)


class Nested(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            y = self.layer(x)
            y = y + 1 if bool(y.sum() > 0) else y - 1
            return y if bool(y[0, 0] > 0) else -y
        return x


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.rand_like(x)
        if bool(x.sum() > 2):
            x = torch.dropout(x, 0.5, True) + torch.randn(x.size(0), 4)
        return x * torch.rand_like(x)


class InPlaceInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] = 2.0
        if bool(x.sum() > 0):
            z = y.clone()
            z[0].mul_(3.0).add_(y[1])
            parts = [z]
            parts.append(z + 1)
            y = torch.stack(parts).sum(0)
        return y


class OnSizeAndData(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 1 and bool(x.sum() > 0):
            return self.layer(x)
        return x


@pytest.mark.parametrize(
    "kind",
    [OneWay, BothWays, EarlyReturn, Chain, Numbers, Several, Views, Sizes, Nested, Draws,
     InPlaceInside, OnSizeAndData],
)  # fmt: skip
def test_branches(kind):
    check(torch.jit.script(kind().eval()), BOTH)


class Newton(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x, guess, rounds = x.abs() + 1, torch.ones_like(x), 0
        while bool(((guess * guess - x).abs() > 1e-4).any()):
            guess = (guess + x / guess) / 2
            rounds += 1
        return guess + rounds, x.size(0)


class Rounds(Net):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        for i in range(int(count)):
            x = torch.tanh(self.layer(x)) * (i + 1)
        return x


class Ranges(Net):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        total = 0
        for i in range(1, int(count), 2):
            x, total = x * 1.5 - i, total + i
        return x + total


class Steps(Net):
    """The steps of a sequence, as far as it goes."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        for t in range(int(count)):
            state = torch.tanh(self.layer(x[t]) + state) + x[-1]
        return state


class Breaks(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        last = x
        for i in range(6):
            last = x
            x = x * 0.5 - 0.1
            if bool(x.sum() < 0.2):
                break
            if i % 2 == 0:
                continue
            x = x + last * 0.2
        return x, last


class Returns(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(9):
            x = x * 0.5 - 0.1
            if bool(x.sum() < 0.2):
                return x * i
        return x


class LoopInBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            while bool(x.sum() > 0.1):
                x = x * 0.5 if bool(x[0, 0] > 0.2) else x - 0.1
        return self.layer(x)


class Grows(Net):
    def forward(self, x: Tensor) -> Tensor:
        while bool(x.abs().sum() < 40):
            x = torch.cat([x, x * 1.1])
        return torch.relu(x).sum(1)


class Carries(Net):
    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        a, b, odd = x, x + 1, False
        for _ in range(int(count)):
            a, b, odd = b, a.t().contiguous().t() * 0.5, not odd
        return (b, a) if odd else (a, b)


@pytest.mark.parametrize("kind", [Newton, Breaks, Returns, LoopInBranch, Grows])
def test_while_loops(kind):
    check(torch.jit.script(kind().eval()), BOTH)


@pytest.mark.parametrize("kind", [Rounds, Ranges, Carries])
def test_rounds_that_data_tells(kind):
    counts = [torch.tensor(n) for n in (3, 0, 1, 6, -2)]
    check(torch.jit.script(kind().eval()), list(zip(BOTH, counts, strict=True)))


def test_steps_of_a_sequence():
    calls = [(torch.rand(6, 2, 4), torch.tensor([n])) for n in (3, 0, 6)]
    check(torch.jit.script(Steps().eval()), calls)


def test_empty_tensors():
    check(torch.jit.script(OneWay().eval()), [UP[0], torch.ones(0, 4), DOWN[0]])


def test_conditions_on_sizes_are_guards_beside_those_on_data():
    check(torch.jit.script(OnSizeAndData().eval()), [*BOTH, UP[0][:1]], graphs=2)


def test_regions_are_fused_in_bodies():
    class Wide(Net):
        def forward(self, x: Tensor) -> Tensor:
            if bool(x.sum() > 0):
                return torch.tanh(x * 2 + 1).exp() - x
            return x

    check(torch.jit.script(Wide()), [torch.rand(64, 64), torch.rand(64, 64) - 1])
    assert torch_ort.counters()["steps_region"] == 1  # on the way that was taken


def test_calls_from_several_threads():
    scripted = torch.jit.script(LoopInBranch().eval())
    ours = torch_ort.compile(scripted)
    with torch.no_grad():
        want = [scripted(x) for x in BOTH]
        ours(UP[0])
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    for x, y in zip(BOTH, want, strict=True):
                        torch.testing.assert_close(ours(x), y)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert torch_ort.counters()["fallbacks"] == 0


def test_results_are_no_memory_of_arguments():
    ours = torch_ort.compile(torch.jit.script(EarlyReturn().eval()))
    keeps = torch_ort.compile(torch.jit.script(OnSizeAndData().eval()))
    with torch.no_grad():
        x = DOWN[0].clone()
        y = keeps(x)
        y.zero_()
        torch.testing.assert_close(x, DOWN[0])
        first = ours(UP[0])
        kept = first.clone()
        ours(DOWN[0])
        torch.testing.assert_close(first, kept)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            raise ValueError("too much")
        return x


class Appends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        while bool(x.sum() > 0):
            x = x - 1
            parts.append(x)
        return torch.cat(parts)


class Lengthens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        if bool(x.sum() > 0):
            parts = [x, x]
        return torch.cat(parts)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        if bool(x.sum() > 0):
            y[0] = 1.0
        return y


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            self.count += 1
        return x * 2


class Kinds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() if bool(x.sum() > 0) else x


class Ranks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) if bool(x.sum() > 0) else x


class Words(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        name = "one" if bool(x.sum() > 0) else "two"
        return x * 2 if name == "one" else x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            print(x)
        return x * 2


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            x = x[x > 0]
        return x.sum()


class PicksRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            x = x[x[:, 0] > 0]
        return x.sum(0)


def test_a_branch_may_have_sizes_that_data_tells():
    scripted = torch.jit.script(PicksRows())
    ours = torch_ort.compile(scripted)
    with torch.no_grad():
        for x in (rows(1, 1.0), rows(4, 1.0), -rows(3, 1.0)):
            torch.testing.assert_close(ours(x), scripted(x))


class AsksSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x[1:] if bool(x.sum() > 0) else x
        return y * 2 if y.size(0) == 2 else y


WHERE = r" \(.*test_data_control_flow\.py:\d+: "


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Raises,
            rf"a branch on data cannot be captured: it raises an error{WHERE}raise ValueError",
        ),
        (Appends, r"a loop on data cannot be captured: it changes a list from outside of it"),
        (Lengthens, r"a branch on data .*: its branches give a list of 2 and a list of 1"),
        (Writes, r"a branch on data .*: it writes into a tensor from outside of it"),
        (Counts, rf"a branch on data .*: it assigns an attribute{WHERE}self\.count"),
        (Kinds, r"different forms: float64 of 2 dims and float32 of 2 dims"),
        (Ranks, r"different forms: float32 of 1 dims and float32 of 2 dims"),
        (Words, r"its branches give 'one' and 'two'"),
        (Prints, rf"it prints{WHERE}print"),
        (Picks, r"different forms: float32 of 1 dims and float32 of 2 dims"),
        (
            AsksSize,
            r"data-dependent branch or loop .*what is done depends on .*, and t\d+ is unbacked",
        ),
    ],
)
def test_what_no_body_can_do_is_refused(kind, words, monkeypatch):
    scripted = torch.jit.script(kind())
    with torch.no_grad():
        with pytest.raises(ORTModuleONNXModelException, match=words):
            torch_ort.compile(scripted)(rows(1, 1.0))
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        ours, x = torch_ort.compile(torch.jit.script(kind())), rows(1, -1.0)
        with pytest.warns(torch_ort.fallback.FallbackWarning, match=words):
            torch.testing.assert_close(ours(x), scripted(x))
    assert torch_ort.counters()["recordings_handed_over"] == 0


def saved(scripted: nn.Module, call: tuple, prefix: Path, **options: object) -> list[Path]:
    ours = torch_ort.compile(
        scripted, options={"save_onnx": True, "onnx_prefix": str(prefix), **options}
    )
    with torch.no_grad():
        ours(*call)
    return sorted(prefix.parent.glob("*.onnx"))


def kinds(graph: onnx.GraphProto) -> set[tuple[str, str]]:
    found = {(node.domain, node.op_type) for node in graph.node}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= kinds(attribute.g)
    return found


@pytest.mark.parametrize(
    ("kind", "with_count"),
    [(OneWay, False), (BothWays, False), (EarlyReturn, False), (Chain, False), (Numbers, False),
     (Sizes, False), (Nested, False), (Newton, False), (Breaks, False), (LoopInBranch, False),
     (Grows, False), (Rounds, True), (Ranges, True), (Carries, True)],
)  # fmt: skip
def test_files_run_elsewhere(kind, with_count, tmp_path):
    scripted = torch.jit.script(kind().eval())
    counts = [torch.tensor(n) for n in (3, 0, 1, 6, 2)]
    calls = list(zip(BOTH, counts, strict=True)) if with_count else [(x,) for x in BOTH]
    files = saved(scripted, calls[0], tmp_path / "script")
    assert len(files) == 2
    for path in files:
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {domain for domain, _ in kinds(model.graph)} == {""}, kinds(model.graph)
        assert {("", "If"), ("", "Loop")} & kinds(model.graph)
        other = onnxruntime.InferenceSession(str(path))
        graph = _C.Graph.from_onnx(path.read_bytes())
        names = [value.name for value in model.graph.input]
        for call in calls:
            with torch.no_grad():
                want = scripted(*call)
            want = [torch.as_tensor(x) for x in (want if isinstance(want, tuple) else (want,))]
            inputs = dict(zip(names, call, strict=True))
            got = other.run(None, {name: x.numpy() for name, x in inputs.items()})
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-4, atol=1e-5)
            for a, b in zip(_C.run(graph, inputs).values(), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int, float, bool, dict[str, int]]:
        count = 0
        while bool(x.abs().max() > 0.5) and count < 10:
            x = x * 0.7
            count += 1
        total = int(x.sum() * 10)
        return x, count, float(x.sum()), bool(x.sum() > 0), {"total": total // 3 + count}


def test_numbers_that_data_tells_are_results() -> None:
    scripted = torch.jit.script(Numbers())
    check(scripted, BOTH)
    with torch.no_grad():
        _, *numbers, _ = torch_ort.compile(scripted)(UP[0])
    assert [*map(type, numbers)] == [int, float, bool]
