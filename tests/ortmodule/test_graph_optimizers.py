# Passes of the user's own: what they see and may change, which of them run and in which order.
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import onnx
import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule, UserError
from torch_ort.ortmodule import (
    graph_optimizers,
    register_graph_optimizer,
    unregister_graph_optimizer,
)

pytestmark = pytest.mark.ort_only

Graph = onnx.GraphProto


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    before = list(graph_optimizers._registered)
    graph_optimizers._registered.clear()
    yield
    graph_optimizers._registered[:] = before


@pytest.fixture
def seen() -> list[Graph]:
    """Register a pass that changes nothing; give what it sees."""
    graphs: list[Graph] = []

    @register_graph_optimizer()
    def look(graph: Graph) -> None:
        graphs.append(copy.deepcopy(graph))

    return graphs


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Counting(nn.Module):
    """Uses a size as a number, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        n = x.shape[0]
        y = self.linear(x) * n + torch.arange(n).unsqueeze(1)
        return y.sum(0) / (n + 1) + y.view(2 * n, 2).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "MLP": (mlp, lambda n: (n, 8)),
    "CNN": (cnn, lambda n: (n, 2, 4, 4)),
    "encoder": (encoder, lambda n: (n, n + 1, 8)),
    "sizes as numbers": (Counting, lambda n: (n, 8)),
}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, ORTModule]:
    torch.manual_seed(0)
    eager = make()
    return eager, ORTModule(copy.deepcopy(eager))


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Give an output and all gradients."""
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.pow(2).mean(), [x, *module.parameters()])]


def assert_same_steps(eager: nn.Module, module: nn.Module, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(step(module, x), step(eager, x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.state_dict(), eager.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_that_changes_nothing(name, seen, graphs_captured):
    make, shape = MODELS[name]
    eager, module = pair(make)
    assert_same_steps(eager, module, *map(shape, (3, 5, 2, 3)))
    assert len(seen) == graphs_captured()
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_that_changes_nothing_without_gradients(name, seen):
    make, shape = MODELS[name]
    eager, module = pair(make)
    eager.eval()
    module.eval()
    with torch.no_grad():
        for n in (3, 5, 2):
            x = torch.randn(shape(n))
            torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-5)
    assert not any(node.op_type == "YieldOp" for graph in seen for node in graph.node)


def test_a_copy_may_be_given_back():
    @register_graph_optimizer()
    def copied(graph: Graph) -> Graph:
        return copy.deepcopy(graph)

    assert_same_steps(*pair(mlp), (3, 8), (5, 8))


def test_the_graph_is_that_of_forward_and_backward(seen):
    _, module = pair(mlp)
    step(module, torch.randn(3, 8))
    (graph,) = seen
    (border,) = [i for i, node in enumerate(graph.node) if node.op_type == "YieldOp"]
    assert graph.node[border].domain == "com.microsoft"
    assert any("Tanh" in node.op_type for node in graph.node[:border])
    later = {name for node in graph.node[border:] for name in node.output}
    # Gradients of the input and of six parameters.
    assert len(graph.output) == 7
    assert all(output.name in later for output in graph.output)


def scale_tanh(graph: Graph) -> None:
    """Make y = tanh(x) in forward y = 2 tanh(x), and its gradient twice as large."""
    (border,) = [node for node in graph.node if node.op_type == "YieldOp"]
    two = onnx.helper.make_tensor("two", onnx.TensorProto.FLOAT, [], [2.0])
    graph.initializer.append(two)
    output, gradient = border.input[0], border.output[0]
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == gradient:
                node.input[i] = f"{name}_twice"
    border.input[0] = f"{output}_twice"
    at = list(graph.node).index(border)
    doubled = [
        onnx.helper.make_node("Mul", [name, "two"], [f"{name}_twice"])
        for name in (output, gradient)
    ]
    nodes = [*graph.node[:at], doubled[0], border, doubled[1], *graph.node[at + 1 :]]
    kept = [copy.deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def test_a_pass_that_changes_forward_and_backward():
    register_graph_optimizer()(scale_tanh)
    eager, module = pair(mlp)
    for count in (3, 5):
        x = torch.randn(count, 8)
        want = step(Then(eager, lambda y: 2 * y), x)
        torch.testing.assert_close(step(module, x), want, rtol=1e-4, atol=1e-5)


class Then(nn.Module):
    def __init__(self, module: nn.Module, function: Callable) -> None:
        super().__init__()
        self.inner, self.function = module, function

    def forward(self, x):
        return self.function(self.inner(x))


def replace(old: str, new: str) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        for node in graph.node:
            if node.op_type == old and not node.domain:
                node.op_type = new

    return change


def test_a_pass_that_changes_an_inference_graph():
    register_graph_optimizer()(replace("Sin", "Cos"))
    module = ORTModule(Then(nn.Identity(), torch.sin))
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(module(x), x.cos())


def registered_in_order(order: list[str], name: str, **settings: object) -> Callable:
    def note(graph: Graph) -> None:
        order.append(name)

    return register_graph_optimizer(**settings)(note)


def test_higher_priorities_run_earlier():
    order: list[str] = []
    for name, priority in (("b", 0), ("d", -5), ("a", 7), ("c", 0)):
        registered_in_order(order, name, priority=priority)
    ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))
    assert order == ["a", "b", "c", "d"]


def test_a_pass_sees_what_earlier_ones_left():
    register_graph_optimizer(priority=1)(replace("Sin", "Cos"))
    register_graph_optimizer(priority=0)(replace("Cos", "Tan"))
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(ORTModule(Then(nn.Identity(), torch.sin))(x), x.tan())


class Other(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("all", ["Linear", "Other"]),
        ("Linear", ["Linear"]),
        ("Other|Linear", ["Linear", "Other"]),
        ("Other|Conv2d", ["Other"]),
        ("Lin", []),
        ("", []),
    ],
)
def test_target_modules(target, expected):
    order: list[str] = []
    for kind in (nn.Linear, Other):
        graph_optimizers._registered.clear()
        registered_in_order(order, kind.__name__, target_modules=target)
        ORTModule(kind(4, 3))(torch.ones(2, 4))
    assert order == expected


@pytest.mark.parametrize(
    ("devices", "runs"), [("all", True), ("cpu", True), ("cuda|cpu", True), ("cuda", False)]
)
def test_devices(devices, runs):
    order: list[str] = []
    registered_in_order(order, "ran", devices=devices)
    ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))
    assert order == ["ran"] * runs


def test_registering_gives_the_function_back():
    def change(graph: Graph) -> None:
        raise AssertionError

    assert register_graph_optimizer()(change) is change
    unregister_graph_optimizer(change)
    ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))


def test_what_has_been_captured_stays_until_it_is_captured_again():
    module = ORTModule(Then(nn.Identity(), torch.sin))
    x = torch.randn(3, 4)
    with torch.no_grad():
        module(x)
        register_graph_optimizer()(replace("Sin", "Cos"))
        torch.testing.assert_close(module(x), x.sin())
        module.recapture()
        torch.testing.assert_close(module(x), x.cos())


def rename_output(graph: Graph) -> None:
    graph.output[0].name = "other"


def drop_input(graph: Graph) -> None:
    del graph.input[-1]


def add_input(graph: Graph) -> None:
    graph.input.add(name="more")


def swap_outputs(graph: Graph) -> None:
    first, second = graph.output[0].name, graph.output[1].name
    graph.output[0].name, graph.output[1].name = second, first


@pytest.mark.parametrize("is_strict", ["0", "1"])
@pytest.mark.parametrize("change", [rename_output, drop_input, add_input, swap_outputs])
def test_inputs_and_outputs_must_stay(change, is_strict, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", is_strict)
    register_graph_optimizer()(change)
    words = (
        f"register_graph_optimizer: {change.__name__}: the inputs or outputs of the graph have "
        "changed"
    )
    with pytest.raises(UserError, match=words):
        ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))


def test_an_error_of_the_users_function():
    @register_graph_optimizer()
    def broken(graph: Graph) -> None:
        raise ZeroDivisionError("this is the user's")

    with pytest.raises(Exception, match="ZeroDivisionError: this is the user's"):
        ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))


def test_an_error_of_the_users_function_is_no_reason_to_fall_back(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    calls = []

    @register_graph_optimizer()
    def broken(graph: Graph) -> None:
        calls.append(graph)
        raise ZeroDivisionError("this is the user's")

    with pytest.raises(Exception, match="this is the user's"):
        ORTModule(nn.Linear(4, 3))(torch.ones(2, 4))
    assert len(calls) == 1


def test_a_graph_that_makes_no_sense():
    @register_graph_optimizer()
    def cut(graph: Graph) -> None:
        del graph.node[0]

    with pytest.raises(UserError, match=r"onnx: input of node '\w+': got 't', want a value"):
        ORTModule(mlp())(torch.ones(2, 8))


def test_a_module_without_passes_of_its_own_is_not_touched():
    assert graph_optimizers.rewrite_for(nn.Linear(4, 3), "cpu", 20) is None
