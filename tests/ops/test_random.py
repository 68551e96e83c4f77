"""Dropout: eager's own stream of random numbers."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, run

import torch_ort

TRAIN = torch.tensor(True)


def dropout(ratio: float, *, training: bool = True, **settings) -> Case:
    inputs = [floats(4, 6), torch.tensor(ratio, dtype=torch.float64), torch.tensor(training)]
    return Case("Dropout", inputs, None, known=[1, 2], outputs=2, **settings)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_training_draws_what_eager_draws(ratio: float) -> None:
    torch.manual_seed(3)
    want, want_mask = torch.native_dropout(floats(4, 6), ratio, True)
    after = torch.rand(1)
    torch.manual_seed(3)
    got, mask = run(dropout(ratio))
    assert torch.equal(got, want)
    assert torch.equal(mask, want_mask)
    assert torch.equal(torch.rand(1), after)


def test_eval_is_a_copy() -> None:
    check(Case("Dropout", [floats(4, 6)], lambda x: x.clone(), dims={0: ["N", 6]}))
    got, mask = run(dropout(0.5, training=False))
    assert torch.equal(got, floats(4, 6))
    assert mask.dtype == torch.bool
    assert mask.all()


def test_seed_attribute_is_unsupported() -> None:
    with pytest.raises(torch_ort.Unsupported, match="Dropout: attribute 'seed' is not supported"):
        run(dropout(0.5, attrs={"seed": 1}))


def test_ratio_from_data_is_unsupported() -> None:
    case = dropout(0.5)
    case.known = [2]
    with pytest.raises(torch_ort.Unsupported, match="Dropout: ratio 'x1' depends on data"):
        run(case)
