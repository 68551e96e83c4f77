"""Dropout whose masks are computed in regions: torch.manual_seed, statistics, recompute."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ort
from torch_ort import _C

KEEP = 0.7
ROWS, COLUMNS = 2000, 300


@pytest.fixture(autouse=True)
def own_random_numbers(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")


class Dropouts(nn.Module):
    """Several dropout layers over one input."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(1 - KEEP) for _ in range(count))

    def forward(self, x):
        return [layer(x * 1.0) for layer in self.layers]


def masks(call, steps: int = 1) -> torch.Tensor:
    """Stack the masks of all layers and steps: [steps * layers, ROWS, COLUMNS]."""
    x = torch.ones(ROWS, COLUMNS)
    return torch.stack([out != 0 for _ in range(steps) for out in call(x)]).double()


@pytest.fixture
def compiled_masks():
    return masks(torch.compile(Dropouts(3), backend="ort"), steps=3)


def test_no_mask_is_drawn_by_pytorch():
    graph = torch_ort.explain(Dropouts(2), torch.ones(8, 4, requires_grad=True)).graphs[0]
    assert graph.fused["PhiloxMask"] == 4  # two forward, and again in backward
    assert not graph.nodes["torch_ort.BernoulliMask"]


def test_seed_reproduces():
    call = torch.compile(Dropouts(), backend="ort")
    torch.manual_seed(3)
    first, second = masks(call), masks(call)
    torch.manual_seed(3)
    assert torch.equal(masks(call), first)
    assert not torch.equal(first, second)


def test_backward_sees_the_mask_of_its_forward():
    call = torch.compile(Dropouts(2), backend="ort")
    x, y = (torch.ones(ROWS, COLUMNS, requires_grad=True) for _ in range(2))
    first, second = call(x), call(y)  # two calls alive at once
    for inputs, outputs in ((y, second), (x, first)):
        sum(outputs).sum().backward()
        torch.testing.assert_close(inputs.grad, sum(outputs).detach())


def test_mask_does_not_cross_the_border():
    def saved_bytes(exact: bool) -> int:
        torch.compiler.reset()
        call = torch.compile(Dropouts(2), backend="ort", options={"exact_random": exact})
        call(torch.ones(ROWS, COLUMNS, requires_grad=True))
        return torch_ort.counters()["saved_bytes"]

    assert saved_bytes(True) >= 2 * ROWS * COLUMNS
    assert saved_bytes(False) <= 64


def test_share_of_kept_elements(compiled_masks):
    deviation = (KEEP * (1 - KEEP) / compiled_masks[0].numel()) ** 0.5
    assert (compiled_masks.mean((1, 2)) - KEEP).abs().max() < 4 * deviation


@pytest.mark.parametrize("along", [1, 2], ids=["rows", "columns"])
def test_rows_and_columns_vary_as_independent_draws_do(compiled_masks, along):
    count = compiled_masks.shape[along]
    wanted = (KEEP * (1 - KEEP) / count) ** 0.5
    spread = compiled_masks.mean(along).std(1)
    torch.testing.assert_close(spread, torch.full_like(spread, wanted), rtol=0.15, atol=0)


def test_masks_of_layers_steps_and_neighbours_are_independent(compiled_masks):
    flat = (compiled_masks - KEEP).flatten(1) / (KEEP * (1 - KEEP)) ** 0.5
    correlations = flat @ flat.T / flat.shape[1]
    others = correlations - torch.diag(correlations.diag())
    assert others.abs().max() < 5 / flat.shape[1] ** 0.5
    for shift in (1, 2, 4, 16, 64, COLUMNS):
        neighbours = (flat[:, shift:] * flat[:, :-shift]).mean(1)
        assert neighbours.abs().max() < 5 / flat.shape[1] ** 0.5


def test_same_masks_for_any_number_of_threads_and_any_instruction_set():
    def draw(isa: str, threads: int) -> torch.Tensor:
        torch.compiler.reset()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(11)
            return masks(torch.compile(Dropouts(), backend="ort", options={"isa": isa}))
        finally:
            torch.set_num_threads(before)

    want = draw("portable", 1)
    for isa in _C.isa_names():
        for threads in (1, 2):
            assert torch.equal(draw(isa, threads), want), (isa, threads)


# The four words of counter and key zero, from the reference implementation of Philox 4x32-10.
KNOWN_WORDS = {0: 0x6627E8D5, 1: 0xE169C58D, 2: 0xBC57AC4C, 3: 0x9B00DBD8}


@pytest.mark.parametrize("place", KNOWN_WORDS)
def test_draws_are_those_of_the_published_generator(place):
    def is_kept(word: int) -> bool:
        text = f"""
            <ir_version: 10, opset_import: ["" : 20, "torch_ort" : 1]>
            draw (int64[1] seed) => (bool[1,64] mask)
            {{
               mask = torch_ort.PhiloxMask <keep = "{word / 2**32!r}", stream = 0> (seed)
            }}
        """
        graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
        _C.run_pass("fuse_regions", graph)
        (mask,) = _C.run(graph, {"seed": torch.zeros(1, dtype=torch.int64)}).values()
        return bool(mask[0, place])

    assert is_kept(KNOWN_WORDS[place] + 1)
    assert not is_kept(KNOWN_WORDS[place])


@pytest.mark.hands_over("a checkpoint")
def test_checkpointed_block_sees_one_mask():
    model = Dropouts()

    def block(x):
        return checkpoint(lambda y: model(y)[0], x, use_reentrant=False)

    x = torch.ones(64, 32, requires_grad=True)
    out = torch.compile(block, backend="ort")(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


def test_dropout_of_a_half_precision_input():
    x = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True)
    (out,) = torch.compile(Dropouts(), backend="ort")(x)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / KEEP).bfloat16().item()}
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


def test_training_learns_with_own_masks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1))
    call = torch.compile(model, backend="ort")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(256, 10)
    target = x.sum(1, keepdim=True)
    losses = []
    for _ in range(150):
        loss = nn.functional.mse_loss(call(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
