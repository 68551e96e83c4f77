"""Rows of views, joins, copies and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conversion import check, convert, floats, ops_of

X = floats(4, 6)
ROWS = [
    (lambda x: x.view(3, 8), ["Reshape"]),
    (lambda x: x.reshape(-1), ["Reshape"]),
    (lambda x: x.flatten(), ["Reshape"]),
    (lambda x: x.t().contiguous(), ["Transpose", "Identity"]),
    (lambda x: x.view(2, 2, 6).transpose(0, -1).contiguous(), ["Reshape", "Transpose", "Identity"]),
    (lambda x: x.view(2, 2, 6).permute(2, 0, 1).contiguous(), ["Reshape", "Transpose", "Identity"]),
    (lambda x: x[:1].expand(5, -1).contiguous(), ["Slice", "Expand", "Identity"]),
    (lambda x: x[1:3, ::2] + 0, ["Slice", "Slice", "Add"]),
    (lambda x: x[-2:] + 0, ["Slice", "Add"]),
    (lambda x: x[1] + x[:, -1][:1], ["Gather", "Gather", "Slice", "Add"]),
    (lambda x: x.clone(), ["Identity"]),
    (lambda x: torch.cat([x, x[:2]]), ["Slice", "Concat"]),
    (lambda x: torch.cat([x, x], -1), ["Concat"]),
    (lambda x: x.repeat(2, 3), ["Tile"]),
    (lambda x: F.pad(x, (1, 2)), ["Pad"]),
    (lambda x: F.pad(x, (1, 0, 2, -1), value=-0.5), ["Pad"]),
    (lambda x: F.pad(x, (0, 1), value=-float("inf")), ["Pad"]),
]


@pytest.mark.parametrize(("function", "ops"), ROWS)
def test_rows(function, ops: list[str]) -> None:
    check(function, X, ops=ops)


@pytest.mark.parametrize(("function", "ops"), ROWS)
def test_rows_bfloat16(function, ops: list[str]) -> None:
    check(function, X.bfloat16(), ops=ops, pins=(13, 20))


@pytest.mark.parametrize(
    ("parts", "ops"),
    [
        ([torch.empty(0), X, X], ["Concat"]),
        ([X, torch.empty(0)], ["Identity"]),
        ([torch.empty(0), X[0]], ["Concat"]),
        ([torch.empty(0), torch.empty(0)], ["Concat"]),
        ([torch.empty(0, dtype=torch.float64), X], ["aten::cat"]),  # the result is of float64
    ],
)
def test_joins_pass_over_empty_vectors(parts: list[torch.Tensor], ops: list[str]) -> None:
    check(lambda *parts: torch.cat(parts, -1), *parts, ops=ops)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1, 3),
        lambda x: x.t().contiguous(),
        lambda x: x[None].expand(3, -1, -1).contiguous(),
        lambda x: x[1:-1] * 1,
        lambda x: x[: x.shape[1]] * 1,
        lambda x: torch.cat([x, x]),
        lambda x: F.pad(x, (1, 2)),
        lambda x: x.repeat(2, 3),
        lambda x: x.unsqueeze(1).clone(),
    ],
)
def test_rows_with_symbolic_sizes(function) -> None:
    graph = convert(function, X, dynamic=True)
    assert not any(name.startswith("aten::") for name in ops_of(graph)), ops_of(graph)
    check(function, X, ops=ops_of(graph), dynamic=True, pins=(20,))


def test_splits() -> None:
    for function in (
        lambda x: [part * 1 for part in x.split(3)],
        lambda x: [part * 1 for part in x.split([1, 3], 0)],
        lambda x: [part * 1 for part in x.chunk(2, 1)],
    ):
        check(function, X, ops={0: ["Slice", "Slice", "Mul", "Mul"], 13: ["Split", "Mul", "Mul"]})
    check(lambda x: x.split(1)[2] * 1, X, ops={0: ["Slice", "Mul"], 13: ["Split", "Mul"]})
    check(
        lambda x: [row * 1 for row in x[:2].unbind()],
        X,
        ops=["Slice", "Gather", "Gather", "Mul", "Mul"],
    )


def test_views_that_hide_it_become_views_that_do_not() -> None:
    split = {0: ["Slice", "Slice", "Mul", "Mul"], 13: ["Split", "Mul", "Mul"]}
    check(lambda x: [part * 1 for part in x.unsafe_split(3)], X, ops=split)
    check(lambda x: [part * 1 for part in x.unsafe_split_with_sizes([1, 3])], X, ops=split)
    check(lambda x: torch.ops.aten._unsafe_view(x, [3, 8]) * 1, X, ops=["Reshape", "Mul"])
    for function, ops in [
        (lambda x: torch.cat(x.unsafe_split(3)), ["aten::split", "aten::cat"]),
        (lambda x: torch.ops.aten._unsafe_view(x, [3, 8]) * 1, ["aten::view", "aten::mul"]),
    ]:
        check(function, X.to(torch.complex64), ops=ops, pins=(20,))


def test_memory_behind_a_hidden_view_is_not_given_away() -> None:
    def gates(x: torch.Tensor) -> torch.Tensor:
        parts = (x + 1).unsafe_split(3)
        others = [(x * number).sigmoid() for number in range(4)]
        return parts[0] * others[0][:3] + sum(others)[:3]

    check(gates, X, ops=ops_of(convert(gates, X)), pins=(20,))


def test_unsqueeze_and_squeeze() -> None:
    check(lambda x: x.unsqueeze(-1) * 1, X, ops={0: ["Reshape", "Mul"], 13: ["Unsqueeze", "Mul"]})
    for function in (
        lambda x: x[:1].squeeze(0) * 1,
        lambda x: x[:1].squeeze() * 1,
        lambda x: x[:1].squeeze((0, 1)) * 1,
    ):
        check(function, X, ops={0: ["Slice", "Reshape", "Mul"], 13: ["Slice", "Squeeze", "Mul"]})
    check(lambda x: x.squeeze(0) * 1, X, ops=["aten::squeeze", "Mul"])


def test_stack() -> None:
    joined = {0: ["aten::stack"], 13: ["Unsqueeze", "Unsqueeze", "Concat"]}
    for axis in (0, 1, -1):
        check(lambda x, axis=axis: torch.stack([x, x], axis), X, ops=joined)
    check(lambda x: torch.stack([x, x.double()]), X, ops=["Cast", "aten::stack"], pins=(20,))


def test_triangles() -> None:
    triangles = {0: ["aten::tril", "aten::triu"], 14: ["Trilu", "Trilu"]}
    check(lambda x: [x.tril(), x.triu(2)], X, ops=triangles)
    check(lambda x: [x.tril(-1), x.triu()], X, ops=triangles)


def test_forms_that_stay_aten_nodes() -> None:
    image = floats(2, 3, 4, 5)
    for function, ops in [
        (lambda x: x.clone(memory_format=torch.channels_last), ["aten::clone"]),
        (lambda x: x.flip(0), ["aten::flip"]),
        (lambda x: x.roll(1, 0), ["aten::roll"]),
        (lambda x: x.repeat(2, 1, 1, 1, 1), ["aten::repeat"]),
        (lambda x: torch.cat([x, x.double()]), ["Cast", "aten::cat"]),
        (lambda x: x.as_strided((2, 2), (1, 2)) * 1, ["aten::as_strided", "Mul"]),
    ]:
        check(function, image, ops=ops, pins=(20,))


def test_copy_of_a_strided_tensor_keeps_its_strides() -> None:
    image = floats(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: x.clone(), image, ops=["aten::clone"], pins=(20,))
    check(lambda x: x.contiguous(), image, ops=["Identity"], pins=(20,))


def test_empty_tensors() -> None:
    empty = floats(0, 6)
    check(lambda x: x.view(2, 0, 3), empty, ops={0: ["aten::view"], 14: ["Reshape"]})
    check(lambda x: torch.cat([x, x + 1]), empty, ops=["Add", "Concat"])
    check(lambda x: x[:, 1:3] * 1, empty, ops=["Slice", "Mul"])


def test_integers_and_booleans() -> None:
    whole = torch.arange(12).view(3, 4)
    check(
        lambda x: torch.cat([x.t().contiguous(), x.view(4, 3)]),
        whole,
        ops=["Transpose", "Identity", "Reshape", "Concat"],
    )
    check(lambda x: x[1:].contiguous(), whole > 3, ops=["Slice"], runtime=False)
    check(lambda x: F.pad(x, (1, 1), value=7), whole, ops=["Pad"])
