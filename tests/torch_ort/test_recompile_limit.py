"""Torch stops compiling a function again and again; that the rest runs in eager is said once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import torch_ort
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


@pytest.fixture(autouse=True)
def two_graphs_each() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def times_length(x: torch.Tensor, word: str) -> torch.Tensor:
    """A function that is compiled anew for each word."""
    return x * len(word)


def call_often(call, words=("a", "bb", "ccc", "dddd", "a")) -> list[str]:
    """Call with several words, check the results, and give our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for word in words:
            torch.testing.assert_close(call(torch.ones(3), word), torch.full((3,), len(word) * 1.0))
    return [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]


def test_one_warning_and_one_count(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    (message,) = call_often(torch.compile(times_length, backend="ort"))
    line = times_length.__code__.co_firstlineno
    assert message.startswith(
        f"torch_ort: capture: 'times_length' (test_recompile_limit.py:{line}): compiled too often: "
        "got torch._dynamo.config.recompile_limit = 2; calls that need a new graph run in eager"
    )
    counters = torch_ort.counters()
    assert counters["captures_refused"] == 1
    assert counters["graphs_captured"] == 2
    assert counters["forward_runs"] == 3
    assert counters["fallbacks"] == 0
    torch_ort.reset_counters()
    assert torch_ort.counters()["captures_refused"] == 0


def test_each_function_is_told_of(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    @torch.compile(backend="ort")
    def outer(x, word):
        y = x * len(word)
        torch._dynamo.graph_break()
        return y * 1

    def inner(x, word):
        return x + len(word) - 1

    assert len(call_often(outer)) == 1  # the part after the break is the same for each word
    assert len(call_often(torch.compile(inner, backend="ort"))) == 1
    assert torch_ort.counters()["captures_refused"] == 2


def test_the_limit_of_all_graphs(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=3):
        (message,) = call_often(torch.compile(times_length, backend="ort"))
    assert "got torch._dynamo.config.accumulated_recompile_limit = 3;" in message


def test_other_backends_are_not_told_of():
    assert call_often(torch.compile(times_length, backend="eager")) == []
    assert torch_ort.counters()["captures_refused"] == 0


def test_what_explain_has_compiled_is_forgotten_by_a_reset():
    torch_ort.explain(torch.nn.Linear(3, 3), torch.ones(2, 3))
    torch.compiler.reset()
    assert call_often(torch.compile(times_length, backend="eager")) == []
    assert torch_ort.counters()["captures_refused"] == 0


def test_strict_raises():
    with pytest.raises(
        torch_ort.Unsupported,
        match=r"capture: 'times_length' .*: compiled too often: got .*recompile_limit = 2$",
    ):
        call_often(torch.compile(times_length, backend="ort"))


def test_torch_raises_where_no_graph_may_break(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(Exception, match="fullgraph=True"):
            call_often(torch.compile(times_length, backend="ort", fullgraph=True))
    assert torch_ort.counters()["captures_refused"] == 1
