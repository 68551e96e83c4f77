"""Halves as CUDA graphs (option cuda_graphs): the same bits as without, in each situation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import wrap
from torch import nn

import torch_ort
from torch_ort import _C
from torch_ort.engine import watchers
from torch_ort.engine.replays import Replays, replays_of

pytestmark = pytest.mark.cuda

STEPS = 20
WARM_UPS = 2

Compile = Callable[..., Any]
Loop = Callable[[Compile], Iterator[torch.Tensor]]


class Block(nn.Module):
    """Embeddings, a norm, a nonlinearity, dropout and a product: kernels of ours and PyTorch's."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def batch(step: int, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(32, (2, size, 7), generator=generator).cuda()
    return ids[0], ids[1]


def new_model(**settings: float) -> nn.Module:
    torch.manual_seed(0)
    return Block(**settings).cuda()


@pytest.fixture(params=["compile", "ortmodule"])
def road(request: pytest.FixtureRequest) -> Compile:
    def compiled(target: Any, **options: Any) -> Any:
        if request.param == "ortmodule":
            return wrap(target, options=options)
        return torch.compile(target, backend="ort", fullgraph=True, options=options)

    return compiled


@pytest.fixture
def same_bits(road: Compile) -> Callable[..., dict[str, int]]:
    """Return a function that runs a loop with and without graphs, and compares what it yields.

    It returns the counters of the run with graphs.
    """

    def check(loop: Loop, **options: Any) -> dict[str, int]:
        found: dict[bool, list[torch.Tensor]] = {}
        for graphs in (False, True):
            torch.compiler.reset()
            torch_ort.reset_counters()
            torch.manual_seed(1)
            made = loop(lambda target, g=graphs: road(target, cuda_graphs=g, **options))
            found[graphs] = [value.detach().cpu().clone() for value in made]
        counters = torch_ort.counters()
        assert counters["fallbacks"] == counters["calls_left_to_eager"] == 0
        assert len(found[True]) == len(found[False]) > 0
        for i, (got, want) in enumerate(zip(found[True], found[False], strict=True)):
            same = torch.equal(got.nan_to_num(123), want.nan_to_num(123))
            assert same, f"value {i} of {len(found[True])}: {got} {want}"
            assert not want.isnan().any()
        return counters

    return check


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


def steps_of(model: nn.Module, run: Any, optimizer: Any = None) -> Iterator[torch.Tensor]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss, logits = run(*batch(step))
        loss.backward()
        yield loss
        yield logits
        yield from gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    yield from model.parameters()


@pytest.fixture
def reports() -> Iterator[Callable[[], list[Replays]]]:
    """Return a function that tells which graphs of this test run as CUDA graphs."""
    with watchers.watching() as programs:

        def tell() -> list[Replays]:
            found = (replays_of(program.session) for program in programs)
            return [replays for replays in found if replays is not None]

        yield tell


# ---- loops ---------------------------------------------------------------------------------------


def test_training_replays_all_but_the_first_steps(same_bits):
    def loop(compiled):
        model = new_model()
        yield from steps_of(model, compiled(model))

    counters = same_bits(loop)
    assert counters["cuda_graphs_replayed"] == 2 * (STEPS - WARM_UPS)
    assert counters["forward_runs"] == counters["backward_runs"] == STEPS
    assert counters["cuda_graphs_captured"] <= 6  # batches move at first


@pytest.mark.parametrize("exact", [False, True], ids=["masks of ours", "masks of eager"])
def test_dropout_draws_what_it_draws_without_graphs(same_bits, exact):
    def loop(compiled):
        model = new_model(dropout=0.5)
        yield from steps_of(model, compiled(model))
        yield torch.rand(4, device="cuda")  # the generator is where it would be

    counters = same_bits(loop, exact_random=exact)
    assert counters["cuda_graphs_replayed"] == 2 * (STEPS - WARM_UPS)


def test_inputs_that_move_are_copied(same_bits):
    def loop(compiled):
        model, kept = new_model(), []
        run = compiled(model)
        for step in range(STEPS):
            kept.append(batch(step))  # so that each batch has memory of its own
            loss, _ = run(*kept[-1])
            loss.backward()
            yield loss
            yield from gradients(model)
            model.zero_grad()

    counters = same_bits(loop)
    assert counters["cuda_graphs_replayed"] == 2 * (STEPS - WARM_UPS)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_added_up_over_calls(same_bits, to_none):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss, _ = run(*batch(step))
            loss.backward()
            yield loss
            yield from gradients(model)
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)

    counters = same_bits(loop)
    # A second graph has gradients of its own.
    assert counters["cuda_graphs_replayed"] == 2 * (STEPS - WARM_UPS)


def test_gradients_that_are_held_stay_as_they_are(same_bits):
    def loop(compiled):
        model, held = new_model(), []
        run = compiled(model)
        for step in range(STEPS):
            loss, _ = run(*batch(step))
            loss.backward()
            held += gradients(model)
            for parameter in model.parameters():
                parameter.grad = None
        yield from held

    counters = same_bits(loop)
    # Forward replays, and the graphs of backward are soon used up.
    assert STEPS - WARM_UPS < counters["cuda_graphs_replayed"] < STEPS + 4


def test_outputs_that_are_held_stay_as_they_are(same_bits):
    def loop(compiled):
        model, held = new_model(), []
        run = compiled(model)
        for step in range(STEPS):
            outputs = run(*batch(step))
            outputs[0].backward()
            held += outputs
        yield from held

    same_bits(loop)


def test_retained_graphs_run_backward_again(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        for step in range(STEPS):
            loss, _ = run(*batch(step))
            loss.backward(retain_graph=True)
            yield from gradients(model)
            loss.backward()
            yield from gradients(model)
            model.zero_grad()

    counters = same_bits(loop)
    assert counters["backward_runs"] == 2 * STEPS


def test_a_second_call_that_is_alive_runs_without_graphs(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        for step in range(STEPS):
            first, _ = run(*batch(step))
            second, _ = run(*batch(step + 100))
            (first + second).backward()
            yield first
            yield second
            yield from gradients(model)
            model.zero_grad()

    counters = same_bits(loop)
    assert counters["forward_runs"] == 2 * STEPS
    assert counters["cuda_graphs_replayed"] >= STEPS - WARM_UPS


def test_calls_that_end_in_another_order(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        alive = []
        for step in range(STEPS):
            alive.append(run(*batch(step))[0])
            if len(alive) == 3:
                for index in (1, 0, 0):
                    alive.pop(index).backward()
                    yield from gradients(model)
                model.zero_grad()

    same_bits(loop)


def test_calls_without_backward(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        for step in range(STEPS):
            loss, logits = run(*batch(step))
            yield logits
            if step % 3 == 0:
                loss.backward()
                yield from gradients(model)
                model.zero_grad()

    same_bits(loop)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(same_bits, mode):
    def loop(compiled):
        model = new_model().eval()
        run = compiled(model)
        for step in range(STEPS):
            with mode():
                outputs = run(*batch(step))
            yield from outputs

    counters = same_bits(loop)
    assert counters["cuda_graphs_replayed"] == STEPS - WARM_UPS


# ---- what a graph reads and writes ---------------------------------------------------------------


def test_hooks_see_gradients(same_bits):
    def loop(compiled):
        model, seen = new_model(), []
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
        yield from steps_of(model, compiled(model))
        yield from seen

    same_bits(loop)


def test_gradients_that_leave_early(same_bits):
    """Each segment is a graph, and hooks run between them."""

    def loop(compiled):
        model, seen = new_model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        yield from steps_of(model, compiled(model), optimizer)
        yield from seen

    counters = same_bits(loop, early_gradients=True, gradient_segment_bytes=2048)
    assert counters["cuda_graphs_replayed"] >= 2 * (STEPS - WARM_UPS)


def test_an_optimizer_that_steps_in_backward(same_bits):
    def loop(compiled):
        model = new_model()

        def step(parameter):
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        run = compiled(model)
        for index in range(STEPS):
            loss, _ = run(*batch(index))
            loss.backward()
            yield loss
        yield from model.parameters()

    same_bits(loop, gradient_segment_bytes=2048)


def test_parameters_that_move(same_bits):
    def loop(compiled):
        model, old = new_model(), []
        run = compiled(model)
        for step in range(STEPS):
            if step % 7 == 6:
                for parameter in model.parameters():
                    old.append(parameter.data)
                    parameter.data = parameter.data + 0.01
            loss, _ = run(*batch(step))
            loss.backward()
            yield loss
            yield from gradients(model)
            model.zero_grad()

    same_bits(loop)


class Normed(nn.Module):
    """Buffers that forward writes, and an output that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(self.norm(x))).sigmoid() + self.calls


def test_buffers_are_written(same_bits):
    def loop(compiled):
        torch.manual_seed(0)
        model = Normed().cuda()
        run = compiled(model)
        for step in range(STEPS):
            x = torch.full((4, 8), 0.1 * step, device="cuda").addcmul_(
                torch.arange(8.0, device="cuda"), torch.arange(4.0, device="cuda")[:, None]
            )
            x.requires_grad_()
            y = run(x)
            y.square().sum().backward()
            yield y
            yield x.grad
            yield from gradients(model)
            yield from (buffer.clone() for buffer in model.buffers())
            model.zero_grad()

    same_bits(loop)


def test_outputs_that_are_inputs_or_views(same_bits):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, y):
            z = self.linear(x).relu() * y.exp()
            z = self.linear(z).sigmoid()
            return x.view(2, 2, 6), y.t(), z, z.sum()

    def loop(compiled):
        torch.manual_seed(0)
        model, kept = Views().cuda(), []
        run = compiled(model)
        for step in range(STEPS):
            x = torch.full((4, 6), 0.1 * step, device="cuda", requires_grad=True)
            y = torch.full((4, 6), 0.2, device="cuda") + step * 0.01
            kept += [x, y]
            first, turned, z, total = run(x, y)
            assert first.data_ptr() == x.data_ptr()
            assert turned.data_ptr() == y.data_ptr()
            total.backward()
            yield from (first, turned, z, total, x.grad)
            yield from gradients(model)
            model.zero_grad()

    same_bits(loop)


def test_sizes_that_change(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        for step in range(STEPS):
            loss, logits = run(*batch(step, size=3 + step % 2))
            loss.backward()
            yield loss
            yield logits
            yield from gradients(model)
            model.zero_grad()

    same_bits(loop)


def test_autocast_and_scaled_losses(same_bits):
    def loop(compiled):
        model = new_model(dropout=0.1)
        run = compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        for step in range(STEPS):
            with torch.autocast("cuda", torch.float16):
                loss, _ = run(*batch(step))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield loss
            yield from gradients(model)
            optimizer.zero_grad()

    same_bits(loop)


def test_attention(same_bits):
    def loop(compiled):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True).cuda()
        run = compiled(layer)
        optimizer = torch.optim.AdamW(layer.parameters())
        for step in range(STEPS):
            x = torch.linspace(-1, 1 + step, 2 * 5 * 16, device="cuda").view(2, 5, 16)
            loss = run(x).square().mean()
            loss.backward()
            yield loss
            yield from gradients(layer)
            optimizer.step()
            optimizer.zero_grad()

    same_bits(loop)


def test_the_engines_optimizer(same_bits):
    def loop(compiled):
        model = new_model()
        optimizer = torch_ort.optim.FusedAdam(model.parameters(), lr=1e-2)
        yield from steps_of(model, compiled(model), optimizer)

    counters = same_bits(loop)
    assert counters["cuda_graphs_replayed"] == 2 * (STEPS - WARM_UPS)


# ---- streams and captures ------------------------------------------------------------------------


def test_another_stream_runs_without_graphs(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)
        other = torch.cuda.Stream()
        for step in range(STEPS):
            other.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(other if step % 2 else torch.cuda.default_stream()):
                loss, _ = run(*batch(step))
                loss.backward()
            torch.cuda.default_stream().wait_stream(other)
            yield loss
            yield from gradients(model)
            model.zero_grad()

    counters = same_bits(loop)
    assert 0 < counters["cuda_graphs_replayed"] < STEPS


def test_a_capture_of_the_users_has_no_graphs_of_ours(same_bits):
    def loop(compiled):
        model = new_model().eval()
        run = compiled(model)
        ids, labels = batch(0)
        with torch.no_grad():
            for step in range(5):
                yield run(*batch(step))[0]
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                loss, _ = run(ids, labels)
                graph.capture_end()
            for step in range(5):
                ids.copy_(batch(step)[0])
                labels.copy_(batch(step)[1])
                graph.replay()
                yield loss
                yield run(*batch(step))[0]

    same_bits(loop)


def test_a_capture_that_fails_runs_step_by_step(same_bits, reports):
    """PyTorch's generator and allocator are as before, and the capture is not tried again."""

    def loop(compiled):
        model = new_model(dropout=0.5)
        run = compiled(model)
        number = torch.ones((), device="cuda")

        def ask_the_host(place):
            if torch.cuda.is_current_stream_capturing():
                with pytest.raises(RuntimeError, match="operation not permitted"):
                    number.item()

        _C.set_failpoint(ask_the_host)
        try:
            yield from steps_of(model, run)
        finally:
            _C.set_failpoint(None)
        yield torch.rand(3, device="cuda")
        yield from steps_of(model, run)

    counters = same_bits(loop)
    assert counters["cuda_graphs_captured"] == 0
    (replays,) = reports()[-1:]
    forward, backward = replays.parts
    assert "operation failed due to a previous error during capture" in forward.refused
    assert (backward.refused, backward.captures) == ("", 0)


def test_a_step_that_raises_in_a_capture(same_bits):
    def loop(compiled):
        model = new_model()
        run = compiled(model)

        def fail(place):
            if place == "region" and torch.cuda.is_current_stream_capturing():
                raise MemoryError("full")

        _C.set_failpoint(fail)
        try:
            yield from steps_of(model, run)
        finally:
            _C.set_failpoint(None)

    assert same_bits(loop)["cuda_graphs_captured"] == 0


# ---- what is said --------------------------------------------------------------------------------


def test_labels_out_of_bounds_are_found_in_replays(road):
    model = new_model()
    run = road(model, cuda_graphs=True)
    for step in range(6):
        run(*batch(step))[0].backward()
    ids, labels = batch(6)
    labels[1, 1] = 77
    run(ids, labels)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="Target is out of bounds"):
        run(*batch(7))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_labels_out_of_bounds_are_found_before_a_capture(road, step):
    run = road(new_model(), cuda_graphs=True)
    for i in range(step):
        run(*batch(i))[0].backward()

    def run_twice():
        ids, labels = batch(step)
        labels[1, 1] = 77
        run(ids, labels)
        torch.cuda.synchronize()
        run(*batch(step + 1))

    with pytest.raises(IndexError, match="Target is out of bounds"):
        run_twice()


def test_what_the_host_has_to_look_at_is_not_captured(road, reports):
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.linalg.qr(self.linear(x)).R.sum()

    model = Sorted().cuda()
    run = road(model, cuda_graphs=True)
    for _ in range(4):
        run(torch.eye(4, device="cuda")).backward()
    assert torch_ort.counters()["cuda_graphs_captured"] == 0
    (report,) = reports()
    assert "aten::linalg_qr" in report.refused
    assert "the host reads a number of it" in report.refused


def test_the_mode_of_torch_compile():
    model = new_model()
    run = torch.compile(model, backend="ort", mode="reduce-overhead")
    for step in range(5):
        run(*batch(step))[0].backward()
        model.zero_grad()
    assert torch_ort.counters()["cuda_graphs_replayed"] == 6


def test_memory_is_given_back(road):
    model = new_model()
    run = road(model, cuda_graphs=True)
    for step in range(5):
        run(*batch(step))[0].backward()
        model.zero_grad()
    held = torch.cuda.memory_allocated()
    _C.empty_cache()
    assert torch.cuda.memory_allocated() < held
    for step in range(5):
        run(*batch(step))[0].backward()
        model.zero_grad()
    assert torch_ort.counters()["cuda_graphs_replayed"] == 12


def test_reports_count(road, reports):
    model = new_model()
    run = road(model, cuda_graphs=True)
    for step in range(6):
        run(*batch(step))[0].backward()
        model.zero_grad()
    (replays,) = reports()
    assert replays.refused == ""
    assert [part.half for part in replays.parts] == ["forward", "backward"]
    for part in replays.parts:
        assert (part.refused, part.runs, part.replays) == ("", WARM_UPS, 4)
    words = f"forward, steps 0 to {replays.parts[0].end}: "
    assert str(replays).startswith(words)
    assert "4 replayed, 2 run step by step; backward, steps 0 to" in str(replays)


def test_explain_says_why_nothing_is_captured():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).cuda()
    x = torch.randn(2, 4, device="cuda")
    settings = {"cuda_graphs": True, "check": 2}
    report = torch_ort.explain(model, x, options=settings)
    assert report.graphs[0].replays.refused == "an option has the host look at each step"
    assert "  CUDA graphs: none: an option has the host look at each step" in str(report)
    assert torch_ort.explain(model, x).graphs[0].replays is None
