# The life of what a forward keeps for its backward: several at once, threads, retained graphs,
# dropped outputs, saved-tensor hooks, errors, and memory over many steps.
from __future__ import annotations

import contextlib
import copy
import gc
import random
import resource
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_process import run_python
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.both_roads


class Network(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(F.gelu(self.first(x)).exp()))


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("backward of the user failed")


@pytest.fixture
def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Network().to(device)


def rows(device: str, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8, device=device, requires_grad=True)


def expected_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x).pow(2).sum(), x)[0]


class TestSeveralForwards:
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
    def test_backward_in_any_order(self, model, device, compiled, live_contexts, order):
        call = compiled(model)
        inputs = [rows(device) for _ in order]
        losses = [call(x).pow(2).sum() for x in inputs]
        for i in order:
            losses[i].backward()
        for x in inputs:
            torch.testing.assert_close(x.grad, expected_gradient(model, x))
        del losses
        assert live_contexts() == 0

    @pytest.mark.ort_only
    def test_each_live_forward_is_counted(self, model, device, compiled, live_contexts):
        call = compiled(model)
        losses = [call(rows(device)).sum() for _ in range(3)]
        assert live_contexts() == 3
        losses[1].backward()
        assert live_contexts() == 2
        losses.clear()
        assert live_contexts() == 0

    def test_two_models_in_turn_as_in_a_gan(self, device, compiled, live_contexts):
        def make():
            torch.manual_seed(0)
            return (
                nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(device),
                nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1)).to(device),
            )

        results = []
        for wrap in (lambda m: m, compiled):
            generator, critic = make()
            generate, judge = wrap(generator), wrap(critic)
            optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, generator)]
            torch.manual_seed(1)
            for _ in range(3):
                real = torch.randn(6, 8, device=device)
                fake = generate(torch.randn(6, 4, device=device))
                optimizers[0].zero_grad()
                loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
                loss.backward()
                optimizers[0].step()
                optimizers[1].zero_grad()
                F.softplus(-judge(fake)).mean().backward()
                optimizers[1].step()
            results.append([*generator.parameters(), *critic.parameters()])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        del loss, fake
        assert live_contexts() == 0

    def test_recurrence_over_compiled_calls(self, device, compiled, live_contexts):
        torch.manual_seed(0)
        cell = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
        call = compiled(cell)
        gradients = []
        for step in (cell, call):
            x = torch.linspace(-1, 1, 16, device=device).reshape(2, 8).requires_grad_()
            state = x
            for _ in range(5):
                state = step(state)
            gradients.append(torch.autograd.grad(state.sum(), [x, *cell.parameters()]))
        torch.testing.assert_close(gradients[1], gradients[0])
        del state
        assert live_contexts() == 0


class TestThreads:
    def test_steps_in_three_threads(self, model, device, compiled, live_contexts):
        call = compiled(model)
        call(rows(device)).sum().backward()
        model.zero_grad()
        batches = [[rows(device) for _ in range(10)] for _ in range(3)]
        errors = []

        def work(inputs):
            try:
                for x in inputs:
                    torch.autograd.grad(call(x).sum(), x)
                    x.grad = torch.autograd.grad(call(x).pow(2).sum(), x)[0]
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(inputs,)) for inputs in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for inputs in batches:
            for x in inputs:
                torch.testing.assert_close(x.grad, expected_gradient(model, x))
        assert live_contexts() == 0

    def test_backward_in_another_thread(self, model, device, compiled, live_contexts):
        call = compiled(model)
        inputs = [rows(device) for _ in range(3)]
        losses = [call(x).pow(2).sum() for x in inputs]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for x in inputs:
            torch.testing.assert_close(x.grad, expected_gradient(model, x))
        del losses, threads, thread
        assert live_contexts() == 0

    def test_outputs_dropped_in_another_thread(self, model, device, compiled, live_contexts):
        call = compiled(model)
        outputs = [call(rows(device)) for _ in range(3)]
        thread = threading.Thread(target=outputs.clear)
        thread.start()
        thread.join()
        assert live_contexts() == 0

    def test_inference_beside_training(self, model, device, compiled):
        call = compiled(model)
        inputs = [rows(device) for _ in range(10)]
        want = [model(x).detach() for x in inputs]
        with torch.no_grad():
            call(inputs[0])
        call(inputs[0]).sum().backward()
        got = []

        def evaluate():
            with torch.no_grad():
                got.extend(call(x) for x in inputs)

        thread = threading.Thread(target=evaluate)
        thread.start()
        for x in inputs:
            call(x).sum().backward()
        thread.join()
        torch.testing.assert_close(got, want)


class TestDroppedForwards:
    def test_loss_that_is_never_used(self, model, device, compiled, live_contexts):
        call = compiled(model)
        for _ in range(5):
            call(rows(device)).sum()
        assert live_contexts() == 0

    def test_finished_backward_frees_while_outputs_live(
        self, model, device, compiled, live_contexts
    ):
        output = compiled(model)(rows(device))
        output.sum().backward()
        assert live_contexts() == 0
        assert output.requires_grad

    def test_detached_outputs_keep_nothing(self, model, device, compiled, live_contexts):
        call = compiled(model)
        kept = [call(rows(device)).detach() for _ in range(3)]
        assert live_contexts() == 0
        assert len(kept) == 3

    def test_inference_keeps_nothing(self, model, device, compiled, live_contexts):
        call = compiled(model)
        with torch.no_grad():
            kept = [call(rows(device)) for _ in range(3)]
        assert live_contexts() == 0
        assert not kept[0].requires_grad

    def test_inputs_are_not_kept_alive(self, model, device, compiled):
        call = compiled(model)
        x = rows(device)
        seen = weakref.ref(x)
        call(x).sum().backward()
        del x
        gc.collect()
        assert seen() is None

    @pytest.mark.hands_over("an input that is written into")
    def test_input_changed_with_gradient_is_not_kept_alive(self, device, compiled, live_contexts):
        def change(x, w):
            x.add_(w).exp_()
            return x * w

        call = compiled(change)
        w = torch.ones(8, device=device, requires_grad=True)
        for finish in (True, False):
            x = rows(device) + 0
            seen = weakref.ref(x)
            y = call(x, w)
            if finish:
                y.sum().backward()
            del x, y
            gc.collect()
            assert seen() is None
        assert live_contexts() == 0

    def test_model_dropped_before_backward(self, device, compiled, live_contexts):
        torch.manual_seed(0)
        model = Network().to(device)
        x = rows(device)
        want = expected_gradient(model, x)
        loss = compiled(model)(x).pow(2).sum()
        del model
        gc.collect()
        loss.backward()
        torch.testing.assert_close(x.grad, want)
        del loss
        assert live_contexts() == 0

    @pytest.mark.parametrize("reset", [torch._dynamo.reset, torch.compiler.reset])
    def test_compiler_reset_before_backward(self, model, device, compiled, reset):
        call = compiled(model)
        x = rows(device)
        loss = call(x).pow(2).sum()
        reset()
        loss.backward()
        torch.testing.assert_close(x.grad, expected_gradient(model, x))
        torch.testing.assert_close(call(x), model(x))

    @pytest.mark.ort_only
    def test_cache_emptied_before_backward(self, model, device, compiled):
        import torch_ort

        call = compiled(model)
        call(rows(device)).sum().backward()
        x = rows(device)
        loss = call(x).pow(2).sum()
        torch_ort.empty_cache()
        loss.backward()
        torch.testing.assert_close(x.grad, expected_gradient(model, x))
        torch.testing.assert_close(call(x), model(x))


class TestErrorsBetween:
    def test_backward_of_a_later_node_fails(self, model, device, compiled, live_contexts):
        call = compiled(model)

        def step():
            loss = Failing.apply(call(rows(device))).sum()
            with pytest.raises(ValueError, match="of the user failed"):
                loss.backward()

        step()
        assert live_contexts() == 0

    def test_backward_of_an_earlier_node_fails(self, model, device, compiled, live_contexts):
        call = compiled(model)

        def step():
            loss = call(Failing.apply(rows(device))).sum()
            with pytest.raises(ValueError, match="of the user failed"):
                loss.backward()

        step()
        assert live_contexts() == 0
        x = rows(device)
        call(x).pow(2).sum().backward()
        torch.testing.assert_close(x.grad, expected_gradient(model, x))

    def test_hook_of_a_parameter_fails(self, model, device, compiled, live_contexts):
        def fail(gradient):
            raise ValueError("hook of the user failed")

        call = compiled(model)
        handle = model.first.weight.register_hook(fail)

        def step():
            with pytest.raises(ValueError, match="hook of the user failed"):
                call(rows(device)).sum().backward()

        step()
        handle.remove()
        assert live_contexts() == 0

    def test_forward_fails_at_run_time(self, device, compiled, live_contexts):
        if device == "cuda":
            pytest.skip("a failed device assertion ends the CUDA context")
        call = compiled(nn.Sequential(nn.Embedding(5, 8), Network()))
        call(torch.tensor([0, 4])).sum().backward()

        def step():
            with pytest.raises(IndexError, match="out of range"):
                call(torch.tensor([0, 5]))

        step()
        assert live_contexts() == 0
        assert call(torch.tensor([1, 2])).shape == (2, 4)

    def test_second_backward_without_retaining(self, model, device, compiled, live_contexts):
        loss = compiled(model)(rows(device)).pow(2).sum()
        loss.backward()
        with pytest.raises(
            RuntimeError, match="Trying to backward through the graph a second time"
        ):
            loss.backward()
        del loss
        assert live_contexts() == 0


class TestRetainGraph:
    def test_frees_at_the_last_backward(self, model, device, compiled, live_contexts):
        x = rows(device)
        loss = compiled(model)(x).pow(2).sum()
        for retain in (True, True, False):
            x.grad = None
            loss.backward(retain_graph=retain)
            torch.testing.assert_close(x.grad, expected_gradient(model, x))
        assert live_contexts() == 0

    def test_retained_and_then_dropped(self, model, device, compiled, live_contexts):
        loss = compiled(model)(rows(device)).sum()
        loss.backward(retain_graph=True)
        del loss
        assert live_contexts() == 0

    def test_other_forwards_run_in_between(self, model, device, compiled):
        call = compiled(model)
        x = rows(device)
        loss = call(x).pow(2).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        for _ in range(3):
            call(rows(device)).sum().backward()
        x.grad = None
        loss.backward()
        torch.testing.assert_close(x.grad, first, rtol=0, atol=0)


def copying() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)


class TestSavedTensorHooks:
    @pytest.mark.parametrize("hooks", [copying, torch.autograd.graph.save_on_cpu])
    def test_dropped_under_hooks(self, model, device, compiled, live_contexts, hooks):
        call = compiled(model)
        with hooks():
            for _ in range(3):
                call(rows(device)).sum()
        assert live_contexts() == 0

    def test_hooks_switched_on_and_off(self, model, device, compiled, live_contexts):
        call = compiled(model)
        inputs = [rows(device) for _ in range(4)]
        losses = []
        for i, x in enumerate(inputs):
            with copying() if i % 2 else contextlib.nullcontext():
                losses.append(call(x).pow(2).sum())
        for loss in losses:
            loss.backward()
        for x in inputs:
            torch.testing.assert_close(x.grad, expected_gradient(model, x))
        del losses, loss
        assert live_contexts() == 0

    def test_hooks_see_the_activations(self, device, compiled):
        torch.manual_seed(0)
        model = Network(width=64).to(device)
        packed_bytes = []
        for call in (model, compiled(model)):
            sizes = []

            def pack(x, sizes=sizes):
                sizes.append(x.numel() * x.element_size())
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = call(rows(device, 256)).sum()
            loss.backward()
            packed_bytes.append(sum(sizes))
        assert packed_bytes[1] >= 0.5 * packed_bytes[0]

    def test_hooks_disabled_by_the_user(self, model, device, compiled):
        call = compiled(model)
        x = rows(device)
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            loss = call(x).pow(2).sum()
        loss.backward()
        torch.testing.assert_close(x.grad, expected_gradient(model, x))


class TestCheckpointAround:
    @pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
    def test_with_dropout(self, device, compiled, live_contexts, reentrant):
        def make():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4))

        gradients = []
        for wrap in (lambda m: m, compiled):
            module = make().to(device)
            call = wrap(module)
            torch.manual_seed(1)
            for _ in range(3):
                x = rows(device)
                y = checkpoint(call, x, use_reentrant=reentrant)
                y.pow(2).sum().backward()
            gradients.append([x.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(gradients[1], gradients[0])
        del y
        assert live_contexts() == 0

    def test_first_forward_keeps_nothing(self, model, device, compiled, live_contexts):
        call = compiled(model)
        loss = checkpoint(call, rows(device), use_reentrant=False).sum()
        assert live_contexts() == 0
        loss.backward()

    def test_over_several_compiled_blocks(self, device, compiled, live_contexts):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device) for _ in range(3)]
        calls = [compiled(block) for block in blocks]
        gradients = []
        for layers in (blocks, calls):
            x = torch.linspace(-1, 1, 16, device=device).reshape(2, 8).requires_grad_()
            hidden = x
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            hidden.sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
        del hidden
        assert live_contexts() == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class TestMemory:
    @pytest.fixture(autouse=True)
    def one_thread(self):
        """Keep many small steps fast on a busy machine."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def steps(self, calls, lengths, width):
        for length in lengths:
            for call in calls:
                x = torch.ones(length, width)
                call(x).pow(2).mean().backward()

    def test_flat_over_random_lengths_and_two_models(self, compiled, live_contexts):
        torch.manual_seed(0)
        width, longest = 64, 400
        models = [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)),
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)),
        ]
        calls = [compiled(model) for model in models]
        lengths = random.Random(0)
        # Both captures, and every pool at its largest, lie before the first measurement.
        self.steps(calls, [7, 11, *range(longest - 20, longest + 1)], width)
        gc.collect()
        before = resident_bytes()
        self.steps(calls, [lengths.randint(2, longest) for _ in range(500)], width)
        gc.collect()
        # One leaked activation per step and model is about 50 MB; the heap itself varies by 15.
        assert resident_bytes() - before < 24 * 2**20
        assert live_contexts() == 0

    def test_flat_over_dropped_forwards(self, compiled):
        call = compiled(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
        x = torch.ones(400, 64)
        for _ in range(20):
            call(x).sum()
        before = resident_bytes()
        for _ in range(200):
            call(x).sum()
        gc.collect()
        # One leaked activation per forward is 20 MB.
        assert resident_bytes() - before < 12 * 2**20

    @pytest.mark.ort_only
    def test_arena_stops_growing(self, compiled):
        import torch_ort

        call = compiled(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
        for _ in range(5):
            call(torch.ones(64, 64)).sum().backward()
        before = torch_ort.counters()
        for _ in range(100):
            call(torch.ones(64, 64)).sum().backward()
        after = torch_ort.counters()
        assert after["arena_bytes"] == before["arena_bytes"]
        assert after["arena_allocations"] == before["arena_allocations"]


@pytest.mark.compile_only("calls torch.compile")
def test_process_ends_cleanly_with_a_live_forward(backend):
    script = f"""
        import torch
        call = torch.compile(lambda x: x.exp() * 2, backend={backend!r})
        x = torch.ones(3, requires_grad=True)
        y = call(x)
        call(x).sum().backward()
        print("kept", y.requires_grad)
    """
    done = run_python("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert "kept True" in done.stdout
    assert "Error" not in done.stderr, done.stderr


def test_copied_models_train_side_by_side(model, device, compiled):
    copies = [copy.deepcopy(model) for _ in range(2)]
    calls = [compiled(each) for each in copies]
    x = rows(device).detach()
    losses = [call(x * (i + 1)).pow(2).sum() for i, call in enumerate(calls)]
    for loss in reversed(losses):
        loss.backward()
    for i, each in enumerate(copies):
        want = torch.autograd.grad(model(x * (i + 1)).pow(2).sum(), list(model.parameters()))
        torch.testing.assert_close([p.grad for p in each.parameters()], list(want))
