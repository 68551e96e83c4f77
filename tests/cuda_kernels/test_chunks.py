# The context area on CUDA consists of chunks, which are freed one after the other while backward
# runs: values and gradients as in eager PyTorch, and the memory in use.
from __future__ import annotations

import copy
from collections.abc import Callable

import injection
import pytest
import torch
from device_memory import settled
from torch import nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.cuda
ROWS, WIDTH, LAYERS = 4096, 256, 6
ACTIVATION = 4 * ROWS * WIDTH  # bytes


class Layers(nn.Module):
    """What crosses the border are several activations of 4 MiB, the least that a chunk has."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x.square().mean(), x


def made(**settings: int) -> tuple[nn.Module, nn.Module, Callable]:
    """Make a model for eager PyTorch, one with the same weights, and its compiled call."""
    torch.manual_seed(0)
    eager = Layers(**settings).cuda()
    ours = copy.deepcopy(eager)
    return eager, ours, torch.compile(ours, backend="ort")


def batch(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1)).cuda()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in module.parameters()]


def assert_same(got: nn.Module, want: nn.Module) -> None:
    for ours, theirs in zip(gradients(got), gradients(want), strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-4, atol=1e-5)


def peak_of_step(step: Callable[[], None]) -> int:
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_gradients_take_the_memory_of_activations() -> None:
    eager, ours, call = made(width=1024, layers=12)
    x = batch(1024)[:1024]
    gradient_bytes = sum(4 * each.numel() for each in ours.parameters())
    eager_peak = peak_of_step(lambda: eager(x)[0].backward())
    with watchers.watching() as programs:
        peaks = []
        for _ in range(2):
            ours.zero_grad()
            peaks.append(peak_of_step(lambda: call(x)[0].backward()))
    report = programs[0].session.plan_report()
    planned = report["context_bytes"] + report["scratch_bytes"]
    # With activations that are freed at the end of backward it would be more than their sum.
    assert max(peaks) < planned + gradient_bytes / 2
    assert max(peaks) < eager_peak
    assert_same(ours, eager)


def test_planned_tensors_begin_at_lines_of_the_gpus_memory() -> None:
    model = Layers(width=99).cuda()
    with watchers.watching() as programs:
        torch.compile(model, backend="ort")(batch(99)[:5])[0].backward()
    table = programs[0].session.plan_table()
    rows = [row for row in table if row["area"] in ("context", "scratch")]
    assert len(rows) > 10
    assert all(row["offset"] % 256 == 0 for row in rows)
    assert any(row["bytes"] % 256 for row in rows)


def test_pytorch_holds_no_more_memory_than_in_eager() -> None:
    """States of an optimizer are cut out of free chunks in the first step, as of activations.

    What that costs is memory of the second step, since chunks are allocated anew. Chunks that were
    kept for it could not be cut into gradients, and more would be held.
    """
    held = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="ort")):
        settled()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = Layers(width=512, layers=12).cuda()
        call, optimizer, x = wrap(model), torch_ort.optim.AdamW(model.parameters()), batch(512)
        start, after = torch.cuda.memory_reserved(), []
        for _ in range(4):
            optimizer.zero_grad()
            call(x)[0].backward()
            optimizer.step()
            after.append(torch.cuda.memory_reserved() - start)
        assert after[1:] == after[1:2] * 3
        held.append(after[-1])
        del model, call, optimizer, x
    eager, ours = held
    assert ours <= 1.05 * eager


def test_every_step_leaves_nothing_but_gradients() -> None:
    eager, ours, call = made()
    x = batch()
    # What stays is cuBLAS's workspace, which the first product of a process allocates.
    eager(x)[0].backward()
    eager.zero_grad()
    start = settled()
    for _ in range(3):
        eager.zero_grad()
        ours.zero_grad()
        loss, out = call(x)
        want, want_out = eager(x)
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-5)
        loss.backward()
        want.backward()
        assert_same(ours, eager)
        del loss, out, want, want_out
    eager.zero_grad()
    ours.zero_grad()
    assert settled() == start


def test_two_calls_alive_at_once() -> None:
    eager, ours, call = made()
    one, two = batch(), batch().flip(0) * 2
    mine = [call(each)[0] for each in (one, two)]
    theirs = [eager(each)[0] for each in (one, two)]
    for losses in (mine, theirs):
        losses[0].backward()
        losses[1].backward()
    assert_same(ours, eager)


def test_a_graph_that_is_kept_runs_again() -> None:
    eager, ours, call = made()
    for function in (call, eager):
        loss, _ = function(batch())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second"):
            loss.backward()
    assert_same(ours, eager)


def test_saved_tensors_that_hooks_move_to_the_host() -> None:
    eager, ours, call = made()
    start = settled()
    with torch.autograd.graph.save_on_cpu():
        loss, out = call(batch())
    del out
    assert settled() < start + 3 * ACTIVATION
    loss.backward()
    eager(batch())[0].backward()
    assert_same(ours, eager)


@pytest.mark.parametrize("used", [(1,), (0, 1), (0,)])
def test_other_outputs_get_gradients_than_those_of_the_step_before(used: tuple[int, ...]) -> None:
    eager, ours, call = made()
    call(batch())[0].backward()
    ours.zero_grad()
    for _ in range(2):
        for function in (call, eager):
            outputs = function(batch())
            sum(outputs[i].sum() for i in used).backward()
        assert_same(ours, eager)


def test_gradients_are_summed_over_micro_batches() -> None:
    eager, ours, call = made()
    for scale in (1.0, 2.0, 3.0):
        for function in (call, eager):
            (function(batch() * scale)[0] / 3).backward()
    assert_same(ours, eager)


def test_a_backward_that_fails_frees_all_chunks() -> None:
    _, ours, call = made()
    x = batch().requires_grad_()
    call(x)[0].backward()
    ours.zero_grad()
    x.grad = None
    start = settled()
    loss, out = call(x)
    injection.at_place("gradients", lambda: RuntimeError("no gradients"))
    with pytest.raises(RuntimeError, match="no gradients"):
        loss.backward()
    del loss, out
    assert settled() == start


def test_each_gradient_has_a_block_of_its_own() -> None:
    # PyTorch's record_stream only knows blocks of its allocator.
    _, ours, call = made()
    call(batch())[0].backward()
    for gradient in gradients(ours):
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
