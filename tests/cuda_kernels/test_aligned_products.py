"""Products of an odd number of columns are computed with a few columns more on GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.cuda

# The least of which a product is large enough.
ROWS, HIDDEN, CLASSES = 520, 1024, 2051


class Classifier(nn.Module):
    """Predicts a class for each row, from rows that are computed as well."""

    def __init__(self, bias: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, HIDDEN)
        self.head = nn.Linear(HIDDEN, classes, bias=bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x).float(), labels)


class WithLogits(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(x)
        return functional.cross_entropy(logits.float(), labels), logits


class ThroughWide(nn.Module):
    """Has an odd number of columns between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, HIDDEN)
        self.wide = nn.Linear(HIDDEN, CLASSES, bias=False)
        self.narrow = nn.Linear(CLASSES, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(torch.tanh(self.hidden(x)))
        return self.narrow(functional.gelu(wide) * wide).float().square().mean()


def rows(count: int = ROWS, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return x.cuda(), labels.cuda()


def step(call, model: nn.Module, given, dtype: torch.dtype):
    """Give the results, and the gradients, of one step under autocast."""
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = call(*given)
    loss, *others = found if isinstance(found, tuple) else (found,)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(x.detach() for x in others), *gradients]


def assert_near(got, want, dtype: torch.dtype) -> None:
    for ours, theirs in zip(got, want, strict=True):
        is_exact = dtype == theirs.dtype == torch.float32
        rtol, atol = (1e-4, 1e-5) if is_exact else (0.05, 5e-3)
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def aligned_in(model: nn.Module, given, dtype=torch.bfloat16, options: dict | None = None) -> int:
    """Train two steps in eager and in the engine, compare, and count the products of a step."""
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort", options=options)
    want = step(eager, eager, given, dtype)
    for _ in range(2):
        torch_ort.reset_counters()
        got = step(compiled, model, given, dtype)
        assert_near(got, want, dtype)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    return counters["products_aligned"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_logits(dtype, bias):
    """The products for the logits, for the gradient of what they are made of, and of the weight.

    Where the gradient of a weight has the dtype of the factors, it is written into the caller's
    memory, which has no room for more rows.
    """
    torch.manual_seed(0)
    wanted = 2 if dtype == torch.float32 else 3
    assert aligned_in(Classifier(bias).cuda(), rows(), dtype) == wanted


@pytest.mark.parametrize("bias", [False, True])
def test_logits_for_the_caller(bias):
    torch.manual_seed(0)
    assert aligned_in(WithLogits(bias).cuda(), rows(2 * 1024 + 8)) == 3


def test_weights_that_are_not_cast():
    """There is no room behind a parameter, so it is copied."""
    torch.manual_seed(0)
    model = Classifier().to("cuda", torch.bfloat16)
    x, labels = rows()
    before = model.head.weight.detach().clone()
    assert aligned_in(model, (x.to(torch.bfloat16), labels), torch.float32) == 2
    assert torch.equal(model.head.weight, before)


def test_between_two_layers():
    torch.manual_seed(0)
    # the wide and the narrow layer in forward, what they give back to the layers before them, and
    # the gradients of their weights: one gets more rows, the other more columns
    assert aligned_in(ThroughWide().cuda(), rows()[:1]) == 6


@pytest.mark.parametrize("classes", [2056, 203])
def test_products_that_need_nothing(classes):
    torch.manual_seed(0)
    assert aligned_in(Classifier(classes=classes).cuda(), rows(classes=classes)) == 0


def test_too_few_rows():
    torch.manual_seed(0)
    assert aligned_in(Classifier().cuda(), rows(500)) == 0


def test_bits_of_eager_on_request():
    torch.manual_seed(0)
    model = Classifier().cuda()
    assert aligned_in(model, rows(), torch.float32, options={"disable": "products"}) == 0


def test_tied_weights():
    """The embedding reads the parameter, and the product what was cast of it."""

    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(CLASSES, HIDDEN)
            self.head.weight = self.words.weight

        def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(self.words(words)).float(), labels)

    torch.manual_seed(0)
    _, labels = rows()
    assert aligned_in(Tied().cuda(), (labels.flip(0), labels)) == 3


def test_memory_that_held_nan():
    """What lies behind rows and columns is written before a product reads it."""
    torch.manual_seed(0)
    model = Classifier().cuda()
    given = rows()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort")
    want = step(eager, eager, given, torch.bfloat16)
    for _ in range(2):
        held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
        del held
        assert_near(step(compiled, model, given, torch.bfloat16), want, torch.bfloat16)


def test_two_calls_alive_and_another_number_of_rows():
    torch.manual_seed(0)
    model = Classifier().cuda()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="ort", dynamic=True)
    for count in (ROWS, 700):
        given = rows(count)
        for call, of in ((compiled, model), (eager, eager)):
            of.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                losses = [call(*given), call(*(x.flip(0) for x in given))]
            for loss in reversed(losses):
                loss.backward()
        got, want = ([p.grad for p in of.parameters()] for of in (model, eager))
        assert_near(got, want, torch.bfloat16)
    assert torch_ort.counters()["products_aligned"] == 12


def test_memory():
    """The weight in bfloat16 has seven rows more, and nothing else is larger."""
    torch.manual_seed(0)
    model = Classifier().cuda()
    with watchers.watching() as programs:
        aligned_in(model, rows())
    table = [row for program in programs for row in program.session.plan_table()]
    planned = {row["bytes"] for row in table if row["shares"] is None}
    assert 2 * HIDDEN * (CLASSES + 5) in planned
    assert 2 * HIDDEN * CLASSES not in planned
