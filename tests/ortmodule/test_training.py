# Training through an ORTModule against eager PyTorch: what is noticed, and what a graph cannot do.
# What torch.compile has to do as well is in tests/torch_ort/test_semantics_*.py, for both roads.
from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparison import Options, assert_same_runs, build, train
from models import module_with
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import ORTModuleONNXModelException


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 8)


def sentences(step: int) -> torch.Tensor:
    return torch.randn(2, 4 + step, 8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.fixture
def compare(device):
    """Return a function that trains an eager copy and a wrapped copy and compares them."""

    def run(make_model, make_inputs, rtol=None, atol=None, **settings):
        options = Options(**settings)
        eager, ours = (build(make_model, device=device, seed=options.seed) for _ in range(2))
        wrapper = ORTModule(ours)
        want = train(eager, eager, make_inputs, device, options)
        got = train(ours, wrapper, make_inputs, device, options)
        assert_same_runs(want, got, rtol, atol, True)
        counters = torch_ort.counters()
        assert counters["fallbacks"] == 0
        assert counters["forward_runs"] == len(got.records)
        assert counters["backward_runs"] == got.backwards
        return wrapper

    return run


def pair(module: nn.Module) -> tuple[nn.Module, ORTModule]:
    return copy.deepcopy(module), ORTModule(module)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(eager: nn.Module, ours: ORTModule) -> None:
    for name, want in gradients(eager).items():
        got = gradients(ours)[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def step_both(eager: nn.Module, ours: ORTModule, *args: object) -> torch.Tensor:
    """Run both forward and backward on the same numbers and compare; give the engine's output."""
    want, got = eager(*args), ours(*args)
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad
    eager.zero_grad()
    ours.zero_grad()
    if want.requires_grad:
        want.pow(2).sum().backward()
        got.pow(2).sum().backward()
    assert_same_gradients(eager, ours)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    return got


# Whole models.


@pytest.mark.parametrize(("norm_first", "dropout"), [(False, 0.2), (True, 0.0)])
def test_transformer_layers(compare, norm_first, dropout):
    compare(
        lambda: nn.TransformerEncoderLayer(
            8, 2, dim_feedforward=16, dropout=dropout, batch_first=True, norm_first=norm_first
        ),
        sentences,
        rtol=1e-4,
        atol=1e-5,
    )


def test_weights_untied_after_a_step():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).tanh())

    eager, ours = pair(Tied())
    step_both(eager, ours, rows())
    weight = torch.randn(8, 8)
    for model in (eager, ours):
        model.second.weight = nn.Parameter(weight.clone())
    step_both(eager, ours, rows())
    for model in (eager, ours):
        model.first.weight = model.second.weight
    step_both(eager, ours, rows())


@pytest.mark.hands_over("a checkpoint")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_asked", [False, True], ids=["no_gradient_asked", "gradient_asked"])
def test_checkpointed_parts(compare, use_reentrant, is_asked):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.net = nn.Linear(8, 8), mlp()
            self.net.append(nn.Dropout(0.3))

        def forward(self, x):
            first = self.first(x)
            again = first if is_asked else x
            return first.sum() + torch.utils.checkpoint.checkpoint(
                self.net, again, use_reentrant=use_reentrant
            )

    # Larger steps lead where a layer norm divides by next to nothing, and errors of rounding grow.
    compare(
        Checkpointed, lambda step: rows(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        rtol=1e-4, atol=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [3, 0])
def test_calls_with_zeros_in_a_checkpoint_around(rows, monkeypatch):
    """The checkpoint ends its second run by an exception, which is no failure of a first run."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = pair(module_with(lambda self, x, k: self.inner(x) * (k + 1), inner=mlp()))
    x = torch.randn(rows, 8)
    for _ in range(3):
        for model in (eager, ours):
            model.zero_grad()
            y = torch.utils.checkpoint.checkpoint(model, x, 0, use_reentrant=False)
            y.square().sum().backward()
        assert_same_gradients(eager, ours)
    assert torch_ort.counters()["forward_runs"] == 6
    assert torch_ort.counters()["fallbacks"] == 0


# Tensors that hang elsewhere in the module.


class Hanging(nn.Module):
    """Reads tensors of plain attributes, of a list and of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.plain = torch.randn(8)
        self.listed = [torch.randn(8), torch.randn(8)]
        self.named = {"bias": torch.randn(8)}

    def forward(self, x):
        return self.linear(x) * self.plain + self.listed[1] - self.listed[0] * self.named["bias"]


def test_tensors_in_attributes_are_read_at_each_call(graphs_captured):
    eager, ours = pair(Hanging())
    step_both(eager, ours, rows())
    new = torch.randn(4, 8)
    for model in (eager, ours):
        model.plain = new[0]
        model.listed[0] = new[1]
        model.named["bias"] = new[2]
        model.listed[1].fill_(5)
    step_both(eager, ours, rows())
    assert graphs_captured() == 1


def test_tensors_in_attributes_get_gradients():
    eager, ours = pair(Hanging())
    x = rows()
    for model in (eager, ours):
        model.plain.requires_grad_()
        model.listed[0].requires_grad_()
        model.named["bias"].requires_grad_()
        model(x).pow(2).sum().backward()
    torch.testing.assert_close(ours.plain.grad, eager.plain.grad)
    torch.testing.assert_close(ours.listed[0].grad, eager.listed[0].grad)
    torch.testing.assert_close(ours.named["bias"].grad, eager.named["bias"].grad)


def test_tensors_in_attributes_of_another_shape():
    eager, ours = pair(Hanging())
    step_both(eager, ours, rows())
    for value in (torch.randn(1), torch.randn(6, 8), torch.randn(8)):
        eager.plain = ours.plain = value
        step_both(eager, ours, rows())


def test_deeper_tensors_are_right_or_refused(monkeypatch):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.deep = {"a": [torch.ones(8)]}
            self.pair = (torch.ones(8), torch.ones(8))

        def forward(self, x):
            return self.linear(x) * self.deep["a"][0] + self.pair[1]

    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = pair(Deep())
    step_both(eager, ours, rows())
    for model in (eager, ours):
        model.deep["a"][0].fill_(3)
        model.pair[1].fill_(4)
    step_both(eager, ours, rows())
    for model in (eager, ours):
        model.pair = (model.pair[0], torch.full((8,), 6.0))
    step_both(eager, ours, rows())


class Replaces(nn.Module):
    """Hangs new tensors into a buffer and an attribute at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(6, 8))
        self.hidden = None

    def forward(self, x):
        self.hidden = self.linear(x)
        self.last = self.hidden.detach() + self.last.sum()
        return self.hidden * 2


def test_tensors_that_forward_assigns_hang_in_the_module():
    eager, ours = pair(Replaces())
    for _ in range(3):
        step_both(eager, ours, rows())
        torch.testing.assert_close(ours.hidden, eager.hidden)
        assert ours.module.last is dict(ours.named_buffers())["last"]
    assert torch_ort.counters()["backward_runs"] == 3


def test_gradients_flow_through_tensors_that_forward_assigns():
    eager, ours = pair(Replaces())
    x = rows()
    for model in (eager, ours):
        (model(x).sum() + model.hidden.pow(2).sum()).backward()
    assert_same_gradients(eager, ours)


# What changes between calls.


class Configured(nn.Module):
    """Reads attributes of several kinds, of its own and of a sub-module."""

    shared = 1

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Dropout(0.0)
        self.scale, self.name, self.flag = 2, "plus", False
        self.sizes, self.table = [8, 1], {"power": 1}
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.activation = torch.tanh
        self.rate = 0.5
        self.linear.bias = None
        self.register_buffer("mask", None)
        self.factors, self.terms = [torch.full((8,), 2.0)], {"a": torch.ones(8)}

    def forward(self, x):
        y = self.linear(x) * self.scale * self.rate
        y = y + 1 if self.name == "plus" else y - 1
        y = y.abs() if self.flag else y
        y = y.view(-1, *self.sizes).flatten(1) * len(self.sizes)
        y = y * self.table["power"] + getattr(self, "late", 0)
        y = y * self.shared if self.mask is None else y * self.mask
        for factor in self.factors:
            y = y * factor
        for term in self.terms.values():
            y = y + term
        for layer in self.layers:
            y = self.activation(layer(y))
        return y / self.inner.p if self.inner.p else y


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", 3),
        lambda m: setattr(m, "rate", 0.25),
        lambda m: setattr(m, "name", "minus"),
        lambda m: setattr(m, "flag", True),
        lambda m: setattr(m, "sizes", [2, 4]),
        lambda m: m.sizes.append(1),
        lambda m: m.table.update(power=3),
        lambda m: setattr(m, "late", 5),
        lambda m: setattr(m, "activation", torch.relu),
        lambda m: setattr(m.inner, "p", 0.25),
        lambda m: m.layers.append(nn.Linear(8, 8)),
        lambda m: m.layers.__delitem__(1),
        lambda m: m.layers.__setitem__(0, nn.Linear(8, 8, bias=False)),
        lambda m: m.layers.insert(0, nn.Identity()),
        lambda m: setattr(m, "linear", nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        lambda m: m.register_parameter("late", nn.Parameter(torch.ones(8))),
        lambda m: m.register_buffer("late", torch.ones(8)),
        lambda m: setattr(m.linear, "bias", nn.Parameter(torch.ones(8))),
        lambda m: setattr(m, "mask", torch.zeros(8)),
        lambda m: setattr(m, "shared", 7),
        lambda m: setattr(m, "factors", m.factors * 2),
        lambda m: m.factors.pop(),
        lambda m: m.factors.append(torch.full((8,), 4.0)),
        lambda m: m.terms.update(b=torch.full((8,), 4.0)),
    ],
)
def test_changes_between_calls_are_noticed(change, graphs_captured):
    torch.manual_seed(0)
    eager, ours = pair(Configured())
    step_both(eager, ours, rows())
    step_both(eager, ours, rows())
    assert graphs_captured() == 1
    for model in (eager, ours):
        torch.manual_seed(1)
        change(model)
    step_both(eager, ours, rows())
    step_both(eager, ours, rows())
    assert graphs_captured() == 2


def test_going_back_finds_the_first_graph_again(graphs_captured):
    eager, ours = pair(Configured())
    for flag in (False, True, False, True):
        eager.flag = ours.flag = flag
        step_both(eager, ours, rows())
    assert graphs_captured() == 2


def test_attributes_that_forward_does_not_read_may_change(graphs_captured):
    eager, ours = pair(mlp())
    for i in range(3):
        ours.step = i
        step_both(eager, ours, rows())
    assert graphs_captured() == 1


def test_another_forward_is_noticed():
    eager, ours = pair(Configured())
    step_both(eager, ours, rows())
    for model in (eager, ours.module):
        model.linear.forward = lambda x, linear=model.linear: F.linear(x, linear.weight) - 3
    step_both(eager, ours, rows())


def test_recapture_shows_what_is_not_watched(graphs_captured):
    factor = [2.0]

    eager, ours = pair(
        module_with(lambda self, x: self.linear(x) * factor[0], linear=nn.Linear(8, 8))
    )
    step_both(eager, ours, rows())
    factor[0] = 5.0
    ours.recapture()
    step_both(eager, ours, rows())
    assert graphs_captured() == 2


def test_too_many_captures_fall_back_and_say_what_differs(monkeypatch):
    monkeypatch.setattr("torch_ort.ortmodule.calls.MAX_CAPTURES", 2)
    eager, ours = pair(Configured())
    for activation in (torch.tanh, torch.sigmoid):
        eager.activation = ours.activation = activation
        step_both(eager, ours, rows())
    ours.activation = torch.relu
    words = "captured 2 times, .*attribute 'activation' of the module has changed"
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ours(rows())


@pytest.mark.hands_over("there are too many graphs")
def test_after_too_many_captures_there_are_fewer(monkeypatch, graphs_captured):
    """Each time twice as many calls run in PyTorch before the next capture."""
    monkeypatch.setattr("torch_ort.ortmodule.calls.MAX_CAPTURES", 2)
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = pair(Configured())
    captured = []

    def run(i):
        eager.activation = ours.activation = _named(f"activation {i}")
        step_both(eager, ours, rows())
        captured.append(graphs_captured())

    for i in range(2):
        run(i)
    with pytest.warns(FallbackWarning, match="captured 2 times"):
        run(2)
    for i in range(3, 20):  # warned of once: further warnings are errors
        run(i)
    assert [i for i in range(1, 20) if captured[i] > captured[i - 1]] == [1, 4, 9, 18]
    before = torch_ort.counters()["forward_runs"]
    step_both(eager, ours, rows())  # the last activation is that of no graph
    assert torch_ort.counters()["forward_runs"] == before


def _named(name):
    def activation(x):
        return x.tanh()

    activation.__name__ = name
    return activation


# What a graph cannot do.


class Impossible(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.linear, self.inner, self.what = nn.Linear(8, 8), nn.Tanh(), what
        self.count, self.history, self.table = 0, [], {}

    def forward(self, x):
        y = self.linear(x)
        return self.inner(y) * self.what(self)


def append(module):
    module.history.append(1)
    return len(module.history)


def put(module):
    module.table[len(module.table)] = 1
    return len(module.table)


def by_random(module):
    return random.random()


def by_numpy(module):
    return float(np.random.rand())


class Drawing(threading.Thread):
    """Draws numbers of Python and of numpy whenever it is asked to, as threads that load data."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.numbers: list[float] = []
        self._asked, self._done, self._ends = threading.Event(), threading.Event(), False

    def run(self) -> None:
        while self._asked.wait() and not self._ends:
            self._asked.clear()
            self.numbers += [random.random(), float(np.random.rand())]
            self._done.set()

    def draw(self) -> None:
        self._asked.set()
        self._done.wait()
        self._done.clear()

    def end(self) -> None:
        self._ends = True
        self._asked.set()
        self.join()


@pytest.fixture
def drawing_thread() -> Iterator[Drawing]:
    thread = Drawing()
    thread.start()
    yield thread
    thread.end()


def test_numbers_that_other_threads_draw_during_a_capture_stay_drawn(drawing_thread):
    def forward(self, x):
        drawing_thread.draw()
        return self.inner(x)

    ours = ORTModule(module_with(forward, inner=mlp()))
    x = rows()
    for _ in range(2):
        torch.testing.assert_close(ours(x), ours.module.inner(x))
    numbers = drawing_thread.numbers
    assert len({*numbers}) == len(numbers) > 0
    assert torch_ort.counters()["forward_runs"] == 2
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("nothing can capture the model")
@pytest.mark.parametrize("lives", [False, True], ids=["alone", "beside a thread"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (append, "forward assigns 'history' of the module, which a captured graph cannot do"),
        (put, "forward assigns 'table' of the module"),
        (by_random, "forward draws from Python's random, whose numbers"),
        (by_numpy, r"forward draws from numpy\.random, whose numbers"),
    ],
)
def test_what_forward_changes_falls_back_by_name(what, words, lives, monkeypatch, request):
    if lives:
        request.getfixturevalue("drawing_thread")
    with pytest.raises(ORTModuleONNXModelException, match=words):
        ORTModule(Impossible(what))(rows())
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager, ours = pair(Impossible(what))
    x = rows()
    state = random.getstate(), np.random.get_state()
    want = [eager(x) for _ in range(3)]
    random.setstate(state[0])
    np.random.set_state(state[1])
    with pytest.warns(FallbackWarning, match=f"ORTModuleONNXModelException: .*{words}") as caught:
        got = [ours(x) for _ in range(3)]
    # The trial at capturing has left nothing behind.
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert (ours.count, ours.history, ours.table) == (eager.count, eager.history, eager.table)
    assert len([w for w in caught if w.category is FallbackWarning]) == 1
    assert torch_ort.counters()["fallbacks_capture"] == 1
    sum(got).sum().backward()
    sum(want).sum().backward()
    assert_same_gradients(eager, ours)


def test_a_counter_that_the_first_call_makes_is_counted_in():
    def count(module):
        module.inner.calls = getattr(module.inner, "calls", 0) + 1
        return module.inner.calls

    eager, ours = pair(Impossible(count))
    for call in range(1, 6):
        step_both(eager, ours, rows())
        assert ours.inner.calls == eager.inner.calls == call
    assert torch_ort.counters()["forward_runs"] >= 3


def test_a_flag_that_the_first_call_sets_is_allowed(graphs_captured):
    def forward(self, x):
        self.is_started = True
        return self.linear(x)

    eager, ours = pair(module_with(forward, linear=nn.Linear(8, 8), is_started=False))
    for _ in range(3):
        step_both(eager, ours, rows())
        assert ours.is_started
    assert graphs_captured() == 1


def test_a_parameter_is_resized_while_it_has_a_gradient(graphs_captured):
    """A vocabulary that grows: the old gradient stays until the loop clears it."""
    eager, ours = pair(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6)))
    ids = torch.tensor([1, 2])
    ours(ids).sum().backward()
    eager(ids).sum().backward()
    wider = torch.randn(9, 4)
    for model in (eager, ours.module):
        model[0].weight.data = wider.clone()
    ids = torch.tensor([1, 8])
    torch.testing.assert_close(ours(ids), eager(ids))
    assert ours.module[0].weight.grad.shape == (5, 4)
    for model in (eager, ours):
        model.zero_grad()
        model(ids).sum().backward()
    assert_same_gradients(eager, ours)
    assert graphs_captured() == 2
