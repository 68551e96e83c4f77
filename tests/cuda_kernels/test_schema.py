"""The shape of a kernel for CUDA: a table of what is chosen, and what holds of every choice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C, InternalError

geometry = _C.testing.cuda_geometry

# What a kernel does -> threads along a row x lines of them, vectors of so many elements in each.
ROWS, COLUMNS, ALL = {"reduces_rows": True}, {"sums_columns": True}, {"sums_all": True}
CHOICES = [
    # flat: a run of memory
    ({"rows": 1, "columns": 1 << 20, "vector": 8}, (256, 1, 1, 8), 512),
    ({"rows": 1, "columns": 1000, "vector": 4}, (256, 1, 1, 4), 1),
    # rows and columns, none reduced
    ({"rows": 4096, "columns": 3072, "vector": 8}, (256, 1, 1, 8), 2),
    ({"rows": 4096, "columns": 64, "vector": 8}, (8, 32, 1, 8), 1),
    # rows of a norm, short and long, and of a loss
    ({"rows": 4096, "columns": 64, "vector": 8, **ROWS}, (8, 32, 1, 8), 1),
    ({"rows": 4096, "columns": 768, "vector": 8, "kept": 2, **ROWS}, (32, 8, 4, 8), 1),
    ({"rows": 4096, "columns": 4096, "vector": 8, "kept": 2, **ROWS}, (128, 2, 4, 8), 1),
    ({"rows": 4096, "columns": 50304, "vector": 8, "kept": 1, **ROWS}, (512, 1, 0, 8), 1),
    # rows that begin within a vector and end within another
    ({"rows": 4096, "columns": 50257, "vector": 8, "shift": 1, **ROWS}, (512, 1, 0, 8), 1),
    ({"rows": 4096, "columns": 2041, "vector": 8, "shift": 1}, (256, 1, 1, 8), 1),
    ({"rows": 4096, "columns": 2042, "vector": 8, "shift": 2}, (256, 1, 1, 8), 2),
    ({"rows": 4096, "columns": 2047, "vector": 8}, (256, 1, 1, 8), 1),
    # gradients of weights: strips of columns, many rows
    ({"rows": 16384, "columns": 768, "vector": 8, **COLUMNS}, (32, 8, 1, 8), 3),
    ({"rows": 16384, "columns": 768, "vector": 8, "kept": 4, **ROWS, **COLUMNS}, (64, 4, 2, 8), 1),
    ({"rows": 16384, "columns": 768, "vector": 8, "kept": 7, **ROWS, **COLUMNS}, (128, 2, 1, 8), 1),
    # long rows keep more numbers in each thread before they are read twice
    ({"rows": 4096, "columns": 8192, "vector": 8, "kept": 7, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 1 << 16, "columns": 512, "vector": 4, **ALL}, (128, 2, 1, 4), 1),
]  # fmt: skip


@pytest.mark.parametrize(("work", "shape", "strips"), CHOICES, ids=str)
def test_choices(work, shape, strips):
    chosen = geometry(**work)
    names = ("threads_x", "threads_y", "vectors", "vector")
    assert (tuple(chosen[name] for name in names), chosen["strips"]) == (shape, strips)


@st.composite
def works(draw):
    rows = draw(st.one_of(st.integers(0, 40), st.integers(0, 1 << 22)))
    columns = draw(st.one_of(st.integers(0, 40), st.integers(0, 1 << 20)))
    vector = draw(st.sampled_from([1, 2, 4, 8]))
    sums_columns = draw(st.booleans())
    if sums_columns:
        columns -= columns % vector
    shift = 0 if sums_columns or rows == 1 else draw(st.integers(0, vector - 1))
    groups = draw(st.sampled_from([each for each in (1, 2, 3, 64) if rows % each == 0]))
    return {
        "rows": rows, "columns": columns, "groups": groups, "vector": vector, "shift": shift,
        "reduces_rows": draw(st.booleans()), "sums_columns": sums_columns,
        "sums_all": draw(st.booleans()), "kept": draw(st.integers(0, 40)),
        "bytes_of_number": draw(st.sampled_from([4, 8])),
    }  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True)
@given(work=works())
def test_every_element_belongs_to_one_thread(work):
    chosen = geometry(**work)
    x, y = chosen["threads_x"], chosen["threads_y"]
    assert x * y <= 512
    assert (x & (x - 1), y & (y - 1)) == (0, 0)  # powers of two
    at_once = x * chosen["vector"] * chosen["vectors"]
    # The first vector of a row that is cut may have a single element of it.
    columns = work["columns"] + (work["vector"] - 1 if work["shift"] else 0)
    if work["reduces_rows"]:
        assert chosen["strips"] == 1
        assert chosen["vectors"] == 0 or at_once >= columns
    else:
        whole = math.ceil(columns / work["vector"]) * work["vector"]
        assert chosen["strips"] == max(1, math.ceil(whole / at_once))
    rows = work["rows"] // work["groups"]
    assert chosen["blocks_per_group"] * chosen["rows_per_block"] >= rows
    assert (chosen["blocks_per_group"] - 1) * chosen["rows_per_block"] < max(1, rows)
    assert chosen["rows_per_block"] % y == 0
    # Only one line of threads adds to what lies in memory.
    assert chosen["vectors"] > 0 or y == 1
    # Registers hold what is kept.
    assert work["kept"] * chosen["vectors"] * chosen["vector"] * work["bytes_of_number"] <= max(
        512, work["kept"] * chosen["vector"] * work["bytes_of_number"]
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_that_vectors_cut_are_not_summed_by_columns(shift):
    columns = 8 if shift else 7
    words = f"got rows of {columns} columns, shifted by {shift}, want a multiple of 4 and none"
    with pytest.raises(InternalError, match=words):
        geometry(rows=2, columns=columns, vector=4, shift=shift, sums_columns=True)
