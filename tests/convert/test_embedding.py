"""Rows of reads and writes by index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conversion import check, convert, floats, ops_of, run

from torch_ort import _C

TABLE = floats(7, 4)
IDS = torch.tensor([[2, 0, 6], [1, 1, 3]])
X, INDEX = floats(2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]])


def test_embedding() -> None:
    check(lambda w, i: F.embedding(i, w), TABLE, IDS, ops=["Gather"])
    check(lambda w, i: F.embedding(i, w, padding_idx=1), TABLE, IDS, ops=["Gather"])
    check(lambda w, i: F.embedding(i, w), TABLE, IDS.int(), ops=["Gather"])
    check(lambda w, i: F.embedding(i, w), TABLE, IDS[:, :0], ops=["Gather"])
    check(lambda w, i: F.embedding(i, w), TABLE, IDS, ops=["Gather"], dynamic=True, pins=(20,))


def test_index_out_of_range_is_eagers_error() -> None:
    graph = convert(lambda w, i: F.embedding(i, w), TABLE, IDS)
    captured = _C.Session.compile(graph, {})
    compiled = torch.compile(lambda w, i: F.embedding(i, w), backend="ort")
    for wrong in (7, -1):
        ids = torch.full_like(IDS, wrong)
        with pytest.raises(IndexError, match="index out of range"):
            captured.run(dict(zip(graph.input_names, (TABLE, ids), strict=True)))
        with pytest.raises(IndexError, match="index out of range"):
            compiled(TABLE, ids)


def test_indices_of_files_count_from_the_end() -> None:
    graph = convert(lambda w, i: F.embedding(i, w), TABLE, IDS)
    (got,) = run(graph, [TABLE, IDS - 7])
    assert torch.equal(got, TABLE[IDS])
    for wrong in (7, -8):
        with pytest.raises(IndexError, match="index out of range"):
            run(graph, [TABLE, torch.full_like(IDS, wrong)])


def test_index_select() -> None:
    check(lambda x, i: x.index_select(1, i), X, torch.tensor([2, 0]), ops=["Gather"])
    check(lambda x, i: x.index_select(0, i), X, torch.tensor([1]), ops=["Gather"])
    check(lambda x, i: x.index_select(0, i), X[0], torch.tensor([1]), ops=["Gather"])
    scalar = torch.tensor(1)
    check(lambda x, i: x.index_select(0, i), X, scalar, ops=["aten::index_select"], pins=(20,))


def test_advanced_indexing_takes_negative_indices() -> None:
    check(lambda x, i: x[i], X, torch.tensor([-1, 0]), ops=["aten::index"], pins=(20,))


def test_gather() -> None:
    check(lambda x, i: x.gather(1, i), X, INDEX, ops=["GatherElements"])
    check(lambda x, i: x.gather(0, i), X, INDEX, ops=["GatherElements"])
    check(lambda x, i: x.gather(0, i), X, INDEX[:, :2], ops=["aten::gather"], pins=(20,))


def scatter_by(reduction: str):
    return lambda x, i, u: x.scatter_reduce(0, i, u, reduction)


def test_scatter() -> None:
    zeros, updates = torch.zeros(2, 3), floats(2, 3)
    index = torch.tensor([[0, 1, 1], [1, 0, 0]])
    check(lambda x, i, u: x.scatter(0, i, u), zeros, index, updates, ops=["ScatterElements"])
    adds = {0: ["aten::scatter_add"], 16: ["ScatterElements"]}
    check(lambda x, i, u: x.scatter_add(1, i, u), zeros, index, updates, ops=adds)
    for name in ("amax", "amin", "prod"):
        since = 16 if name == "prod" else 18
        ops = {0: ["aten::scatter_reduce"], since: ["ScatterElements"]}
        check(scatter_by(name), zeros, index, updates, ops=ops)
    for function in (
        lambda x, i, u: x.scatter_reduce(0, i, u, "mean"),
        lambda x, i, u: x.scatter_reduce(0, i, u, "amax", include_self=False),
    ):
        names = ops_of(convert(function, zeros, index, updates))
        assert names == ["aten::scatter_reduce"]


def test_one_hot_runs() -> None:
    names = ops_of(convert(lambda i: F.one_hot(i, 7), IDS))
    check(lambda i: F.one_hot(i, 7), IDS, ops=names, runtime=False, pins=(20,))
