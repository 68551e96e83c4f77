# Gradients of parameters that leave in the engine's memory: they are tensors like any other,
# nothing overwrites them, and loops that keep them need no more memory than before.
from __future__ import annotations

import copy
import gc
import io
import resource
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from own_process import run_python
from torch import nn

import torch_ort

pytestmark = pytest.mark.ort_only

ROWS, WIDTH = 64, 48


def make_model(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width)]
    return nn.Sequential(*layers, nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 3))


def batches(count: int, width: int = WIDTH, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def loss_of(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return call(x).pow(2).mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def count(name: str) -> int:
    return torch_ort.counters()[name]


class Counted:
    """How much a counter grew in a `with` block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Counted:
        self.before = count(self.name)
        return self

    def __exit__(self, *raised: object) -> None:
        self.grown = count(self.name) - self.before


# --- training loops -------------------------------------------------------------------------------


def drop_before_forward(call, optimizer, x):
    optimizer.zero_grad()
    loss_of(call, x).backward()
    optimizer.step()


def drop_after_step(call, optimizer, x):
    loss_of(call, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def drop_before_backward(call, optimizer, x):
    loss = loss_of(call, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zero_in_place(call, optimizer, x):
    optimizer.zero_grad(set_to_none=False)
    loss_of(call, x).backward()
    optimizer.step()


def accumulate(call, optimizer, x):
    optimizer.zero_grad()
    for part in x.chunk(4):
        loss_of(call, part).backward()
    optimizer.step()


def call_often_a_step(call, optimizer, x):
    optimizer.zero_grad()
    sum(loss_of(call, part) for part in x.chunk(4)).backward()
    optimizer.step()


def keep_the_graph(call, optimizer, x):
    optimizer.zero_grad()
    loss = loss_of(call, x)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def under_hooks(call, optimizer, x):
    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = loss_of(call, x)
    loss.backward()
    optimizer.step()


LOOPS = [
    drop_before_forward, drop_after_step, drop_before_backward, zero_in_place, accumulate,
    call_often_a_step, keep_the_graph, under_hooks,
]  # fmt: skip


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_training_gives_eagers_numbers(compiled, live_contexts, step):
    models = [make_model() for _ in range(2)]
    calls = [models[0], compiled(models[1])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    for x in batches(8):
        for call, optimizer in zip(calls, optimizers, strict=True):
            step(call, optimizer, x)
    for want, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, want)
    assert live_contexts() == 0


@pytest.mark.parametrize("step", [drop_before_forward, drop_after_step], ids=lambda f: f.__name__)
def test_a_loop_that_drops_them_runs_in_one_buffer(compiled, step):
    model = make_model()
    call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    step(call, optimizer, batches(1)[0])
    with (
        Counted("gradients_delivered") as delivered,
        Counted("outputs_allocated") as outputs,
        Counted("arena_growth") as growth,
    ):
        for x in batches(5):
            step(call, optimizer, x)
    assert delivered.grown == 5 * len(list(model.parameters()))
    assert outputs.grown == 5  # what the model returns
    assert growth.grown == 0


@pytest.mark.parametrize(
    "step",
    [drop_before_backward, zero_in_place, accumulate, call_often_a_step],
    ids=lambda step: step.__name__,
)
def test_other_loops_get_memory_of_their_own_from_then_on(compiled, step):
    model = make_model()
    call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(2):
        step(call, optimizer, x)
    with Counted("gradients_delivered") as delivered:
        for x in batches(3):
            step(call, optimizer, x)
    assert delivered.grown == 0


def test_can_be_switched_off(compiled):
    model = make_model()
    call = torch.compile(model, backend="ort", options={"disable": "deliver_gradients"})
    with Counted("gradients_delivered") as delivered, Counted("outputs_allocated") as outputs:
        loss_of(call, batches(1)[0]).backward()
    assert delivered.grown == 0
    assert outputs.grown == 1 + len(list(model.parameters()))


# --- the tensors ----------------------------------------------------------------------------------


@pytest.fixture
def stepped(compiled) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """A model after one backward, and its compiled call."""
    model = make_model()
    call = compiled(model)
    with Counted("gradients_delivered") as delivered:
        loss_of(call, batches(1)[0]).backward()
    assert delivered.grown == len(list(model.parameters()))
    return model, call


def test_each_is_alone_in_a_storage(stepped):
    model, _ = stepped
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient.untyped_storage().nbytes() == gradient.numel() * 4
        assert gradient.storage_offset() == 0
        assert gradient.data_ptr() % 64 == 0
        assert gradient.stride() == parameter.stride()
    assert len({gradient.data_ptr() for gradient in gradients(model)}) == len(gradients(model))


def test_nothing_overwrites_them_while_others_hold_them(stepped):
    model, call = stepped
    held = [parameter.grad for parameter in model.parameters()]
    want = [gradient.clone() for gradient in held]
    for x in batches(4):
        model.zero_grad()
        loss_of(call, x).backward()
        with torch.no_grad():
            loss_of(call, x)
    for got, expected in zip(held, want, strict=True):
        assert torch.equal(got, expected)


def test_they_outlive_model_graph_and_cache(compiled):
    def step() -> list[torch.Tensor]:
        model = make_model()
        loss_of(compiled(model), batches(1)[0]).backward()
        return gradients(model)

    held = step()
    want = [gradient.clone() for gradient in held]
    torch.compiler.reset()
    gc.collect()
    torch_ort.empty_cache()
    for got, expected in zip(held, want, strict=True):
        assert torch.equal(got, expected)


def test_they_can_be_edited_resized_saved_and_shared(stepped):
    model, _ = stepped
    first, second, third, *_ = gradients(model)
    want = first.clone()
    second.mul_(3)
    third.resize_(third.numel() * 10).fill_(7)
    assert torch.equal(first, want)
    assert torch.equal(copy.deepcopy(first), want)
    file = io.BytesIO()
    torch.save(first, file)
    assert len(file.getvalue()) < want.nbytes + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), want)
    assert torch.equal(first.share_memory_(), want)


def test_some_dropped_and_some_kept(stepped):
    model, call = stepped
    parameters = list(model.parameters())
    kept, want = parameters[0].grad, parameters[0].grad.clone()
    for x in batches(4):
        for parameter in parameters[1:]:
            parameter.grad = None
        parameters[0].grad = None
        loss_of(call, x).backward()
        for got, expected in zip(gradients(model), gradients_of(model, x), strict=True):
            torch.testing.assert_close(got, expected)
    assert torch.equal(kept, want)


def test_hooks_that_use_them_at_once(compiled):
    model, plain = make_model(), make_model()
    call = compiled(model)

    def descend(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for each in (model, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    for x in batches(4):
        loss_of(call, x).backward()
        loss_of(plain, x).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want)


def test_a_weight_used_twice_and_a_frozen_one(compiled):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(20, 16)
            self.inner = nn.Linear(16, 16)
            self.inner.bias.requires_grad_(False)
            self.decode = nn.Linear(16, 20)
            self.decode.weight = self.embed.weight

        def forward(self, tokens):
            return self.decode(self.inner(self.embed(tokens)).tanh())

    model, plain = Tied(), Tied()
    call = compiled(model)
    tokens = torch.arange(12).view(3, 4)
    for _ in range(3):
        for each, function in ((model, call), (plain, plain)):
            each.zero_grad()
            function(tokens).pow(2).mean().backward()
        for got, want in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(got, want)


def test_sizes_change_while_gradients_are_held(compiled):
    model = make_model()
    call = compiled(model)
    for rows in (64, 7, 200, 64, 33):
        x = batches(1, rows=rows)[0]
        model.zero_grad()
        loss_of(call, x).backward()
        for got, want in zip(gradients(model), gradients_of(model, x), strict=True):
            torch.testing.assert_close(got, want)


# --- threads, memory, the end ---------------------------------------------------------------------


def test_dropped_in_other_threads(compiled, live_contexts):
    models = [make_model() for _ in range(3)]
    calls = [compiled(model) for model in models]
    x = batches(1)[0]
    want = gradients_of(models[0], x)
    loss_of(calls[0], x).backward()  # one thread compiles
    errors: list[BaseException] = []

    def work(model: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        try:
            for _ in range(20):
                model.zero_grad()
                loss_of(call, x).backward()
                torch.testing.assert_close(gradients(model), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, calls, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert live_contexts() == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_held_gradients_do_not_hold_the_memory_of_activations(compiled):
    model = make_model(width=128)
    call = compiled(model)
    loss_of(call, batches(1, width=128)[0]).backward()
    x = batches(1, width=128, rows=40_000)[0]  # saves more than 100 MiB
    for _ in range(3):
        model.zero_grad()
        loss_of(call, x).backward()
    held = gradients(model)
    with torch.no_grad():
        loss_of(call, x)  # needs memory of its own, while gradients lie in that of the last step
    torch_ort.empty_cache()
    before = resident_bytes()
    model.zero_grad()
    held.clear()
    torch_ort.empty_cache()
    assert before - resident_bytes() < 8 * 2**20


def test_process_ends_cleanly_with_gradients():
    script = """
        import torch
        model = torch.nn.Linear(300, 300)
        torch.compile(model, backend="ort")(torch.ones(2, 300)).sum().backward()
        print("delivered", __import__("torch_ort").counters()["gradients_delivered"])
    """
    done = run_python("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert "delivered 2" in done.stdout
    assert "Error" not in done.stderr, done.stderr
