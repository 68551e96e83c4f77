"""Loggers in captured functions: what is said once breaks no graph, and all else does."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters as of_dynamo

import torch_ort

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("Dynamo breaks graphs at loggers")]

X = torch.ones(3)


class Logger(logging.Logger):
    @functools.lru_cache(None)  # noqa: B019  (as transformers has it)
    def warning_once(self, message: str, *args: object, extra: str = "") -> None:
        self.warning(message + extra, *args)


log = Logger("test_messages_said_once")


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log.addHandler(handler)
    Logger.warning_once.cache_clear()
    yield found
    log.removeHandler(handler)


def once(x: Tensor) -> Tensor:
    y = x * 2
    log.warning_once(f"{x.dim()} dim of %s", "x", extra="!")
    return y + 1


def each_time(x: Tensor) -> Tensor:
    y = x * 2
    log.warning("a message")
    return y + 1


def of_numbers(x: Tensor) -> Tensor:
    y = x * 2
    log.warning_once("the sum is %s", y.sum())
    return y + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_said_once_is_said_in_the_capture(said: list[str], fullgraph: bool) -> None:
    compiled = torch.compile(once, backend="ort", fullgraph=fullgraph)
    for _ in range(2):
        assert torch.equal(compiled(X), X * 2 + 1)
    assert said == ["1 dim of x!"]
    counters = torch_ort.counters()
    assert (counters["graphs_captured"], counters["graph_breaks"]) == (1, 0)
    once(X)  # eager PyTorch has nothing more to say
    compiled(X[:2, None])
    assert said == ["1 dim of x!", "2 dim of x!"]


@pytest.mark.parametrize(
    "function",
    [
        each_time,
        pytest.param(
            of_numbers, marks=pytest.mark.hands_over("Dynamo captures parts of Python's logging")
        ),
    ],
)
def test_other_messages_break_the_graph(said: list[str], function: Callable) -> None:
    compiled = torch.compile(function, backend="ort")
    for _ in range(2):
        assert torch.equal(compiled(X), X * 2 + 1)
    assert len(said) == 2
    assert torch_ort.counters()["graph_breaks"] > 0


def test_graphs_of_other_backends_break_as_ever(said: list[str]) -> None:
    torch.compile(once, backend="ort")(X)
    torch.compiler.reset()
    of_dynamo.clear()
    torch.compile(once, backend="eager")(X)
    assert of_dynamo["stats"]["unique_graphs"] == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"logging\.Logger method"):
        torch.compile(once, backend="eager", fullgraph=True)(X[:2])
