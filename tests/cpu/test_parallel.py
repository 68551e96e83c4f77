"""Work is divided among PyTorch's threads as at::parallel_for divides it."""

from __future__ import annotations

import pytest
import torch

from torch_ort import _C, UserError

parallel_parts = _C.testing.parallel_parts


def ranges(begin: int, end: int, grain: int) -> list[tuple[int, int]]:
    return [(first, last) for first, last, _ in parallel_parts(begin, end, grain)]


@pytest.mark.parametrize(
    ("begin", "end", "grain", "parts"),
    [
        (0, 0, 1, []),
        (5, 3, 1, []),
        (0, 1, 0, [(0, 1)]),
        (0, 8, 8, [(0, 8)]),  # too little for two threads
        (0, 9, 8, [(0, 5), (5, 9)]),
        (-3, 7, 1, [(-3, 1), (1, 5), (5, 7)]),
        (0, 4, 0, [(0, 2), (2, 4)]),  # the third thread finds nothing left
        (0, 100, 50, [(0, 50), (50, 100)]),
        (0, 2**40, 1, [(0, 366503875926), (366503875926, 733007751852), (733007751852, 2**40)]),
    ],
)
def test_parts_are_the_whole(
    begin: int, end: int, grain: int, parts: list[tuple[int, int]]
) -> None:
    torch.set_num_threads(3)
    assert ranges(begin, end, grain) == parts


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_part_has_a_thread(threads: int) -> None:
    torch.set_num_threads(threads)
    found = {thread for *_, thread in parallel_parts(0, 1000, 1)}
    assert len(found) == threads


def test_parts_are_not_divided_again() -> None:
    torch.set_num_threads(2)
    assert parallel_parts(0, 16, 1, nested=True) == parallel_parts(0, 16, 1)


@pytest.mark.parametrize("failing", [0, 7, 15])
def test_errors_reach_the_caller(failing: int) -> None:
    torch.set_num_threads(2)
    for _ in range(2):  # the threads live on
        with pytest.raises(UserError, match=f"^testing: item {failing}$"):
            parallel_parts(0, 16, 1, failing)
    assert ranges(0, 16, 1) == [(0, 8), (8, 16)]
