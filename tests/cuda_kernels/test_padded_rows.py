"""Rows of matrices on GPUs begin at multiples of 16 bytes, where nobody wants dense memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.cuda

TOKENS = 40  # 2 texts of 20


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class Classifier(nn.Module):
    """Predicts a class for each token."""

    def __init__(self, classes: int, bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(24, 48)
        self.head = nn.Linear(48, classes, bias=bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.hidden(x)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.logits(x), labels)


class WithLogits(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(x)
        return loss_of(logits, labels), logits


@torch.library.custom_op("padded_rows_test::sum_of_strides", mutates_args=())
def sum_of_strides(x: torch.Tensor) -> torch.Tensor:
    """Show an operator of the user what strides it gets."""
    return torch.full((1,), float(sum(x.stride())), device=x.device)


@sum_of_strides.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((1,), dtype=torch.float32)


class ReadByOperator(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(x)
        return loss_of(logits, labels), sum_of_strides(logits.detach())


def batch(classes: int, shape: tuple[int, ...] = (2, TOKENS // 2)):
    torch.manual_seed(1)
    return torch.randn(*shape, 24, device="cuda"), torch.randint(classes, shape, device="cuda")


def losses_of(call, model: nn.Module, dtype: torch.dtype, given):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = call(*given)
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    return found, [loss.detach(), *(each.grad for each in model.parameters())]


def trained(model: nn.Module, dtype: torch.dtype, options: dict | None = None):
    """Train a step in eager and in the engine, and compare; give the results and all plans."""
    given = batch(model.head.out_features)
    eager = copy.deepcopy(model)
    _, want = losses_of(eager, eager, dtype, given)
    with watchers.watching() as programs:
        compiled = torch.compile(model, backend="ort", options=options)
        found, got = losses_of(compiled, model, dtype, given)
    assert_near(got, want, dtype)
    return found, table_of(programs)


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype) -> None:
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.05, 5e-3)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def table_of(programs) -> list[dict]:
    return [row for program in programs for row in program.session.plan_table()]


def planned_bytes(table: list[dict]) -> set[int]:
    return {row["bytes"] for row in table if row["shares"] is None}


def span(rows: int, columns: int, stride: int, dtype: torch.dtype) -> int:
    """Bytes from the first element of a matrix to the end of its last one."""
    return ((rows - 1) * stride + columns) * dtype.itemsize


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_an_odd_number_of_classes(dtype):
    torch.manual_seed(0)
    _, table = trained(Classifier(2051).cuda(), dtype)
    unit = 16 // dtype.itemsize
    stride = (2051 + unit - 1) // unit * unit
    found = planned_bytes(table)
    assert span(TOKENS, 2051, stride, dtype) in found
    assert span(TOKENS, 2051, 2051, dtype) not in found


def test_logits_with_a_bias_are_dense():
    """Their gradient, which no bias is added to, is not."""
    torch.manual_seed(0)
    _, table = trained(Classifier(2051, bias=True).cuda(), torch.bfloat16)
    found = planned_bytes(table)
    assert span(TOKENS, 2051, 2051, torch.bfloat16) in found
    assert span(TOKENS, 2051, 2056, torch.bfloat16) in found


def test_rows_of_hidden_layers():
    """2051 columns between two layers: products read and write them, and regions do."""
    torch.manual_seed(0)
    model = Classifier(10).cuda()
    model.hidden = nn.Linear(24, 2051, bias=False).cuda()
    model.head = nn.Linear(2051, 10).cuda()
    _, table = trained(model, torch.bfloat16)
    assert span(TOKENS, 2051, 2056, torch.bfloat16) in planned_bytes(table)


class ByStrides(nn.Module):
    """Views a product by strides that it names, those of dense memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 2051, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        by_token = self.head(x).as_strided((TOKENS, 2051), (2051, 1))
        return loss_of(by_token, labels)


def test_views_that_name_strides():
    torch.manual_seed(0)
    before = torch_ort.counters()["fallbacks"]
    _, table = trained(ByStrides().cuda(), torch.bfloat16)
    assert torch_ort.counters()["fallbacks"] == before
    assert span(TOKENS, 2051, 2051, torch.bfloat16) in planned_bytes(table)


@pytest.mark.parametrize("classes", [2056, 203])
def test_rows_that_need_no_gaps_or_are_too_short(classes):
    torch.manual_seed(0)
    _, table = trained(Classifier(classes).cuda(), torch.bfloat16)
    assert span(TOKENS, classes, classes, torch.bfloat16) in planned_bytes(table)


def test_logits_for_the_caller_are_dense():
    torch.manual_seed(0)
    (_, logits), _ = trained(WithLogits(2051).cuda(), torch.bfloat16)
    assert logits.stride() == (20 * 2051, 2051, 1)


def test_operators_of_the_user_get_dense_memory():
    torch.manual_seed(0)
    (_, strides), _ = trained(ReadByOperator(2051).cuda(), torch.bfloat16)
    assert strides.item() == 20 * 2051 + 2051 + 1


def test_bits_of_eager_on_request():
    torch.manual_seed(0)
    _, table = trained(Classifier(2051).cuda(), torch.float32, options={"disable": "products"})
    assert span(TOKENS, 2051, 2051, torch.float32) in planned_bytes(table)


def test_other_sizes_of_a_batch():
    """Rows are padded for each number of rows, and a graph of dynamic sizes stays one graph."""
    torch.manual_seed(0)
    model = Classifier(2051).cuda()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort", dynamic=True)
    with watchers.watching() as programs:
        for shape in ((2, 20), (3, 30), (2, 7)):
            given = batch(2051, shape)
            _, got = losses_of(compiled, model, torch.bfloat16, given)
            _, want = losses_of(eager, eager, torch.bfloat16, given)
            assert_near(got, want, torch.bfloat16)
            rows = shape[0] * shape[1]
            assert span(rows, 2051, 2056, torch.bfloat16) in planned_bytes(table_of(programs))
            model.zero_grad()
            eager.zero_grad()
    assert len(programs) == 1


@pytest.mark.parametrize("mask", [torch.bool, torch.int8, torch.uint8, torch.bfloat16], ids=str)
def test_dense_masks_beside_rows_with_gaps(mask):
    """Beside doubles a vector of a mask is two elements, which may be less than a word."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, other, of_mask = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((16, 8), (8, 1301), (1301, 8), (16, 1301))
    )

    def attend(hidden, weight, other, mask):
        return ((hidden @ weight).softmax(-1) * mask.to(hidden.dtype)) @ other

    given = (hidden, weight, other, (2 * of_mask).clamp(0).to(mask))
    got = torch.compile(attend, backend="ort")(*(x.cuda() for x in given))
    torch.testing.assert_close(got.cpu(), attend(*given), rtol=1e-12, atol=1e-12)
    assert torch_ort.counters()["fallbacks"] == 0
