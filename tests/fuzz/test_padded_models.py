# Random models over padded sequences, with fixed seeds.
from __future__ import annotations

import pytest
from padded_models import try_seed


@pytest.mark.parametrize("seed", range(16))
def test_numbers_are_those_of_eager(seed: int):
    assert try_seed(seed) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(16, 400, 16))
def test_numbers_of_many_are_those_of_eager(first: int):
    assert {seed: try_seed(seed) for seed in range(first, first + 16)} == dict.fromkeys(
        range(first, first + 16), "right"
    )
