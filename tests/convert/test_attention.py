"""Rows of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conversion import NEWEST, check, floats

QUERY, KEY, VALUE = floats(2, 4, 6, 8), floats(2, 4, 6, 8) * 0.5, floats(2, 4, 6, 8).flip(0)
MASK = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = {12: [FLASH], NEWEST: ["Attention"]}


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention() -> None:
    function = F.scaled_dot_product_attention
    with torch.no_grad():
        check(function, QUERY, KEY, VALUE, ops=ATTENTION)
        check(causal, QUERY, KEY, VALUE, ops=ATTENTION)
        check(lambda q, k, v: function(q, k, v, scale=0.5), QUERY, KEY, VALUE, ops=ATTENTION)
        check(function, QUERY[:, :, :3].contiguous(), KEY, VALUE, ops=ATTENTION)
        check(function, QUERY, KEY, VALUE, MASK, ops=ATTENTION)
        check(causal, QUERY, KEY, VALUE, ops=["Attention"], dynamic=True, pins=(NEWEST,))
        half = [x.bfloat16() for x in (QUERY, KEY, VALUE)]
        check(causal, *half, ops=ATTENTION)


def test_forms_that_onnx_does_not_say() -> None:
    def sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1]

    check(sums, QUERY, KEY, VALUE, ops=[FLASH], pins=(NEWEST,))
    with torch.no_grad():
        check(causal, QUERY[:, :, :3].contiguous(), KEY, VALUE, ops=[FLASH], pins=(NEWEST,))
