"""Writes into tensors of which several elements are one number in memory.

| what                                               | has to give                               |
| -------------------------------------------------- | ----------------------------------------- |
| fill_, masks, indices, windows; where sizes vary   | eager PyTorch, after one warning          |
| what eager PyTorch refuses                         | its error                                 |
| strict mode; the recorder, and AOTAutograd         | an error that names operator and line     |
| parts without overlap, views, sizes of 1 or 0      | a graph                                   |
| writes of other threads                            | a graph                                   |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_ort
from tests.roads import ROADS, Applies
from torch_ort import _C

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
    pytest.mark.filterwarnings("ignore:.*cannot run a graph.*"),
]

Function = Callable[[Tensor], Tensor]
SHARED = "writes into a tensor of which several elements are one number in memory"


def twice(change: Callable[[Tensor], object], dims: tuple[int, ...] = (3, 4)) -> Function:
    """Give a function that changes an expanded tensor, and returns it and what it shows."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        view = y.expand(*dims)
        change(view)
        return (view + y.sum()) * 3

    return function


def windows(x: Tensor) -> Tensor:
    y = (x * 2).flatten()
    y.unfold(0, 2, 1).fill_(5)
    return y * 3


def rows_of_a_call(x: Tensor) -> Tensor:
    y = (x * 2)[:1]
    y.expand(x.size(0), 4).mul_(0)
    return y * 3


SILENT = {
    "fill_": twice(lambda view: view.fill_(5)),
    "zero_": twice(lambda view: view.zero_()),
    "masked_fill_": twice(lambda view: view.masked_fill_(view < 3, 7.0)),
    "assigned mask": twice(lambda view: view.__setitem__(view < 3, 7.0)),
    "indices": twice(lambda view: view.__setitem__((torch.tensor([0, 1]), 1), 7.0)),
    "index_fill_": twice(lambda view: view.index_fill_(1, torch.tensor([1]), 7.0)),
}  # fmt: skip
REFUSED = {
    "add_": twice(lambda view: view.add_(1)),
    "index_add_": twice(lambda view: view.index_add_(1, torch.tensor([1]), torch.ones(3, 1))),
    "column": twice(lambda view: view.__setitem__((slice(None), 0), 7)),
    "of several": twice(lambda view: torch._foreach_add_([torch.zeros(2), view], 1.0)),
    "sizes of a call": rows_of_a_call,
}
FINE = {
    "element": twice(lambda view: view.__setitem__((0, 0), 7)),
    "row": twice(lambda view: view[1].add_(1)),
    "strides alone": twice(lambda view: view.unsqueeze_(0)),
    "not expanded": twice(lambda view: view.add_(1), (1, 4)),
    "no elements": twice(lambda view: view[:0].fill_(1)),
    "a copy": twice(lambda view: view.clone().add_(1)),
    "operators of numbers": lambda x: (x > 0).expand(3, 4) & (x < 9) | (x == 1).expand(3, 4),
    "diagonal": lambda x: (lambda y: (y.diagonal().add_(1), y)[1])(x.t() @ x),
}


@pytest.fixture
def not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ORT_STRICT", raising=False)


def outcome(call: Function, x: Tensor) -> list[Tensor] | str:
    x = x.clone()
    try:
        return [call(x), x]
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.usefixtures("not_strict")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", [*SILENT, *REFUSED])
def test_eager_runs_the_program(name: str, road: str) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    module = Applies((SILENT | REFUSED)[name])
    x = torch.arange(4.0)[None] - 1.5
    x = x.expand(3, 4).clone() if name == "sizes of a call" else x
    got, want = outcome(ROADS[road](module), x), outcome(module, x)
    if name in REFUSED:
        assert "more than one element of the written-to tensor" in want
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch_ort.counters()["fallbacks"] == 1


@pytest.mark.hands_over("windows of a tensor")
@pytest.mark.usefixtures("not_strict")
@pytest.mark.parametrize("road", ROADS)
def test_windows_are_refused_by_functionalization(road: str) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    x = torch.arange(4.0)[None] - 1.5
    torch.testing.assert_close(outcome(ROADS[road](Applies(windows)), x), outcome(windows, x))
    assert torch_ort.counters()["fallbacks"] == 1


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", FINE)
def test_other_writes_are_captured(name: str, road: str) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()
    module = Applies(FINE[name])
    x = torch.arange(4.0)[None] - 1.5
    got, want = outcome(ROADS[road](module), x), outcome(module, x)
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ROADS)
def test_error_names_operator_and_line(road: str) -> None:
    torch.compiler.reset()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.expand(3, 4).masked_fill_(x < 3, 7.0)
        return y

    number = function.__code__.co_firstlineno + 2
    with pytest.raises(Exception, match="masked_fill_") as caught:
        ROADS[road](Applies(function))(torch.ones(1, 4))
    place = f"masked_fill_ ({os.path.basename(__file__)}:{number}) {SHARED}"
    assert place in str(caught.value)
    assert "such as an expanded one; clone() it first" in str(caught.value)


def test_aotautograd_refuses_it_too() -> None:
    torch.compiler.reset()
    call = torch.compile(SILENT["fill_"], backend="ort", options={"disable": ["recorder"]})
    with pytest.raises(Exception, match=f"fill_ {SHARED}"):
        call(torch.ones(1, 4))


def test_writes_of_other_threads_are_theirs() -> None:
    names: list[str] = []
    view = torch.zeros(1, 4).expand(3, 4)
    with _C.OverlappingWrites(names.append):
        other = threading.Thread(target=lambda: view.fill_(1))
        other.start()
        other.join()
        assert names == []
        with _C.OverlappingWrites(lambda name: names.append("inner " + name)):
            view.fill_(1)
        view.masked_fill_(view > 0, 2)
    view.fill_(1)
    assert names == ["inner aten::fill_", "aten::masked_fill_"]
