"""Every way past the engine shows in the counters, and in strict mode raises unless asked for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.utils.flop_counter import FlopCounterMode

import torch_ort
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleFallbackException
from torch_ort.pytorch.versions import is_within

pytestmark = pytest.mark.ort_only

X = torch.randn(5, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 12, proj_size=6)

    def forward(self, x):
        return self.layer(x)[0]


class Branches(nn.Module):
    """What neither a graph nor, as it has no larger parts, a part of it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y * 3


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def compiled(target: Any, **settings: Any) -> Any:
    return torch.compile(target, backend="ort", **settings)


def watch(*args: Any) -> None:
    """Be a hook that does nothing."""


def with_hook(kind: str, module: nn.Module) -> nn.Module:
    getattr(module, f"register_{kind}")(watch)
    return module


def as_method(module: nn.Module, decorate: Callable) -> nn.Module:
    module.forward = decorate(module.forward)
    return module


def assigned(module: Any, function: Callable) -> Any:
    module.forward = function
    return module


def shapes_alone(module: Any) -> Callable:
    """Call a module with tensors that have no data."""

    def call(x):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return module(mode.from_tensor(x))

    return call


def with_tangents(function: Callable) -> Callable:
    def call(x):
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(x, x))

    return call


def called_by(caller: Callable[[Callable, torch.Tensor], Any], function: Callable) -> Callable:
    return lambda x: caller(function, x)


def inside(context: Callable[[], AbstractContextManager], function: Callable) -> Callable:
    def call(x):
        with context():
            return function(x)

    return call


@torch.compiler.disable
def outside(x):
    return x * 2


def generated(x):
    yield x * 2


class Says(NamedTuple):
    """What two calls leave behind."""

    left: int  # calls_left_to_eager
    others: Mapping[str, int]  # of the other counters of this kind, those that are not 0
    words: str = ""  # of the only warning; empty: there is none
    is_asked_for: bool = False  # so that it is no error in strict mode


def captured_nothing(what: str, why: str, **counters: int) -> Says:
    words = f"no graph was captured: {what} runs in eager PyTorch, because Dynamo cannot capture it"
    return Says(2, counters or {"frames_left_to_eager": 1}, f"{words}: {why}")


RAN = Says(0, {}, is_asked_for=True)
ASKED = Says(2, {}, is_asked_for=True)
HOOKS = captured_nothing(
    "all of the compiled Sequential", "Module-level backwards hooks", graph_breaks=1
)
NOT_CALLING = "is its forward now, and does not call the compiled one"
# Of a transform of torch.func Dynamo looks at the function, and leaves it out.
TRANSFORMED = Says(2, {"frames_left_to_eager": 1}, is_asked_for=True)
TANGENTS = (
    Says(2, {"frames_left_to_eager": 2}, "a forward-mode AD tangent")
    if is_within("2.14", "")  # Dynamo itself looks for tangents, in each call
    else Says(2, {"fallbacks": 1}, "forward-mode AD")
)

COMPILED: dict[str, tuple[Callable[[], Callable], Says]] = {
    "a module": (lambda: compiled(Net()), RAN),
    "all in one graph": (lambda: compiled(Net(), fullgraph=True), RAN),
    "no operations": (lambda: compiled(lambda x: x), RAN),
    "a module without operations": (lambda: compiled(nn.Identity()), RAN),
    "no tensors": (lambda: lambda x: compiled(lambda n: n * 2)(3), RAN),
    "forward hook": (lambda: compiled(with_hook("forward_hook", sequence())), RAN),
    "forward pre-hook": (lambda: compiled(with_hook("forward_pre_hook", sequence())), RAN),
    "full backward hook": (lambda: compiled(with_hook("full_backward_hook", sequence())), HOOKS),
    "full backward pre-hook": (lambda: compiled(with_hook("full_backward_pre_hook", sequence())),
        HOOKS),
    "full backward hook of a user's module": (lambda: compiled(with_hook("full_backward_hook",
        Net())), RAN),
    "full backward hook around a user's module": (lambda: compiled(with_hook("full_backward_hook",
        nn.Sequential(Net(), nn.Linear(3, 3)))),
        Says(0, {"graph_breaks": 1}, "a part of the compiled Sequential", is_asked_for=True)),
    "a module that Dynamo cannot capture": (lambda: compiled(Recurrent()),
        Says(2, {"frames_left_to_eager": 1}, "Attempted to wrap RNN")),
    "a layer that Dynamo cannot capture": (lambda: compiled(nn.LSTM(6, 12, proj_size=6)),
        captured_nothing("all of the compiled LSTM", "Attempted to wrap RNN")),
    "disabled inside": (lambda: compiled(lambda x: outside(x)),
        Says(2, {"graph_breaks": 1}, is_asked_for=True)),
    "disabled forward": (lambda: compiled(as_method(Net(), torch.compiler.disable)), ASKED),
    "disabled around": (lambda: torch.compiler.disable(compiled(Net()).__call__), RAN),
    "stance force_eager": (lambda: inside(lambda: torch.compiler.set_stance("force_eager"),
        compiled(Net())), ASKED),
    "stance eager_on_recompile": (
        lambda: inside(lambda: torch.compiler.set_stance("eager_on_recompile"), compiled(Net())),
        ASKED,
    ),
    "Dynamo disabled": (lambda: inside(lambda: torch._dynamo.config.patch(disable=True),
        compiled(Net())), ASKED),
    "nested": (lambda: compiled(compiled(Net()).forward), RAN),
    "in a graph of another backend": (
        lambda: torch.compile(
            called_by(lambda run, x: run(x) * 2, compiled(Net())), backend="eager"
        ),
        RAN,  # it is never called: Dynamo looks through it
    ),
    "DataParallel": (lambda: compiled(nn.DataParallel(Net())), RAN),
    "vmap": (lambda: torch.vmap(compiled(lambda x: x * 2)), TRANSFORMED),
    "functorch's grad": (lambda: torch.func.grad(compiled(lambda x: x.sum() * 2)), TRANSFORMED),
    "forward-mode AD": (lambda: with_tangents(compiled(lambda x: x * 2)), TANGENTS),
    "a mode that sees operators": (lambda: inside(lambda: FlopCounterMode(display=False),
        compiled(Net())), ASKED),
    "tensors without data": (lambda: shapes_alone(compiled(Net())),
        Says(2, {"fallbacks": 1}, "an input is a FakeTensor, which has no data")),
    "a generator": (lambda: called_by(lambda run, x: [*run(x)], compiled(generated)),
        Says(2, {"frames_left_to_eager": 1}, is_asked_for=True)),
    "another forward of the module": (lambda: compiled(as_method(Net(), lambda f: f)), RAN),
    "another forward of what is compiled": (lambda: assigned(compiled(Net()), lambda x: x * 2),
        Says(2, {}, NOT_CALLING)),
    "a forward around what is compiled": (lambda: as_method(compiled(Net()),
        lambda run: lambda x: run(x) * 2), RAN),
}  # fmt: skip

LEFT = (
    "fallbacks",
    "frames_left_to_eager",
    "graph_breaks",
    "captures_refused",
    "calls_left_to_eager",
)


def left() -> dict[str, int]:
    """Give the counters that are 0 where the engine has run all, without those that are."""
    counters = torch_ort.counters()
    # Each graph falls back once, and Dynamo may capture a function again between two calls, for a
    # state of the process that it compares, such as the number of threads.
    again = max(0, dynamo_counters["stats"]["unique_graphs"] - 1)
    counters["fallbacks"] -= min(again, max(0, counters["fallbacks"] - 1))
    return {name: counters[name] for name in LEFT if counters[name]}


def wanted(says: Says) -> dict[str, int]:
    return dict(says.others) | ({"calls_left_to_eager": says.left} if says.left else {})


def call_twice(make: Callable[[], Callable]) -> list[str]:
    """Give the warnings of two calls, and of making what is called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = make()
        for _ in range(2):
            call(X.clone().requires_grad_())
    of_ours = [each for each in caught if issubclass(each.category, FallbackWarning)]
    assert {each.filename for each in of_ours} <= {__file__}
    return [str(each.message) for each in of_ours]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", COMPILED)
class TestCompiledFunctions:
    def test_counters_and_warning(self, way, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        make, says = COMPILED[way]
        said = call_twice(make)
        assert left() == wanted(says)
        # A graph that Dynamo captures again says the same again.
        assert len(set(said)) == bool(says.words)
        assert says.words in "".join(said)

    def test_strict_mode_raises_each_time_unless_asked_for(self, way):
        make, says = COMPILED[way]
        run = make()
        for _ in range(2):
            raises = nullcontext()
            if not says.is_asked_for:
                why = says.words.rpartition(": ")[2]
                raises = pytest.raises(torch_ort.Unsupported, match=why.replace("(", r"\("))
            with raises:
                run(X.clone().requires_grad_())


def test_hooks_of_all_modules(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    run = compiled(sequence())
    handle = register_module_full_backward_hook(watch)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        (said,) = call_twice(lambda: run)
    assert "Module-level backwards hooks" in said
    assert "take the backward hooks off" in said
    assert left() == {"graph_breaks": 1, "calls_left_to_eager": 2}


def test_a_hook_that_comes_later_is_told_and_refused(monkeypatch):
    model = sequence()
    run = compiled(model)
    run(X)
    handle = model.register_full_backward_hook(watch)
    for _ in range(2):
        with pytest.raises(torch_ort.Unsupported, match="Module-level backwards hooks"):
            run(X.clone().requires_grad_())
    handle.remove()
    run(X)
    assert torch_ort.counters()["forward_runs"] == 2


def test_errors_that_the_user_has_dynamo_suppress(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with torch._dynamo.config.patch(suppress_errors=True):
        call_twice(lambda: compiled(Recurrent()))
    assert left() == {"frames_left_to_eager": 1, "calls_left_to_eager": 2}


def test_calls_after_the_recompile_limit(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    run = compiled(lambda x: x * 2)
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(X)
        for _ in range(3):
            run(X.double())
        run(X)
    assert left() == {"captures_refused": 1, "calls_left_to_eager": 3}


def test_the_first_call_by_stance_is_eager_and_later_ones_are_not():
    run = compiled(Net())
    with torch.compiler.set_stance("eager_then_compile"):
        for _ in range(3):
            run(X)
    assert left() == {"calls_left_to_eager": 1}
    assert torch_ort.counters()["forward_runs"] == 2


def test_a_graph_that_has_failed_is_counted_at_each_call(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    rows = [torch.randn(2, 3), torch.randn(3, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    run = compiled(lambda x: x * 2)
    with pytest.warns(FallbackWarning, match="got a nested tensor"):
        run(nested)
    run(nested)
    assert left() == {"fallbacks": 1, "calls_left_to_eager": 2}


# ---- ORTModule


def wrap(module: nn.Module) -> torch_ort.ORTModule:
    return torch_ort.ORTModule(module)


def with_in_dict(name: str, function: Callable, module: torch_ort.ORTModule) -> Callable:
    vars(module)[name] = function
    return module


REFUSED = "plain PyTorch (set ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE to get an error instead)"
WRAPPED: dict[str, tuple[Callable[[], Callable], Says]] = {
    "a module": (lambda: wrap(Net()), RAN),
    "its forward": (lambda: wrap(Net()).forward, RAN),
    "no operations": (lambda: wrap(nn.Identity()), RAN),
    "a forward hook that computes": (lambda: wrap(with_hook("forward_hook", Net())), RAN),
    "a hook of the wrapper": (lambda: with_hook("forward_hook", wrap(Net())), RAN),
    "a backward hook": (lambda: wrap(with_hook("full_backward_hook", Net())),
        Says(2, {"fallbacks": 1}, "has backward hooks")),
    "a branch on data": (lambda: wrap(Branches()), Says(2, {"fallbacks": 1}, "data-dependent")),
    "DataParallel": (lambda: wrap(nn.DataParallel(Net())),
        Says(2, {"fallbacks": 1}, "not compatible with torch.nn.DataParallel")),
    "forward-mode AD": (lambda: with_tangents(wrap(Net())),
        Says(2, {"fallbacks": 1}, "forward-mode AD")),
    "tensors without data": (lambda: shapes_alone(wrap(Net())),
        Says(2, {"fallbacks": 1}, "got the tensor subclass FakeTensor")),
    "vmap": (lambda: torch.vmap(wrap(Net())), ASKED),
    "functorch's jvp": (lambda: called_by(lambda run, x: torch.func.jvp(run, (x, ), (x, )),
        wrap(Net())), ASKED),
    "jit.trace": (lambda: called_by(lambda run, x: torch.jit.trace(run, x, check_trace=False),
        wrap(Net())), ASKED),
    "in a graph of another backend": (lambda: torch.compile(wrap(Net()), backend="eager"), RAN),
    "a function assigned to forward": (lambda: assigned(wrap(Net()), lambda x: x * 2), RAN),
    "a function around forward": (lambda: as_method(wrap(Net()), lambda run: lambda x: run(x) * 2),
        RAN),
    "a function that holds forward and does not call it": (
        lambda: as_method(wrap(Net()), lambda run: lambda x, unused=run: x * 2),
        Says(1, {}, is_asked_for=True),  # from then on it is captured
    ),
    "forward in its dict": (lambda: with_in_dict("forward", lambda x: x * 2, wrap(Net())),
        Says(1, {}, is_asked_for=True)),
    "_call_impl": (lambda: with_call(wrap(Net())), RAN),
    "_call_impl in its dict": (lambda: with_in_dict("_call_impl", lambda x: x * 2, wrap(Net())),
        Says(2, {}, "nothing of this call ran in the engine: it did not come to the module's")),
}  # fmt: skip


def with_call(module: torch_ort.ORTModule) -> torch_ort.ORTModule:
    module._call_impl = lambda x, run=module.module._call_impl: run(x) * 2
    return module


HANDED_OVER = {"a branch on data": pytest.mark.hands_over("Python asks for a number")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=HANDED_OVER.get(way, ())) for way in WRAPPED]
)
class TestORTModules:
    def test_counters_and_warning(self, way, monkeypatch):
        monkeypatch.setenv("TORCH_ORT_STRICT", "0")
        make, says = WRAPPED[way]
        said = call_twice(make)
        assert left() == wanted(says)
        assert len(said) == bool(says.words)
        assert says.words in "".join(said)
        assert all(each.endswith(REFUSED) for each in said)

    def test_strict_mode_raises_each_time_unless_asked_for(self, way):
        make, says = WRAPPED[way]
        if way == "DataParallel":  # refused as it is wrapped
            with pytest.raises(ORTModuleFallbackException, match=says.words):
                make()
            return
        run = make()
        for _ in range(2):
            raises = nullcontext()
            if not says.is_asked_for:
                raises = pytest.raises(ORTModuleFallbackException, match=says.words)
            with raises:
                run(X.clone().requires_grad_())


def test_hooks_of_all_modules_on_an_ortmodule(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = wrap(Net())
    handle = register_module_forward_hook(watch)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        (said,) = call_twice(lambda: model)
    assert "a hook for all modules is registered" in said
    assert left() == {"fallbacks": 1, "calls_left_to_eager": 2}
    torch_ort.reset_counters()
    assert call_twice(lambda: model) == []
    assert left() == {}


def test_runs_of_other_threads_are_not_taken_for_the_own(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    other = wrap(Net())

    def run_in_thread(*args: Any) -> None:
        thread = threading.Thread(target=other, args=(X,))
        thread.start()
        thread.join()

    model = Net()
    model.register_forward_hook(run_in_thread)
    with pytest.warns(FallbackWarning, match="has a forward hook"):
        wrap(model)(X)
    assert torch_ort.counters()["forward_runs"] == 1
    assert left() == {"fallbacks": 1, "calls_left_to_eager": 1}
