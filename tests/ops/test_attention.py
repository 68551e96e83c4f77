"""Scaled dot-product attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driver import Case, check, floats, run, with_half

import torch_ort

QUERY, KEY, VALUE = floats(2, 4, 6, 8), floats(2, 4, 6, 8) * 0.5, floats(2, 4, 6, 8).flip(0)
MASK = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
attention = F.scaled_dot_product_attention
SYMBOLIC = {i: ["N", 4, "T", 8] for i in range(3)}

CASES = [
    Case("Attention", [QUERY, KEY, VALUE], attention, dims=SYMBOLIC),
    Case("Attention", [QUERY, KEY, VALUE], lambda q, k, v: attention(q, k, v, is_causal=True),
        {"is_causal": 1}, dims=SYMBOLIC),
    Case("Attention", [QUERY, KEY, VALUE, MASK], attention),
    Case("Attention", [QUERY, KEY, VALUE, MASK == 0], attention, note="truth values"),
    Case("Attention", [QUERY, KEY, VALUE, MASK.expand(2, 1, 6, 6)], attention),
    Case("Attention", [QUERY, KEY, VALUE], lambda q, k, v: attention(q, k, v, scale=0.5),
        {"scale": 0.5}),
    Case("Attention", [QUERY[:, :, :3], KEY, VALUE], attention, note="unequal lengths"),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("inputs", "eager"),
    [
        ([QUERY, KEY[:, :2], VALUE[:, :2]], lambda *x: attention(*x, enable_gqa=True)),
        ([QUERY, KEY, VALUE[..., :5]], attention),
    ],
    ids=["shared keys", "narrow values"],
)
def test_forms_without_a_fused_kernel(inputs: list, eager: object) -> None:
    (got,) = run(Case("Attention", inputs, None))
    torch.testing.assert_close(got, eager(*inputs))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case("Attention", [QUERY, KEY, VALUE], None, {"softcap": 1.0}),
            "attribute .softcap. is not supported",
        ),
        (
            Case(
                "Attention",
                [QUERY[0], KEY[0], VALUE[0]],
                None,
                {"q_num_heads": 2, "kv_num_heads": 2},
            ),
            "input 0: got rank 3, want 4",
        ),
    ],
)
def test_form_without_a_kernel_is_refused(case: Case, message: str) -> None:
    with pytest.raises(torch_ort.Unsupported, match=message):
        run(case)
