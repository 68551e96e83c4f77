# Several threads that call one ORTModule, or different ones, while graphs are captured and run.
from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule

pytestmark = pytest.mark.ort_only

NUM_THREADS = 4
# Only for threads that wait for each other: a test that passes never waits so long.
PATIENCE = 30.0


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads that start together; give results, or raise the first error."""
    start = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def work(i: int, call: Callable[[], Any]) -> None:
        start.wait(PATIENCE)
        try:
            results[i] = call()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Give a module's output and its gradients, which other threads do not add to."""
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.pow(2).sum(), [x, *module.parameters()])]


def assert_like_eager(eager: nn.Module, module: nn.Module, counts: range) -> None:
    for count in counts:
        torch.testing.assert_close(gradients(module, rows(count)), gradients(eager, rows(count)))


def counts_of(thread: int) -> range:
    return range(2 + thread, 8 + thread)


def test_different_modules_with_their_first_calls():
    eager = mlp()
    modules = [ORTModule(copy.deepcopy(eager)) for _ in range(NUM_THREADS)]
    at_once(
        *(
            lambda i=i, module=module: assert_like_eager(eager, module, counts_of(i))
            for i, module in enumerate(modules)
        )
    )
    assert torch_ort.counters()["fallbacks"] == 0


def test_one_module_that_has_captured():
    eager = mlp()
    module = ORTModule(copy.deepcopy(eager))
    assert_like_eager(eager, module, range(3, 4))
    torch_ort.reset_counters()
    at_once(
        *(
            lambda i=i: assert_like_eager(eager, module, counts_of(i))
            for i in range(NUM_THREADS)
        )
    )  # fmt: skip
    runs = sum(len(counts_of(i)) for i in range(NUM_THREADS))
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 0
    assert (counters["forward_runs"], counters["backward_runs"]) == (runs, runs)


def test_one_module_with_graphs_of_several_kinds():
    eager = mlp()
    module = ORTModule(copy.deepcopy(eager))
    inputs = [rows(3), rows(6).view(2, 3, 8), rows(3)[0]]
    for x in inputs:
        gradients(module, x)
    torch_ort.reset_counters()

    def work(first: int) -> None:
        for i in range(12):
            x = inputs[(first + i) % len(inputs)]
            torch.testing.assert_close(gradients(module, x), gradients(eager, x))

    at_once(*(lambda i=i: work(i) for i in range(NUM_THREADS)))
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 0
    assert counters["forward_runs"] == 12 * NUM_THREADS


def test_each_thread_has_its_own_modes():
    eager = mlp()
    module = ORTModule(copy.deepcopy(eager))
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for mode in modes:
        with mode():
            module(rows(3))

    def work(mode: Callable) -> None:
        for count in range(2, 10):
            with mode():
                got, want = module(rows(count)), eager(rows(count))
            assert got.requires_grad == want.requires_grad
            assert got.is_inference() == want.is_inference()
            torch.testing.assert_close(got, want)

    torch_ort.reset_counters()
    at_once(*(lambda mode=mode: work(mode) for mode in modes))
    assert torch_ort.counters()["graphs_captured"] == 0


def test_training_of_different_modules():
    models = [mlp() for _ in range(NUM_THREADS)]
    wrapped = [ORTModule(copy.deepcopy(model)) for model in models]
    for module in wrapped:
        module(rows(3)).sum().backward()
        module.zero_grad()

    def train(module: nn.Module, thread: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for count in counts_of(thread):
            optimizer.zero_grad()
            module(rows(count)).pow(2).mean().backward()
            optimizer.step()

    at_once(*(lambda i=i: train(wrapped[i], i) for i in range(NUM_THREADS)))
    for i, model in enumerate(models):
        train(model, i)
        torch.testing.assert_close(wrapped[i].state_dict(), model.state_dict())


@pytest.mark.hands_over("PyTorch words the error")
def test_an_error_in_one_thread_is_not_anothers():
    eager = mlp()
    module = ORTModule(copy.deepcopy(eager))
    module(rows(3))

    def fail() -> None:
        for count in range(2, 8):
            with pytest.raises(Exception, match=r"cannot be multiplied|reduction dim"):
                module(torch.zeros(count, 7))

    another = ORTModule(copy.deepcopy(eager))
    at_once(fail, lambda: assert_like_eager(eager, another, counts_of(0)))
    assert_like_eager(eager, module, counts_of(0))


class Meeting:
    """Lets a test run something in another thread in the midst of a capture."""

    def __init__(self) -> None:
        self.call: Callable[[], Any] | None = None
        self.results: list[Any] = []
        self.thread: threading.Thread | None = None

    def arrive(self) -> None:
        """Run the call, once, in another thread; one that waits for this capture goes on later."""
        call, self.call = self.call, None
        if call is not None:
            self.thread = threading.Thread(target=lambda: self.results.append(outcome(call)))
            self.thread.start()
            self.thread.join(0.5)

    def result(self) -> Any:
        self.thread.join(PATIENCE)
        (result,) = self.results
        if isinstance(result, BaseException):
            raise result
        return result


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error


meeting = Meeting()


class Meets(nn.Module):
    """Lets others meet whenever its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        meeting.arrive()
        return x


@pytest.fixture(autouse=True)
def fresh_meeting() -> Iterator[None]:
    meeting.__init__()
    yield
    meeting.__init__()


class TestWhileAnotherThreadCaptures:
    @pytest.mark.parametrize("has_captured", [False, True])
    def test_the_same_module(self, has_captured):
        eager = Meets()
        module = ORTModule(copy.deepcopy(eager))
        if has_captured:
            module(rows(3))
        meeting.call = lambda: module(rows(5))
        torch.testing.assert_close(module(rows(6).view(2, 3, 8)), eager(rows(6).view(2, 3, 8)))
        torch.testing.assert_close(meeting.result(), eager(rows(5)))

    def test_the_numbers_of_another_module(self):
        eager, other = Meets(), mlp()
        module, another = ORTModule(copy.deepcopy(eager)), ORTModule(copy.deepcopy(other))
        another(rows(3))
        meeting.call = lambda: gradients(another, rows(5))
        torch.testing.assert_close(module(rows(3)), eager(rows(3)))
        torch.testing.assert_close(meeting.result(), gradients(other, rows(5)))

    def test_another_module_runs_in_the_engine(self):
        module, another = ORTModule(Meets()), ORTModule(mlp())
        another(rows(3))
        torch_ort.reset_counters()
        meeting.call = lambda: another(rows(5))
        module(rows(3))
        meeting.result()
        assert torch_ort.counters()["forward_runs"] == 2

    def test_the_first_call_of_another_module_runs_in_the_engine(self):
        module, another = ORTModule(Meets()), ORTModule(mlp())
        meeting.call = lambda: another(rows(5))
        module(rows(3))
        meeting.result()
        assert torch_ort.counters()["forward_runs"] == 2

    def test_is_compiling_is_not_true_elsewhere(self):
        module = ORTModule(Meets())
        meeting.call = torch.compiler.is_compiling
        module(rows(3))
        assert meeting.result() is False

    def test_plain_pytorch_is_left_alone(self):
        module, plain = ORTModule(Meets()), mlp()
        want = gradients(plain, rows(5))
        meeting.call = lambda: gradients(plain, rows(5))
        module(rows(3))
        torch.testing.assert_close(meeting.result(), want, rtol=0, atol=0)
