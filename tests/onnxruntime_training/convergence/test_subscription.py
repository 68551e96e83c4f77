"""What subscribers see of a run in eager, and that a run of captured graphs shows the same."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ort
from torch_ort.convergence import GlobalSubscriberManager, SubscriberBase, inspect_activation
from torch_ort.fallback import FallbackWarning
from torch_ort.ortmodule import HierarchicalORTModule

pytestmark = pytest.mark.ort_only

Both = namedtuple("Both", "first second")


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Repeated(nn.Module):
    """Calls one module several times."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return x


class Outputs(nn.Module):
    """Returns what `make` makes of a tensor."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Nested(nn.Module):
    """Has a module with a given kind of result."""

    def __init__(self, make, take):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.part = Outputs(make)
        self.take = take

    def forward(self, x):
        return self.take(self.part(self.layer(x)))


class Unused(nn.Module):
    """Calls a module whose result nobody reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.side = nn.Linear(4, 2)

    def forward(self, x):
        x = self.layer(x)
        self.side(x)
        return x


class Checkpointed(nn.Module):
    """Runs blocks again in backward."""

    def __init__(self, reentrant, shared=False):
        super().__init__()
        block = perceptron()
        self.blocks = nn.ModuleList([block, block if shared else perceptron()])
        self.first = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Inspected(nn.Module):
    """Shows tensors of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = inspect_activation("before/layer", x * 2)
        return inspect_activation("after", self.layer(x)).relu()


@dataclass
class Answer(OrderedDict):
    """An output as transformers has them."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("logits", "hidden"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))


def run(way, model, recorder, steps=3, subscribe=True):
    """Train a model for some steps; give what a subscriber saw, and the model's last gradients."""
    torch.manual_seed(7)
    seen = recorder()
    if subscribe:
        GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        result = wrapped(torch.randn(2, 4))
        result.square().sum().backward()
        optimizer.step()
    GlobalSubscriberManager.unsubscribe()
    return seen


def make_twice(make):
    torch.manual_seed(3)
    first = make()
    return first, copy.deepcopy(first)


def assert_near(got, want, key):
    near = {"rtol": 1e-5, "atol": 1e-4} if want.dtype == torch.float32 else {}
    torch.testing.assert_close(got, want, **near, msg=lambda text: f"{key}: {text}")


def assert_same_rows(want, got, in_order=True):
    order = (
        (lambda rows: rows) if in_order else (lambda rows: sorted(rows, key=lambda r: r.key[:3]))
    )
    want, got = order(want.rows), order(got.rows)
    assert [row.key for row in got] == [row.key for row in want]
    for a, b in zip(want, got, strict=True):
        assert_near(b.tensor, a.tensor, a.key)


def assert_same_state(want, got):
    for (key, a), b in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        assert_near(b, a, key)


MODELS = {
    "perceptron": perceptron,
    "repeated": Repeated,
    "unused": Unused,
    "inspected": Inspected,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)),
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "identity": lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
    "frozen part": lambda: nn.Sequential(
        nn.Linear(4, 4).eval().requires_grad_(False), perceptron()
    ),
    "tuple": lambda: Nested(lambda x: (x.sin(), x.cos()), lambda r: r[0] + r[1]),
    "named tuple": lambda: Nested(lambda x: Both(x.sin(), x.cos()), lambda r: r.first + r.second),
    "result of max": lambda: Nested(lambda x: x.max(-1), lambda r: r.values),
    "dict": lambda: Nested(lambda x: {"a b": x.sin(), 3: x.cos()}, lambda r: r["a b"] + r[3]),
    "ordered dict": lambda: Nested(
        lambda x: OrderedDict(a=x.sin(), b=x.cos()), lambda r: r["a"] + r["b"]
    ),
    "nested": lambda: Nested(
        lambda x: [{"a": (x.sin(), 3, None)}, "text", x.cos()], lambda r: r[0]["a"][0] + r[2]
    ),
    "no tensor": lambda: Nested(lambda x: (None, x), lambda r: r[1]),
    "without gradient": lambda: Nested(
        lambda x: (x.argmax(-1), x > 0, x.detach() * 2, x.sin()), lambda r: r[3] * r[2]
    ),
    "empty": lambda: Nested(lambda x: (x[:0], x.sin()), lambda r: r[1] + r[0].sum()),
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "shared checkpoint": lambda: Checkpointed(reentrant=False, shared=True),
}


def may_hand_over(name: str) -> Any:
    """Mark models with a checkpoint, which the recorder leaves to AOTAutograd."""
    marks = [pytest.mark.hands_over("a checkpoint")] if "checkpoint" in name else []
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", map(may_hand_over, MODELS))
def test_graphs_show_what_eager_shows(name, graph_way, ways, recorder, assert_engine_ran):
    ours, eager = make_twice(MODELS[name])
    plain = copy.deepcopy(eager)
    want = run(ways["eager"], eager, recorder)
    got = run(graph_way, ours, recorder)
    run(ways["eager"], plain, recorder, subscribe=False)
    assert_same_state(plain, eager)
    assert_same_state(plain, ours)
    assert {row.step for row in want.rows} == {0, 1, 2}
    # Gradients that do not depend on each other may come in another order.
    assert_same_rows(want, got, in_order=False)
    assert got.keys("forward") == want.keys("forward")
    assert_engine_ran(backward=True)


def test_names_depths_and_order(way, recorder):
    seen = run(way, perceptron(), recorder, steps=1)
    inner = [f"Sequential.{i}" for i in range(3)]
    assert seen.names("forward") == [*inner, "Sequential"]
    assert seen.names("backward") == ["Sequential", *reversed(inner)]
    assert {row.name: row.depth for row in seen.rows} == {
        "Sequential": 0, **dict.fromkeys(inner, 1)
    }  # fmt: skip


def test_gradients_are_those_of_the_activations(way, recorder):
    model = perceptron()
    seen = run(way, model, recorder, steps=1)
    rows = {(row.direction, row.name): row.tensor for row in seen.rows}
    torch.testing.assert_close(rows["backward", "Sequential"], 2 * rows["forward", "Sequential"])
    hidden = rows["forward", "Sequential.1"]
    torch.testing.assert_close(
        rows["backward", "Sequential.0"], rows["backward", "Sequential.1"] * (hidden > 0)
    )


def test_calls_of_one_module_are_numbered(way, recorder):
    seen = run(way, Repeated(), recorder, steps=2)
    layers = ["Repeated.layer", "Repeated.layer@1", "Repeated.layer@2"]
    for step in range(2):
        assert seen.names("forward", step) == [*layers, "Repeated"]
        assert seen.names("backward", step) == ["Repeated", *reversed(layers)]


def test_tensors_in_containers_are_named_by_position(way, recorder):
    seen = run(way, MODELS["nested"](), recorder, steps=1)
    assert seen.names("forward") == [
        "Nested.layer", "Nested.part-0-a-0", "Nested.part-2", "Nested"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [UserDict, Answer], ids=["UserDict", "Answer"])
def test_other_mappings_stay_what_they_are(kind, ways, recorder):
    def make(x):
        return UserDict(logits=x.sin(), rest=3) if kind is UserDict else Answer(x.sin())

    taken = []

    def take(result):
        taken.append(type(result))
        return result["logits"]

    eager, ours = make_twice(lambda: Nested(make, take))
    want = run(ways["eager"], eager, recorder)
    got = run(ways["ortmodule"], ours, recorder)
    assert set(taken) == {kind}
    assert "Nested.part-logits" in want.names("forward")
    assert_same_rows(want, got)


def test_no_gradient_is_shown_of_what_requires_none(way, recorder):
    seen = run(way, MODELS["without gradient"](), recorder, steps=1)
    parts = [f"Nested.part-{i}" for i in range(4)]
    assert [name for name in seen.names("forward") if "part" in name] == parts
    assert [name for name in seen.names("backward") if "part" in name] == parts[3:]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_shows_each_activation_once(reentrant, ways, recorder):
    torch.manual_seed(3)
    seen = run(ways["eager"], Checkpointed(reentrant), recorder)
    model = Checkpointed(reentrant)
    names = {f"Checkpointed.{path}".rstrip(".") for path, part in model.named_modules()
             if not isinstance(part, nn.ModuleList)}  # fmt: skip
    for step in range(3):
        for direction in ("forward", "backward"):
            assert sorted(seen.names(direction, step)) == sorted(names)


@pytest.mark.hands_over("a checkpoint")
@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_a_reentrant_checkpoint_in_a_graph(road, ways, recorder, assert_engine_ran):
    ours, eager = make_twice(lambda: Checkpointed(reentrant=True))
    want = run(ways["eager"], eager, recorder)
    got = run(ways[road], ours, recorder)
    assert_same_rows(want, got, in_order=False)
    assert_engine_ran(backward=True)


@pytest.mark.xfail(
    strict=True,
    reason="regions run again from the last to the first, and nothing tells which one it is",
)
def test_a_reentrant_checkpoint_numbers_the_gradients_of_a_shared_module(ways, recorder):
    models = make_twice(lambda: Checkpointed(reentrant=True, shared=True))
    models[1].reentrant = False
    got, want = (run(ways["eager"], model, recorder, steps=1) for model in models)
    assert_same_rows(want, got, in_order=False)


@pytest.mark.xfail(
    strict=True, reason="in eager a call inside of backward looks like any other call of the model"
)
def test_a_checkpoint_around_the_model_is_one_step(recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    for _ in range(2):
        checkpoint(model, torch.randn(2, 4), use_reentrant=False).sum().backward()
    assert {row.step for row in seen.rows} == {0, 1}


# Steps.


def test_neither_evaluation_nor_no_grad_is_shown(way, recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped, x = way(model), torch.randn(2, 4)
    wrapped(x).sum().backward()
    first = len(seen.rows)
    with torch.no_grad():
        wrapped(x)
    model.eval()
    wrapped(x)
    wrapped(x).sum().backward()
    assert len(seen.rows) == first
    model.train()
    wrapped(x).sum().backward()
    assert {row.step for row in seen.rows[first:]} == {1}
    assert len(seen.rows) == 2 * first


def test_steps_are_chosen(way, recorder):
    model, late, two = perceptron(), recorder(start_step=2), recorder(1, 3)
    GlobalSubscriberManager.subscribe(model, [late, two])
    wrapped = way(model)
    for _ in range(4):
        wrapped(torch.randn(2, 4)).sum().backward()
    assert sorted({row.step for row in late.rows}) == [2, 3]
    assert sorted({row.step for row in two.rows}) == [1, 2]


def test_a_step_without_backward_counts(way, recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    wrapped(torch.randn(2, 4))
    wrapped(torch.randn(2, 4)).sum().backward()
    assert {row.step for row in seen.rows if row.direction == "forward"} == {0, 1}
    assert {row.step for row in seen.rows if row.direction == "backward"} == {1}


def test_backwards_after_several_forwards_belong_to_their_own(way, recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    results = [wrapped(torch.randn(2, 4)) for _ in range(3)]
    for factor, result in zip((10, 20, 30), results, strict=True):
        (factor * result).sum().backward()
    gradients = {row.step: row.tensor for row in seen.rows
                 if row.direction == "backward" and row.depth == 0}  # fmt: skip
    assert {step: grad.unique().tolist() for step, grad in gradients.items()} == {
        0: [10], 1: [20], 2: [30]
    }  # fmt: skip


def test_other_batch_sizes_run_the_same_graph(graph_way, recorder, graphs_captured):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = graph_way(model)
    for rows in (2, 3, 5, 7):
        wrapped(torch.randn(rows, 4)).sum().backward()
    shapes = [row.tensor.shape[0] for row in seen.rows if row.depth == 0]
    assert shapes == [2, 2, 3, 3, 5, 5, 7, 7]
    assert graphs_captured() <= 2


def test_a_part_called_alone_is_not_shown(way, recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    wrapped(torch.randn(2, 4)).sum().backward()
    count = len(seen.rows)
    model[0](torch.randn(2, 4))
    assert len(seen.rows) == count


def test_a_call_that_fails_is_repeated_under_its_step(ways, recorder):
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = self.layer(x)
            if fails:
                raise KeyError("moody")
            return x

    model, seen, fails = Moody(), recorder(), True
    GlobalSubscriberManager.subscribe(model, [seen])
    with pytest.raises(KeyError, match="moody"):
        model(torch.randn(2, 4))
    fails = False
    model(torch.randn(2, 4)).sum().backward()
    assert seen.names("forward") == ["Moody.layer", "Moody.layer", "Moody"]
    assert {row.step for row in seen.rows} == {0}


class Complaining(SubscriberBase):
    """Raises at the first activation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def forward_activation(self, name, tensor, step, depth):
        self.names.append((name, step))
        if len(self.names) == 2:
            raise OSError("no space left")


def test_an_error_of_a_subscriber_comes_out_of_the_call(ways):
    model = perceptron()
    GlobalSubscriberManager.subscribe(model, [Complaining()])
    with pytest.raises(OSError, match="no space left"):
        model(torch.randn(2, 4))


def test_a_graph_that_fails_at_first_shows_its_step_in_eager(ways, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model, seen = perceptron(), Complaining()
    GlobalSubscriberManager.subscribe(model, [seen])
    with pytest.warns(FallbackWarning):
        torch_ort.ORTModule(model)(torch.randn(2, 4))
    inner = [(f"Sequential.{i}", 0) for i in range(3)]
    assert seen.names == [*inner[:2], *inner, ("Sequential", 0)]


class Deciding(nn.Module):
    """Asks for the numbers of its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 1e9 else self.layer(-x)


def test_a_recurrent_layer(ways, recorder):
    ours, eager = make_twice(lambda: Nested(nn.LSTM(4, 4), lambda r: r[0] + r[1][0]))
    want = run(ways["eager"], eager, recorder)
    assert_same_rows(want, run(ways["ortmodule"], ours, recorder))
    assert torch_ort.counters()["backward_runs"] > 0


@pytest.mark.hands_over("nothing can capture the model")
def test_a_model_that_falls_back_is_shown_all_the_same(ways, recorder, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours, eager = make_twice(Deciding)
    want = run(ways["eager"], eager, recorder)
    with pytest.warns(FallbackWarning):
        got = run(ways["ortmodule"], ours, recorder)
    assert_same_rows(want, got)


def test_a_model_in_several_graphs(ways, recorder, assert_engine_ran):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x.sin())

    ours, eager = make_twice(Broken)
    want = run(ways["eager"], eager, recorder)
    got = run(lambda model: torch.compile(model, backend="ort"), ours, recorder)
    assert_same_rows(want, got)
    assert_engine_ran(backward=True)


def test_a_model_taken_apart(ways, recorder):
    ours, eager = make_twice(lambda: nn.Sequential(perceptron(), Repeated()))
    want = run(ways["eager"], eager, recorder)
    got = run(HierarchicalORTModule, ours, recorder)
    assert_same_rows(want, got)


# Several models and subscribers.


def test_two_models_that_train_each_other(way, recorder):
    torch.manual_seed(0)
    generator, critic, seen = perceptron(), Repeated(), recorder()
    GlobalSubscriberManager.subscribe(generator, [seen])
    GlobalSubscriberManager.subscribe(critic, [seen])
    make, judge = way(generator), way(critic)
    for _ in range(2):
        made = make(torch.randn(2, 4))
        judge(made.detach()).sum().backward()
        judge(made).sum().backward()
    steps = {root: [row.step for row in seen.rows
                    if row.name == root and row.direction == "forward"]
             for root in ("Sequential", "Repeated")}  # fmt: skip
    assert steps == {"Sequential": [0, 1], "Repeated": [0, 1, 2, 3]}
    backward = [(row.name, row.step) for row in seen.rows
                if row.direction == "backward" and row.depth == 0]  # fmt: skip
    assert backward == [
        ("Repeated", 0), ("Repeated", 1), ("Sequential", 0),
        ("Repeated", 2), ("Repeated", 3), ("Sequential", 1),
    ]  # fmt: skip


def test_models_of_one_class_stay_apart(recorder):
    models, shared, own = [perceptron() for _ in range(3)], recorder(), recorder()
    for model in models[:2]:
        GlobalSubscriberManager.subscribe(model, [shared])
    GlobalSubscriberManager.subscribe(models[2], [own])
    for model in models:
        model(torch.randn(2, 4))
    assert [row.name for row in shared.rows if row.depth == 0] == ["Sequential", "Sequential_1"]
    assert [row.name for row in own.rows if row.depth == 0] == ["Sequential"]


def test_a_model_called_twice_in_one_graph(recorder, ways):
    def seen_of(compiles):
        torch.manual_seed(0)
        model, seen = perceptron(), recorder()
        GlobalSubscriberManager.subscribe(model, [seen])

        def both(x):
            return model(x).sum() + model(x).sum()  # equal calls, which no pass may merge

        call = torch.compile(both, backend="ort", fullgraph=True) if compiles else both
        for _ in range(2):
            call(torch.ones(2, 4)).backward()
        GlobalSubscriberManager.unsubscribe()
        return seen

    want, got = seen_of(False), seen_of(True)
    assert {row.step for row in want.rows} == {0, 1, 2, 3}
    assert_same_rows(want, got, in_order=False)


# Subscribing and leaving.


def test_nothing_is_shown_after_unsubscribing(way, recorder):
    model, seen = Inspected(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    wrapped(torch.randn(2, 4)).sum().backward()
    count = len(seen.rows)
    GlobalSubscriberManager.unsubscribe(model)
    wrapped(torch.randn(2, 4)).sum().backward()
    assert len(seen.rows) == count
    hooks = [hook for part in model.modules() for hook in part._forward_hooks]
    assert hooks == []
    assert not model._forward_pre_hooks


def test_one_model_of_two_is_left(recorder):
    first, second, seen = perceptron(), Repeated(), recorder()
    for model in (first, second):
        GlobalSubscriberManager.subscribe(model, [seen])
    GlobalSubscriberManager.unsubscribe(first)
    for model in (first, second):
        model(torch.randn(2, 4))
    assert {row.name.split(".")[0] for row in seen.rows} == {"Repeated"}


def test_an_ortmodule_that_has_run_is_captured_again(recorder):
    model, seen = torch_ort.ORTModule(perceptron()), recorder()
    model(torch.randn(2, 4)).sum().backward()
    GlobalSubscriberManager.subscribe(model, [seen])
    model(torch.randn(2, 4)).sum().backward()
    assert len(seen.keys(step=0)) == 8


def test_a_subscribed_model_is_pickled_and_copied(recorder):
    model = perceptron()
    GlobalSubscriberManager.subscribe(model, [recorder()])
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        other(torch.ones(2, 4)).sum().backward()


def test_subscribing_twice_is_refused(recorder):
    model = perceptron()
    GlobalSubscriberManager.subscribe(model, [recorder()])
    with pytest.raises(RuntimeError, match="Sequential is subscribed already"):
        GlobalSubscriberManager.subscribe(torch_ort.ORTModule(model), [recorder()])
    GlobalSubscriberManager.unsubscribe(model)
    GlobalSubscriberManager.subscribe(model, [recorder()])


def test_bad_arguments_are_refused(recorder):
    with pytest.raises(TypeError, match=r"got function, want a torch\.nn\.Module"):
        GlobalSubscriberManager.subscribe(perceptron, [recorder()])
    with pytest.raises(TypeError, match="got one subscriber, want a list"):
        GlobalSubscriberManager.subscribe(perceptron(), recorder())
    with pytest.raises(TypeError, match="got str among the subscribers"):
        GlobalSubscriberManager.subscribe(perceptron(), ["recorder"])
    with pytest.raises(TypeError, match="got int, want a tensor"):
        inspect_activation("x", 3)


def test_inspecting_without_a_subscription_gives_the_tensor_itself():
    x = torch.ones(2)
    assert inspect_activation("x", x) is x


def test_a_gradient_of_a_gradient(recorder):
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), recorder()
    x = torch.randn(2, 4, requires_grad=True)
    GlobalSubscriberManager.subscribe(model, [seen])
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    GlobalSubscriberManager.unsubscribe()
    (plain,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(plain.square().sum(), x)[0])


def test_autocast_is_shown_in_its_types(way, recorder):
    model, seen = perceptron(), recorder()
    GlobalSubscriberManager.subscribe(model, [seen])
    wrapped = way(model)
    with torch.autocast("cpu", torch.bfloat16):
        result = wrapped(torch.randn(2, 4))
    result.float().sum().backward()
    assert {row.tensor.dtype for row in seen.rows} == {torch.bfloat16}
    assert len(seen.rows) == 8
