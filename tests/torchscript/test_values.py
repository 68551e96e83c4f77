# What scripts take and give: containers, names, defaults, None, numbers.
import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_ort
from torch_ort import ORTModule
from torch_ort.ortmodule import ORTModuleONNXModelException


class Point(NamedTuple):
    first: Tensor
    second: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def x(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4)


def check(module: nn.Module, *calls: tuple[tuple, dict], graphs: int = 1) -> ORTModule:
    """Compare calls of a scripted module in the engine with those in TorchScript's interpreter."""
    scripted = torch.jit.script(module)
    with torch.no_grad():
        alone = copy.deepcopy(scripted)
    for parameter in alone.parameters():
        parameter.requires_grad_()
    ours = ORTModule(scripted)
    for args, kwargs in calls:
        want, got = alone(*args, **kwargs), ours(*args, **kwargs)
        assert_same(got, want)
        for result in (want, got):
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum().backward()
        torch.testing.assert_close(ours.layer.weight.grad, alone.layer.weight.grad)
        for made in (ours, alone):
            made.zero_grad()
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["graphs_captured"] == graphs
    assert torch_ort.counters()["forward_runs"] == len(calls)
    return ours


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, tuple) and hasattr(want, "_fields"):
        assert got._fields == want._fields
        assert type(got).__name__ == type(want).__name__
    else:
        assert type(got) is type(want)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert_same(list(got.values()), list(want.values()))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for part, other in zip(got, want, strict=True):
            assert_same(part, other)
    else:
        assert got == want


class Containers(Net):
    def forward(
        self, table: dict[str, Tensor], parts: list[Tensor], pair: tuple[Tensor, int]
    ) -> tuple[dict[str, Tensor], Point, list[Tensor], Tensor | None, int]:
        y = self.layer(table["x"])
        for _, value in table.items():
            y = y + value
        table["new"] = y
        parts.append(y)
        return table, Point(y, pair[0] * pair[1]), parts, None, y.size(0)


def test_containers_in_and_out():
    def call(rows: int) -> tuple[tuple, dict]:
        return ({"x": x(rows), "y": x(rows)}, [x(rows)], (x(rows), 3)), {}

    check(Containers(), call(2), call(5))


def test_a_script_leaves_containers_of_the_caller_alone():
    ours = ORTModule(torch.jit.script(Containers()))
    table, parts = {"x": x()}, [x()]
    ours(table, parts, (x(), 1))
    assert list(table) == ["x"]
    assert len(parts) == 1


def test_a_namedtuple_as_argument():
    class TakesPoint(Net):
        def forward(self, point: Point) -> Point:
            return Point(self.layer(point.first), point.second * 2)

    check(TakesPoint(), ((Point(x(), x()),), {}), ((Point(x(5), x(2)),), {}))


class Defaults(Net):
    def forward(self, x: Tensor, scale: float = 2.0, shift: int = 1, twice: bool = False) -> Tensor:
        y = self.layer(x) * scale + shift
        return y * 2 if twice else y


def test_names_and_defaults():
    check(
        Defaults(),
        ((x(),), {}),
        ((x(),), {"twice": True}),
        ((x(), 2.0), {"shift": 3}),
        ((x(), 2.0), {"shift": 4}),
        ((), {"x": x(), "shift": 1}),
        graphs=4,
    )


def test_an_integer_where_a_float_is_wanted():
    check(Defaults(), ((x(), 3), {}), ((x(), 4), {}))


@pytest.mark.hands_over("nothing can capture it")
@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"argument 'x' of forward\(\) is missing"),
        ((1.0,), {}, r"argument 'x' of forward\(\): got a float, want Tensor"),
        (("one",), {}, r"argument 'x' of forward\(\): got a str, want Tensor"),
        ((torch.ones(2, 4), 1.0, torch.ones(2)), {}, r"argument 'shift'.*got a \w+, want int"),
        ((torch.ones(2, 4),), {"other": 1}, r"forward\(\): arguments of unknown names"),
        ((torch.ones(2, 4), 1.0, 1, True, 5), {}, r"got 5 arguments, want at most 4"),
    ],
)
def test_wrong_arguments(args, kwargs, words, monkeypatch):
    module = torch.jit.script(Defaults())
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ORTModule(module)(*args, **kwargs)
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with pytest.raises(RuntimeError, match="forward"):  # PyTorch's own
        ORTModule(module)(*args, **kwargs)


def test_tensors_of_other_dtypes_and_dims():
    class Any2(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float().view(-1, 4))

    check(Any2(), ((x(),), {}), ((x().double(),), {}), ((x().view(3, 2, 2),), {}), graphs=3)


def test_the_same_tensor_twice_in_a_result():
    class Twice(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.layer(x)
            return y, y, x

    check(Twice(), ((x(),), {}))


def test_views_and_edits_in_place():
    class Edits(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y[:, 1:].mul_(2)
            y.add_(1).relu_()
            return y.view(-1)[2:]

    check(Edits(), ((x(),), {}), ((x(5),), {}))


def test_an_argument_is_written_into():
    class Writes(Net):
        def forward(self, x: Tensor, buffer: Tensor) -> Tensor:
            buffer.add_(x.detach())
            return self.layer(x) + buffer

    buffers = [torch.zeros(3, 4), torch.zeros(3, 4)]
    scripted = torch.jit.script(Writes())
    given = x()
    for buffer, run in zip(buffers, (scripted, ORTModule(scripted)), strict=True):
        run(given, buffer)
    torch.testing.assert_close(buffers[1], buffers[0])
    assert torch_ort.counters()["fallbacks"] == 0


def test_constants_in_a_frozen_module():
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())).eval()
    frozen = torch.jit.freeze(module)
    ours = ORTModule(frozen)
    with torch.no_grad():
        for rows in (2, 3):
            given = x(rows)
            torch.testing.assert_close(ours(given), module(given))
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["graphs_captured"] == 1
