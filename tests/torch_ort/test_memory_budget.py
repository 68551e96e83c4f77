"""Training under `memory_budget`: the same numbers, fewer bytes, and what is said of it."""

from __future__ import annotations

import functools
import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort import _C

WIDTH, LENGTH, BATCH = 32, 24, 4
# The least budget of few layers is a larger share.
DEPTH, DEEP = 3, 4


@pytest.fixture(autouse=True)
def masks_in_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.packed(self.norm(hidden)).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1, is_causal=True
        )
        hidden = hidden + self.dropout(self.mixed(mixed.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm_feed(hidden)))))


class Classifier(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.blocks(x)[:, 0]), labels)


def make(
    dtype: torch.dtype = torch.float32, batch: int = BATCH, depth: int = DEPTH
) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    model = Classifier(depth).to(dtype)
    return model, (torch.randn(batch, LENGTH, WIDTH, dtype=dtype), torch.randint(7, (batch,)))


def train(call, model: nn.Module, inputs: tuple, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        loss = call(*inputs)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_same_sums(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Regions may be joined otherwise, and then add rows up in another order."""
    for one, another in zip(got, want, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-7)


def compiled(
    options: dict, dtype: torch.dtype = torch.float32, depth: int = DEPTH
) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model, inputs = make(dtype, depth=depth)
    return train(torch.compile(model, backend="ort", options=options), model, inputs)


def report_of(fraction: float | int, depth: int = DEPTH) -> torch_ort.Report:
    torch._dynamo.reset()
    model, inputs = make(depth=depth)
    return torch_ort.explain(model, *inputs, options={"memory_budget": fraction})


@functools.cache
def without_a_budget(dtype: torch.dtype) -> list[torch.Tensor]:
    return compiled({"emulate_eager_casts": dtype.itemsize == 2}, dtype, DEEP)


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_the_same_bits(dtype, fraction):
    """With dropout: what is drawn again is what was drawn."""
    options = {"emulate_eager_casts": dtype.itemsize == 2, "memory_budget": fraction}
    for got, want in zip(compiled(options, dtype, DEEP), without_a_budget(dtype), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("switches", ["fuse_regions", "own_kernels", "reorder", "rebuild_values"])
def test_other_passes_are_not_needed(switches):
    """Regions, kernels of ours and the order of steps may be switched off."""
    options = {"disable": (switches,), "exact_random": True}
    for got, want in zip(
        compiled(options | {"memory_budget": 0.6}), compiled(options), strict=True
    ):
        assert torch.equal(got, want)


def test_modules_of_ortmodule_take_it():
    results = []
    for config in ({}, {"memory_budget": 0.5}):
        model, inputs = make()
        module = torch_ort.ORTModule(model, torch_ort.DebugOptions(config=config))
        results.append(train(module, model, inputs))
    assert_same_sums(*results)


def test_the_plan_holds_what_was_planned():
    dense = report_of(1.0, DEEP).graphs[0].plan["saved_bytes"]
    for fraction in (0.8, 0.6, 0.45):
        graph = report_of(fraction, DEEP).graphs[0]
        planned = graph.recomputation.planned
        assert planned.dense_bytes == dense
        assert planned.held_bytes == graph.plan["saved_bytes"]
        assert planned.peak_bytes <= planned.allowed_bytes == round(fraction * dense)
        assert len(planned.made) > 0


@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow), 32])
def test_lists_of_rows_are_counted(width, monkeypatch):
    """Down to the least budget; where there is no room for them, all rows are computed."""
    monkeypatch.setitem(globals(), "WIDTH", width)
    dense = report_of(1.0, DEEP).graphs[0]
    held = dense.plan["saved_bytes"]
    lists = dense.recomputation.planned.list_bytes
    assert lists > 0
    assert dense.recomputation.planned.dense_bytes == held
    with pytest.raises(Exception, match="want at least") as caught:
        report_of(1, DEEP)
    least = int(re.search(r"at least ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    kept, peaks = {}, {}

    def plan(allowed: int) -> None:
        graph = report_of(allowed, DEEP).graphs[0]
        planned = graph.recomputation.planned
        assert graph.plan["saved_bytes"] == planned.held_bytes
        assert planned.peak_bytes <= planned.allowed_bytes == allowed
        kept[allowed], peaks[allowed] = planned.list_bytes, planned.peak_bytes

    for allowed in (least, least + 2000, held // 2, held - 1):
        plan(allowed)
    plan(peaks[held // 2] - lists)  # just without them
    assert kept[held - 1] == kept[least + 2000] == lists
    if width == 2:  # the lists are as large as what they are of
        assert kept[least] == 0


def test_bytes_are_a_budget_too():
    dense = report_of(1.0).graphs[0].recomputation.planned.dense_bytes
    allowed = dense * 6 // 10
    planned = report_of(allowed).graphs[0].recomputation.planned
    assert planned.allowed_bytes == allowed >= planned.peak_bytes


@pytest.mark.hands_over
def test_other_sizes_have_the_same_share():
    """One plan of nodes serves all sizes of a dynamic graph."""
    torch._dynamo.reset()
    model, inputs = make()
    call = torch.compile(model, backend="ort", options={"memory_budget": 0.5}, dynamic=True)
    train(call, model, inputs)
    model.zero_grad()
    other = make(batch=7)[1]
    got = train(call, model, other)
    torch._dynamo.reset()
    model.zero_grad()
    want = train(torch.compile(model, backend="ort", dynamic=True), model, other)
    assert_same_sums(got, want)


def test_masks_of_eager_cross(monkeypatch):
    """What eager's stream draws is drawn once; the rest is made again."""
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "1")
    for got, want in zip(compiled({"memory_budget": 0.7}), compiled({}), strict=True):
        assert torch.equal(got, want)


def test_nothing_is_made_again_where_all_is_allowed():
    planned = report_of(1.0).graphs[0].recomputation.planned
    assert planned.made == []
    assert planned.peak_bytes == planned.dense_bytes


@pytest.mark.filterwarnings("ignore")
def test_too_little_names_the_least():
    pattern = (
        r"memory_budget: too small for this graph: got 0\.01 of [\d,]+ bytes, want at least "
        r"[\d,]+ bytes, which is 0\.\d+ of what is held without recomputation"
    )
    with pytest.raises(Exception, match=pattern):
        compiled({"memory_budget": 0.01})
    with pytest.raises(Exception, match=r"got 1,000 bytes, want at least"):
        compiled({"memory_budget": 1000})


@pytest.mark.parametrize("value", [-1, 1.5, 0.0, -0.5, True, "much"])
def test_wrong_values_are_told(value):
    with pytest.raises(Exception, match=r"want bytes as an integer, or a fraction above 0\.0"):
        compiled({"memory_budget": value})


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("1000000", 1000000), ("0", 0)])
def test_the_environment_gives_it(text, value, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_MEMORY_BUDGET", text)
    got = torch_ort.options.resolve().memory_budget
    assert got == value
    assert type(got) is type(value)


def test_explain_tells():
    text = str(report_of(0.5))
    words = (
        "memory budget: ", "without recomputation; planned", "recomputed: ", "Gemm",
        "+0 B against the plan",
    )  # fmt: skip
    assert all(word in text for word in words)
    assert "memory budget" not in str(torch_ort.explain(*_flat(make())))


def _flat(made: tuple[nn.Module, tuple]) -> list:
    return [made[0], *made[1]]


def test_the_first_step_is_held_against_the_budget(caplog):
    with caplog.at_level(logging.INFO, logger="torch_ort.budget"):
        compiled({"memory_budget": 0.5})
    (text,) = [record.getMessage() for record in caplog.records]
    assert "bytes are saved for backward, +0 against the plan, budget" in text


def test_a_missed_budget_is_told(caplog):
    """A plan that holds more than was counted on."""
    from torch_ort.engine.budget import Recomputation

    class Session:
        def plan_report(self) -> dict[str, int]:
            return {"saved_bytes": 5000}

    recomputation = Recomputation(_C.BudgetReport())
    with caplog.at_level(logging.WARNING, logger="torch_ort.budget"):
        recomputation.check(Session())
        recomputation.check(Session())
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.endswith("it is exceeded by 5,000 bytes")


def test_weights_that_change_between_the_halves_are_told():
    """A bias that only recomputation reads is watched as what backward reads is."""
    torch._dynamo.reset()
    model, inputs = make()
    call = torch.compile(model, backend="ort", options={"memory_budget": 0.5})
    loss = call(*inputs)
    with torch.no_grad():
        model.blocks[0].up.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
