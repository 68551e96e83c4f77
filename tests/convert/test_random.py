"""Rows of random calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conversion import convert, floats, ops_of, run

X = floats(8, 6)


def same_numbers(function) -> list[str]:
    """Run converted and eager from one seed; give the ops."""
    graph = convert(function, X)
    torch.manual_seed(5)
    want, after = function(X), torch.rand(3)
    torch.manual_seed(5)
    (got,) = run(graph, [X])
    assert torch.equal(got, want)
    assert torch.equal(torch.rand(3), after)
    return ops_of(graph)


def test_native_dropout() -> None:
    def dropout(ratio: float, train: bool):
        return lambda x: torch.native_dropout(x, ratio, train)[0]

    assert same_numbers(dropout(0.3, True)) == ["Dropout"]
    assert same_numbers(dropout(0.3, False)) == ["aten::native_dropout"]
    # ONNX wants a ratio below 1. The engine draws nothing here, as `dropout` does.
    assert ops_of(convert(dropout(1.0, True), X)) == ["aten::native_dropout"]


def test_dropout_as_traced_on_the_cpu() -> None:
    assert "aten::bernoulli" in same_numbers(lambda x: F.dropout(x, 0.3))


def test_other_random_calls_are_aten_nodes() -> None:
    assert same_numbers(lambda x: torch.rand_like(x)) == ["aten::rand_like"]
    assert same_numbers(lambda x: torch.randn(3, 4)) == ["aten::randn"]
