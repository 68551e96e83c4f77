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
BOTH = ROWS | COLUMNS
CHOICES = [
    # flat: a run of memory
    ({"rows": 1, "columns": 1 << 20, "vector": 8}, (256, 1, 1, 8), 512),
    ({"rows": 1, "columns": 1000, "vector": 4}, (256, 1, 1, 4), 1),
    # rows and columns, none reduced
    ({"rows": 4096, "columns": 3072, "vector": 8}, (256, 1, 1, 8), 2),
    ({"rows": 4096, "columns": 64, "vector": 8}, (8, 32, 1, 8), 1),
    # rows of a norm, short and long, and of a loss
    ({"rows": 4096, "columns": 64, "vector": 8, **ROWS}, (8, 32, 1, 8), 1),
    ({"rows": 4096, "columns": 768, "vector": 8, "kept_bytes": 8, **ROWS}, (32, 8, 4, 8), 1),
    ({"rows": 4096, "columns": 4096, "vector": 8, "kept_bytes": 8, **ROWS}, (128, 2, 4, 8), 1),
    # too long for registers: each pass reads the rows again, two vectors at a time
    ({"rows": 4096, "columns": 50304, "vector": 8, "kept_bytes": 4, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 4096, "columns": 32000, "vector": 8, "kept_bytes": 2, **ROWS}, (512, 1, 8, 8), 1),
    # rows that begin within a vector and end within another
    ({"rows": 4096, "columns": 50257, "vector": 8, "shift": 1, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 4096, "columns": 2041, "vector": 8, "shift": 1}, (256, 1, 1, 8), 1),
    ({"rows": 4096, "columns": 2042, "vector": 8, "shift": 2}, (256, 1, 1, 8), 2),
    ({"rows": 4096, "columns": 2047, "vector": 8}, (256, 1, 1, 8), 1),
    # gradients of weights: strips of columns, many rows
    ({"rows": 16384, "columns": 768, "vector": 8, **COLUMNS}, (32, 8, 1, 8), 3),
    ({"rows": 99, "columns": 768, "vector": 8, "kept_bytes": 16, **BOTH}, (64, 4, 2, 8), 1),
    ({"rows": 99, "columns": 768, "vector": 8, "kept_bytes": 28, **BOTH}, (128, 2, 1, 8), 1),
    # long rows keep more numbers in each thread before they are read twice
    ({"rows": 4096, "columns": 8192, "vector": 8, "kept_bytes": 28, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 1 << 16, "columns": 512, "vector": 4, **ALL}, (128, 2, 1, 4), 1),
    # few rows that are very long are split, but not where columns are summed
    ({"rows": 1, "columns": 1 << 20, "vector": 8, **ROWS}, (512, 1, 2, 8), 128),
    ({"rows": 32, "columns": 1 << 20, "vector": 4, **ROWS, **ALL}, (512, 1, 2, 4), 16),
    ({"rows": 64, "columns": 1 << 16, "vector": 8, **ROWS}, (512, 1, 2, 8), 8),
    ({"rows": 64, "columns": (1 << 16) + 1, "vector": 8, "shift": 1, **ROWS}, (512, 1, 2, 8), 5),
    ({"rows": 65, "columns": 1 << 16, "vector": 8, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 64, "columns": (1 << 16) - 8, "vector": 8, **ROWS}, (512, 1, 2, 8), 1),
    ({"rows": 32, "columns": 1 << 20, "vector": 4, **BOTH}, (512, 1, 1, 4), 1),
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
    shift = 0 if sums_columns or rows == 1 else draw(st.integers(0, vector - 1))
    groups = draw(st.sampled_from([each for each in (1, 2, 3, 64) if rows % each == 0]))
    return {
        "rows": rows, "columns": columns, "groups": groups, "vector": vector, "shift": shift,
        "reduces_rows": draw(st.booleans()), "sums_columns": sums_columns,
        "sums_all": draw(st.booleans()), "kept_bytes": draw(st.integers(0, 160)),
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
    whole = math.ceil(columns / work["vector"]) * work["vector"]
    if chosen["is_split"]:
        assert chosen["loops"]
        assert chosen["rows_per_block"] == 1
        assert chosen["columns_per_strip"] % at_once == 0
        assert (chosen["strips"] - 1) * chosen["columns_per_strip"] < whole
        assert chosen["strips"] * chosen["columns_per_strip"] >= whole
        # Adding up what the strips have found is little work beside theirs.
        assert work["rows"] * chosen["strips"] <= 512
    elif work["reduces_rows"]:
        assert chosen["strips"] == 1
        assert chosen["loops"] or at_once >= columns
    else:
        assert chosen["columns_per_strip"] == at_once
        assert chosen["strips"] == max(1, math.ceil(whole / at_once))
    rows = work["rows"] // work["groups"]
    assert chosen["blocks_per_group"] * chosen["rows_per_block"] >= rows
    assert (chosen["blocks_per_group"] - 1) * chosen["rows_per_block"] < max(1, rows)
    assert chosen["rows_per_block"] % y == 0
    # Only one line of threads adds to what lies in memory.
    assert not chosen["loops"] or y == 1
    # Registers hold what is kept.
    if not chosen["loops"]:
        bytes_of_vector = work["kept_bytes"] * chosen["vector"]
        assert chosen["vectors"] * bytes_of_vector <= max(448, bytes_of_vector)


def test_rows_that_vectors_cut_are_not_summed_by_columns():
    words = "CUDA: sums over rows: got rows shifted by 1, want none"
    with pytest.raises(InternalError, match=words):
        geometry(rows=2, columns=8, vector=4, shift=1, sums_columns=True)


DIVISORS = st.one_of(
    st.integers(1, 100), st.integers(1, 2**31 - 1), st.sampled_from([2**30, 2**31 - 1])
)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(divisor=DIVISORS, number=st.integers(0, 2**31 - 1), times=st.integers(0, 2**31))
def test_division_by_a_factor_and_a_shift(divisor, number, times):
    """As the prelude divides, also around multiples of the divisor."""
    both = _C.testing.cuda_factor_and_shift(divisor)
    factor, shift = both & 0xFFFFFFFF, both >> 32
    multiple = times * divisor
    for n in (number, multiple - 1, multiple, multiple + 1, 2**31 - 1):
        if 0 <= n < 2**31:
            assert (((n * factor) >> 32) + n) % 2**32 >> shift == n // divisor
