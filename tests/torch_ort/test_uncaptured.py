"""What Dynamo leaves to eager PyTorch is told once, counted and listed; strict mode refuses it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from models import module_with
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.parallel import DistributedDataParallel

import torch_ort
from torch_ort.dynamo import first_run
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only

X = torch.randn(5, 6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 12, proj_size=6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        y, _ = self.layer(x)  # here
        return self.head(y)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(5).to_sparse())
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(torch.sparse.mm(self.adjacency, x))  # here


@torch.library.custom_op("tests_uncaptured::places", mutates_args=())
def places(x: torch.Tensor) -> torch.Tensor:
    """An operator of whose result nothing is known without numbers."""
    return x.nonzero().squeeze(-1)


@places.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise DynamicOutputShapeException(torch.ops.tests_uncaptured.places.default)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = places(chosen == i)  # here
            result = result.index_add(0, rows, expert(x[rows]))
        return result


class Around(nn.Module):
    """A part that can be captured around one that cannot."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = inner

    def forward(self, x):
        return self.inner(self.linear(x).relu()) * 2


class Finds(nn.Module):
    def forward(self, x):
        y = x * 2
        return y[places(y[:, 0])] + 1  # here


LEFT = {  # whole models: part of the reason
    "lstm": (Recurrent, "Attempted to wrap RNN, GRU, or LSTM"),
    "sparse": (Sparse, "Attempted to wrap sparse Tensor"),
    "experts": (Experts, "Dynamic shape operator"),
}


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="ort")


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def shard(module: nn.Module) -> nn.Module:
    """Shard a module over the one process that there is."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return torch.distributed.fsdp.fully_shard(module, mesh=mesh)


def line_of(kind: type) -> int:
    """Give the line of this file that a class marks."""
    lines = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return next(i for i in range(first, len(lines)) if lines[i].endswith("# here")) + 1


def told(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [each for each in caught if issubclass(each.category, FallbackWarning)]


def left_out() -> tuple[int, int]:
    counters = torch_ort.counters()
    return counters["frames_left_to_eager"], counters["graph_breaks"]


@pytest.fixture
def lenient(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")


@pytest.mark.parametrize("name", LEFT)
class TestWholeModel:
    def test_one_warning_at_the_users_line(self, name, lenient):
        kind, reason = LEFT[name]
        model = kind()
        run = compiled(model)
        (warning,) = told(lambda: [run(X), run(X), run(X[:4].new_ones(5, 6))])
        assert warning.filename == __file__
        assert warning.lineno == line_of(kind)
        message = str(warning.message)
        where = f"'forward' (test_uncaptured.py:{kind.forward.__code__.co_firstlineno})"
        assert message.startswith(
            f"torch_ort: capture: no graph was captured: all of {where} runs in eager PyTorch, "
            f"because Dynamo cannot capture it: {reason}"
        )
        assert f"(test_uncaptured.py:{line_of(kind)})" in message
        torch.testing.assert_close(run(X), model(X))
        assert left_out() == (1, 0)
        assert torch_ort.counters()["graphs_captured"] == 0

    def test_strict_raises_each_time_it_is_compiled(self, name):
        kind, reason = LEFT[name]
        model = kind()
        for _ in range(2):
            with pytest.raises(torch_ort.Unsupported, match=f"all of 'forward' .*: {reason}"):
                compiled(model)(X)

    def test_explain_lists_it_each_time(self, name):
        kind, reason = LEFT[name]
        model = kind()
        for _ in range(2):
            report = torch_ort.explain(model, X)
            assert report.graphs == []
            (only,) = report.breaks
            assert only.is_whole
            assert only.reason.startswith(reason)
            assert (only.line.path, only.line.number) == (__file__, line_of(kind))
            text = str(report)
            assert "torch_ort: no graph was captured; " in text
            place = f"test_uncaptured.py:{line_of(kind)}: all of {only.function}: {only.reason}"
            assert f"places that Dynamo leaves to eager PyTorch: 1\n  {place}" in text

    def test_other_backends_are_left_alone(self, name):
        model = LEFT[name][0]()
        assert told(lambda: torch.compile(model, backend="eager")(X)) == []
        assert left_out() == (0, 0)


def test_parts_of_a_model(lenient):
    model = Around(Experts())
    run = compiled(model)
    (warning,) = told(lambda: run(X))
    message = str(warning.message)
    assert message.startswith("torch_ort: capture: all of 'forward' (")
    assert "; 1 more place(s) run in eager PyTorch (torch_ort.explain(model, *inputs)" in message
    torch.testing.assert_close(run(X), model(X))
    assert left_out() == (1, 1)
    torch.compiler.reset()
    report = torch_ort.explain(model, X)
    assert [each.is_whole for each in report.breaks] == [False, True]
    assert len(report.graphs) == 2


def test_the_line_of_a_part():
    (warning,) = told(lambda: compiled(Finds())(X))
    assert (warning.filename, warning.lineno) == (__file__, line_of(Finds))
    message = str(warning.message)
    assert "a part of 'forward' " in message
    assert ": Dynamic shape operator" in message
    assert message.endswith("lists every such place)"), "strict mode raises for whole ones"
    assert left_out() == (0, 1)


def test_strict_raises_for_a_whole_part():
    with pytest.raises(torch_ort.Unsupported, match=r"all of 'forward' .*places"):
        compiled(Around(Experts()))(X)


def test_a_break_in_a_later_call(lenient):
    run = compiled(module_with(lambda self, x, is_odd: x[places(x[:, 0])] if is_odd else x * 2))
    assert told(lambda: run(X, False)) == []
    assert len(told(lambda: [run(X, True), run(X, True)])) == 1


def test_a_layer_of_torch_by_itself(lenient):
    run = compiled(nn.LSTM(6, 12, proj_size=6))
    (warning,) = told(lambda: [run(X), run(X)])
    assert (
        "no graph was captured: all of the compiled LSTM runs in eager PyTorch, because Dynamo "
        "cannot capture it: Attempted to wrap RNN"
    ) in str(warning.message)
    assert warning.filename == __file__
    assert left_out() == (1, 0)


def test_strict_raises_for_a_layer_of_torch():
    with pytest.raises(torch_ort.Unsupported, match="Attempted to wrap RNN, GRU, or LSTM"):
        compiled(nn.LSTM(6, 12, proj_size=6))(X)


def asks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@torch.compiler.disable
def outside(x):
    return x + 1


def calls_outside(x):
    return outside(x * 2) * 3


def branches(x):
    y = x * 2
    return y + 1 if y.sum() > 0 else y - 1


def reads(x):
    return x * (x * 2).sum().item()


def prints(x):
    y = x * 2
    print("y", y.shape, y.sum())
    return y + 1


@pytest.mark.parametrize("function", [asks, calls_outside, branches, reads, prints])
@pytest.mark.filterwarnings("ignore:.*Tensor.item")
def test_what_is_meant_is_counted_and_listed_only(function):
    assert told(lambda: compiled(function)(X)) == []
    frames, breaks = left_out()
    assert frames == 0
    assert breaks >= 1
    assert torch_ort.counters()["forward_runs"] == 2
    torch.compiler.reset()
    assert torch_ort.explain(function, X).breaks


def test_how_recurrent_layers_are_captured_is_said(lenient):
    (warning,) = told(lambda: compiled(Recurrent())(X))
    assert "torch._dynamo.config.allow_rnn = True Dynamo captures" in str(warning.message)
    assert hasattr(torch._dynamo.config, "allow_rnn")
    (warning,) = told(lambda: compiled(Sparse())(X))
    assert "allow_rnn" not in str(warning.message)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: None, lambda x: (x, 3)])
def test_nothing_to_do_is_nothing_left_out(function):
    assert told(lambda: compiled(function)(X)) == []
    assert left_out() == (0, 0)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_switched_off_by_the_user(stance):
    run = compiled(Recurrent())
    with torch.compiler.set_stance(stance):
        assert told(lambda: run(X)) == []
    assert left_out() == (0, 0)


def test_an_error_of_the_user_is_all_that_is_said(lenient):
    class Fails(nn.Module):
        def forward(self, x):
            if places(x[:, 0]).numel():
                raise KeyError("mine")
            return x

    def call():
        with pytest.raises(KeyError, match="mine"):
            compiled(Fails())(X)

    assert told(call) == []


def test_a_first_call_that_raises_is_not_the_last_word(lenient):
    class FailsOnce(Recurrent):
        has_failed = False

        def forward(self, x):
            y = super().forward(x)
            if not self.has_failed:
                self.has_failed = True
                raise KeyError("mine")
            return y

    run = compiled(FailsOnce())

    def call():
        with pytest.raises(KeyError, match="mine"):
            run(X)

    assert told(call) == []
    assert len(told(lambda: [run(X), run(X)])) == 1


def test_errors_that_the_user_has_dynamo_suppress(lenient, monkeypatch):
    fails = Mock(side_effect=KeyError("injected by a test"))
    monkeypatch.setattr(first_run, "compile_or_eager", fails)
    with torch._dynamo.config.patch(suppress_errors=True):
        (warning,) = told(lambda: compiled(Finds())(X))
    assert "all of 'forward'" in str(warning.message)
    assert left_out() == (1, 0)


class TestOneContext:
    """Lightning compiles the methods of a LightningModule in one context."""

    def functions(self, model: nn.Module) -> list[Callable]:
        context = compiled(model).dynamo_ctx
        return [
            context(lambda x: model(x).square().mean()),
            context(lambda x: model(x).sum()),
            context(lambda x: model(x).abs().sum() * 2),
        ]

    def test_functions_train(self):
        model = sequence()
        expected = copy.deepcopy(model)
        plain = [
            lambda x: expected(x).square().mean(),
            lambda x: expected(x).sum(),
            lambda x: expected(x).abs().sum() * 2,
        ]
        ours = self.functions(model)
        for _ in range(3):
            for ran, eager in zip(ours, plain, strict=True):
                for run in (ran, eager):
                    run(X).backward()
        for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)
        counters = torch_ort.counters()
        assert counters["forward_runs"] == counters["backward_runs"] == 9
        assert counters["fallbacks"] == counters["calls_left_to_eager"] == 0

    def test_an_error_of_one_leaves_the_others_usable(self, lenient):
        def fails(x):
            raise KeyError("mine")

        context = compiled(sequence()).dynamo_ctx
        bad, good = context(fails), context(lambda x: x * 2)
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                bad(X)
            torch.testing.assert_close(good(X), X * 2)
        assert torch_ort.counters()["forward_runs"] == 2

    def test_each_has_hooks_of_its_own(self, lenient):
        model = Recurrent()
        context = compiled(model).dynamo_ctx
        hooks = [*context.enter_exit_hooks]
        run, left = context(lambda x: x * 2), context(lambda x: model(x))
        assert len(told(lambda: [left(X), run(X), left(X), run(X)])) == 1
        assert context.enter_exit_hooks == hooks
        counters = torch_ort.counters()
        assert (counters["calls_left_to_eager"], counters["forward_runs"]) == (2, 2)

    def test_in_several_threads(self):
        functions = self.functions(sequence())
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(each, X) for each in functions * 3]
        assert all(call.result(60).isfinite() for call in calls)
        assert torch_ort.counters()["calls_left_to_eager"] == 0


def test_backward_hooks_around_a_module_of_torch(lenient):
    model = sequence()
    model.register_full_backward_hook(lambda *args: None)
    report = torch_ort.explain(model, X.clone().requires_grad_())
    (only,) = report.breaks
    text = f"{only}"
    assert text.startswith("test_uncaptured.py:")
    assert "a part of the compiled Sequential: Module-level backwards hooks" in text
    assert "PyTorch's own" not in str(report)
    assert report.counters["calls_left_to_eager"] == 1


class TestTorchsOwnModules:
    """Dynamo looks at no frame of torch.nn, so that nothing of such a module would be captured."""

    def check(self, run: Callable, model: nn.Module) -> None:
        wanted = copy.deepcopy(model)
        x = X.clone().requires_grad_()
        result = run(x)
        result.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(result, wanted(X))
        wanted(X).sum().backward()
        torch.testing.assert_close(gradients, [p.grad for p in wanted.parameters()])
        counters = torch_ort.counters()
        assert (counters["graphs_captured"], counters["forward_runs"]) == (1, 1)
        assert counters["backward_runs"] == 1
        assert counters["fallbacks"] == counters["frames_left_to_eager"] == 0

    def test_compile_in_place(self):
        model = sequence()
        model.compile(backend="ort")
        self.check(model, model)

    def test_compile_in_place_where_another_backend_has_been(self):
        torch.compile(sequence(), backend="eager")(X)
        other = sequence()
        other.compile(backend="eager")
        other(X)
        model = sequence()
        model.compile(backend="ort")
        self.check(model, model)

    def test_many_of_them(self):
        for width in range(2, 14):  # more than Dynamo compiles of one function
            model = nn.Sequential(nn.Linear(6, width), nn.Tanh())
            model.compile(backend="ort")
            model(X)
        counters = torch_ort.counters()
        assert counters["forward_runs"] == 12
        assert counters["captures_refused"] == 0

    @pytest.fixture
    def process_group(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize("in_place", [False, True])
    def test_in_a_distributed_data_parallel(self, in_place, process_group):
        model = sequence()
        parallel = DistributedDataParallel(model)
        if in_place:
            parallel.compile(backend="ort")
            run = parallel
        else:
            run = compiled(parallel)
        self.check(run, model)

    @pytest.mark.parametrize("order", ["compiled_first", "compiled_later", "wrapped_later"])
    def test_sharded(self, order, process_group):
        """The hooks of fully_shard, which Dynamo does not enter, stand around forward."""
        model, expected = sequence(), sequence()
        expected.load_state_dict(model.state_dict())
        if order == "compiled_first":
            model.compile(backend="ort")
        shard(model)
        if order == "compiled_later":
            model.compile(backend="ort")
        run = compiled(model) if order == "wrapped_later" else model
        for _ in range(2):
            run(X).square().sum().backward()
            expected(X).square().sum().backward()
        for ours, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), wanted.grad)
        counters = torch_ort.counters()
        assert (counters["forward_runs"], counters["backward_runs"]) == (2, 2)
        assert counters["fallbacks"] == counters["frames_left_to_eager"] == 0

    def test_sharded_after_a_call(self, process_group):
        model = sequence()
        model.compile(backend="ort")
        model(X)
        shard(model)
        for _ in range(2):
            model(X)
        assert torch_ort.counters()["forward_runs"] == 3

    def test_what_it_calls_is_sharded(self, process_group, lenient):
        model = Around(shard(nn.Linear(6, 6)))
        run = compiled(shard(model))
        (warning,) = told(lambda: [run(X), run(X)])
        message = str(warning.message)
        assert "fully_shard gathers parameters in hooks that Dynamo does not capture" in message
        assert "compile each module that fully_shard is applied to by itself" in message

    def test_what_an_ortmodule_calls_is_sharded(self, process_group, lenient):
        model = torch_ort.ORTModule(Around(shard(nn.Linear(6, 6))))
        (warning,) = told(lambda: [model(X), model(X)])
        words = "module 'inner' has a forward hook, '_pre_forward' of fully_shard, which takes an"
        assert words in str(warning.message)


@pytest.mark.hands_over("the graph has a backward inside")
def test_a_backward_inside_of_a_compiled_step(capfd):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    expected = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected)]

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = torch.compile(step, backend="ort")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [run(model, optimizers[0], X) for _ in range(3)]
    torch.testing.assert_close(losses, [step(expected, optimizers[1], X) for _ in range(3)])
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    out, err = capfd.readouterr()
    said = [str(each.message) for each in caught]
    assert "torch_ort" not in out + err + "".join(
        text for text in said if "runs in eager" not in text
    )
    assert torch_ort.counters()["backward_runs"] == 3
