"""The recorder: a recorded graph run node by node is the function and its gradients."""

import ctypes
import math
import operator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import MODELS, EncoderBlock
from torch_ort import _C
from torch_ort.core.refusals import HandOver, NoCapture
from torch_ort.dynamo.inputs import DynamoInputs
from torch_ort.record.recorder import RecordedInputs, Recording, record
from torch_ort.rules import answers
from torch_ort.rules.symbols import Symbolic, is_beyond_sizes

aten = torch.ops.aten


class Replay:
    """Runs a recorded graph on real tensors, and compares each with what was recorded of it."""

    def __init__(self, recording: Recording, symbols: dict[str, int]) -> None:
        self.recording = recording
        self._symbols = symbols
        self._values: dict = {}

    def value(self, argument):
        if isinstance(argument, torch.fx.Node):
            return self._values[argument]
        if isinstance(argument, Symbolic):
            return _C.evaluate_size(argument.size, self._symbols)
        if isinstance(argument, list | tuple):
            return type(argument)(map(self.value, argument))
        return argument

    def size(self, size) -> int:
        return size if isinstance(size, int) else _C.evaluate_size(size, self._symbols)

    def compare(self, node, spec, real) -> None:
        if isinstance(real, list | tuple):
            for one, other in zip(spec, real, strict=True):
                self.compare(node, one, other)
        elif isinstance(real, torch.Tensor) and spec is not None:
            spec = spec.spec
            assert [self.size(n) for n in spec.sizes] == list(real.shape), node
            if real.numel():
                strides = [
                    (self.size(want), got)
                    for want, got, n in zip(spec.strides, real.stride(), real.shape, strict=True)
                    if n != 1
                ]
                assert all(want == got for want, got in strides), (node, strides)
            assert (spec.dtype, spec.device) == (real.dtype, real.device), node

    def __call__(self, inputs: list, tangents: list) -> list:
        """Give what the graph gives: outputs, and gradients by input."""
        given = iter([*inputs, *tangents])
        for node in self.recording.module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(given)
            elif node.op == "get_attr":
                self._values[node] = getattr(self.recording.module, node.target)
            elif node.op == "call_function":
                args = self.value(node.args)
                kwargs = {name: self.value(arg) for name, arg in node.kwargs.items()}
                if node.target is torch.sym_int:
                    self._values[node] = args[0]
                    continue
                with torch.no_grad():
                    self._values[node] = node.target(*args, **kwargs)
                if node.target is not operator.getitem and node.target is not aten.copy_.default:
                    self.compare(node, node.meta["val"], self._values[node])
            else:
                return [self.value(value) for value in node.args[0]]
        raise AssertionError("a graph without an output")


def record_module(module: nn.Module, inputs: tuple, is_symbolic: bool):
    """Record a call of a module; give the recording and the tensors that its graph takes."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    symbols: dict[str, int] = {}
    if is_symbolic:
        table = RecordedInputs()
        flat = [table.held(tensor, name) for name, tensor in state.items()]
        for i, tensor in enumerate(inputs):
            leaf = table.tensor(tensor, f"x{i}")
            symbols |= {
                _C.size_text(n): size for n, size in zip(leaf.spec.sizes, tensor.shape, strict=True)
            }
            flat.append(leaf)
    else:
        table = None
        flat = DynamoInputs([*state.values(), *inputs]).inputs

    def function(*flat):
        named = dict(zip(state, flat, strict=False))
        return [torch.func.functional_call(module, named, flat[len(state) :])]

    return record(function, flat), [*state.values(), *inputs], symbols, table


def without_random(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


class Layouts(nn.Module):
    """Views of all kinds, sums over permuted tensors, convolutions in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        y = self.conv(x) * self.scale
        y = self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + y
        z = y.transpose(1, 2).reshape(x.shape[0], -1)
        parts = torch.stack([*z.chunk(2, 1)], 1).mean(1)
        return (parts.unsqueeze(1) * parts[:, :5].unsqueeze(2)).amax(2).logsumexp(1)


class Distance(nn.Module):
    """A loss whose backward divides by the count of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.mse_loss(self.linear(x), x)


class Writes(nn.Module):
    """Writes into what it has made, and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        z = torch.zeros_like(y)
        z[:, :3] = y[:, 3:] * 2
        z[:, 3:].add_(y[:, :3])
        y = y.clone()
        y[0].mul_(3)
        return (z * y - self.mean).relu_()


class Llm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 16), EncoderBlock(16, 2, True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        logits = self.head(self.block(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


CASES = {
    **{name: (make, x) for name, (make, x) in MODELS.items()},
    "layouts": (Layouts, numbers(2, 3, 4, 6)),
    "layouts, channels last": (Layouts, numbers(2, 3, 4, 6).to(memory_format=torch.channels_last)),
    "writes": (Writes, numbers(4, 6)),
    "language model with loss": (Llm, torch.arange(20).reshape(4, 5) % 11),
    "upsampling": (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2)),
                   numbers(2, 3, 4, 4)),
    "norms of images with channels last": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4,
        3), nn.BatchNorm2d(4)), numbers(2, 3, 6, 5).to(memory_format=torch.channels_last)),
    "the gradient of a mean of squares": (Distance, numbers(5, 4)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), numbers(2, 4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), numbers(2, 3, 5, 5)),
    "norms": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8),
        nn.MaxPool1d(2), nn.PReLU(), nn.Softplus()), numbers(2, 4, 12)),
    "a norm of the input": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 8, 3)),
        numbers(2, 4, 12)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_symbolic"),
    [
        pytest.param(name, is_symbolic, id=f"{name}, {'symbols' if is_symbolic else 'known sizes'}")
        for name in CASES
        for is_symbolic in (False, True)
    ],
)
def test_a_recording_is_the_function(name, is_symbolic):
    make, x = CASES[name]
    torch.manual_seed(0)
    module = without_random(make())
    recording, given, symbols, _ = record_module(module, (x,), is_symbolic)
    state = [tensor.detach().clone() for tensor in module.state_dict().values()]
    replay = Replay(recording, symbols)
    real = [value.detach().clone() for value in given]
    parameters = list(module.parameters())
    want = module(x)
    tangent = torch.rand(want.shape, generator=torch.Generator().manual_seed(2))
    want.backward(tangent)
    like = recording.module.graph.find_nodes(op="placeholder")[-1].meta["val"].spec
    placed = torch.empty_strided(
        want.shape, [replay.size(n) for n in like.strides], dtype=want.dtype
    ).copy_(tangent)
    got, *gradients = replay(real, [placed])
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    for parameter, gradient in zip(parameters, gradients, strict=False):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
    # What forward writes into buffers, the graph has written into its inputs.
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    for buffer, (key, tensor) in zip(state, module.state_dict().items(), strict=True):
        if key not in dict(module.named_parameters()):
            torch.testing.assert_close(real[names.index(key)], tensor)
            assert not torch.equal(buffer, tensor)


@pytest.mark.parametrize("shape", [(3, 7), (1, 2), (6, 5)])
def test_a_recording_serves_other_sizes(shape):
    torch.manual_seed(0)
    module = without_random(Llm())
    recording, given, symbols, table = record_module(
        module, (torch.zeros(4, 5, dtype=torch.int64),), True
    )
    ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 11
    assert all(eval(guard, dict(zip(symbols, shape, strict=True))) for guard in table.guards())
    replay = Replay(recording, dict(zip(symbols, shape, strict=True)))
    want = module(ids)
    want.backward()
    got, *gradients = replay([*(x.detach() for x in given[:-1]), ids], [torch.ones(())])
    torch.testing.assert_close(got, want.detach())
    for parameter, gradient in zip(module.parameters(), gradients, strict=False):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_branch_on_sizes_is_a_guard():
    class Branches(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 3 else x - 1

    _, _, _, table = record_module(Branches(), (numbers(5, 2),), True)
    assert table.guards() == ["(s0 > 3)"]


def test_a_batch_of_one_is_no_special_case():
    *_, table = record_module(nn.Linear(4, 4), (numbers(1, 4),), True)
    assert table.guards() == ["(s1 == 4)"]


LOOSE = nn.Parameter(torch.ones(4))


class Wrong(nn.Module):
    """Does with its input what a function says."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x):
        return self.function(self.weight, x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda w, x: x * w * (x.sum() > 0).item(), "depends on numbers"),
        (lambda w, x: x[x > 0] * 2, "gives a shape that depends on numbers"),
        (lambda w, x: torch.set_grad_enabled(False) and w * x, "grad mode is switched inside"),
        (lambda w, x: w * x * LOOSE, "a constant requires grad"),
    ],
)
def test_hands_over(function, words):
    with pytest.raises((HandOver, RuntimeError, ValueError, TypeError), match=words):
        record_module(Wrong(function), (numbers(3, 4),), False)


@pytest.mark.parametrize("function", [lambda w, x: torch.kron(w, x), lambda w, x: (w * x).sgn()])
def test_a_kernel_that_knows_no_symbols_is_told_the_sizes_of_the_call(function):
    _, _, _, table = record_module(Wrong(function), (numbers(3, 4),), True)
    assert {"(s0 == 3)", "(s1 == 4)"} <= set(table.guards())


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: np.from_dlpack(x),
        lambda x: x.tolist(),
        lambda x: x.data_ptr(),
        lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
        lambda x: x.untyped_storage().data_ptr(),
        lambda x: x.sum().item(),
        lambda x: torch.from_dlpack(x) + 1,
    ],
)
@pytest.mark.parametrize("made", [lambda x: x, lambda x: x * 2, lambda x: (x * 2)[1:]])
def test_numbers_are_not_made_up(ask, made):
    def function(weight, x):
        ask(made(x).detach().sum(1))
        return weight * x

    words = "no data|depends on numbers|invalid python storage|gives a bool"
    with pytest.raises((HandOver, RuntimeError), match=words):
        record_module(Wrong(function), (numbers(3, 4),), False)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: w * x * (1.0 / x.shape[0]),
        lambda w, x: w * x * (x.shape[0] / x.shape[1]),
        lambda w, x: w * x / x.shape[0] ** 0.5,
        lambda w, x: (w * x).var(0),
        lambda w, x: (w * x).std(),
        lambda w, x: (w * x).mT.std(-1),
    ],
    ids=["inverse", "quotient", "root", "variance", "deviation", "deviation of rows"],
)
def test_floats_that_depend_on_sizes_are_computed_by_the_graph(function):
    module = Wrong(function)
    recording, given, symbols, table = record_module(module, (numbers(3, 4),), True)
    assert "(s0 == 3)" not in table.guards()
    sizes = dict(zip(symbols, (7, 4), strict=True))
    assert recording.asked.hold_for({}, sizes)
    x = numbers(7, 4)
    want = module(x)
    tangent = torch.rand_like(want)
    got, gradient, _ = Replay(recording, sizes)([given[0].detach(), x], [tangent])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, *torch.autograd.grad(want, module.weight, tangent))


@pytest.mark.parametrize(
    ("function", "same", "other"),
    [
        (lambda w, x: (w * x)[: int(x.shape[0] * 0.5)], 2, 4),
        (lambda w, x: (w * x)[: -int(-x.shape[0] / 2)], 2, 5),
        (lambda w, x: w * x if x.shape[0] / 2 > 1.25 else x, 9, 2),
        (lambda w, x: w * x[: math.ceil(x.shape[0] / 3)], 2, 4),
        (lambda w, x: w * x.shape[0] ** 0.5 if x.shape[0] ** 0.5 < 3 else w, 8, 9),
    ],
    ids=["index", "negative", "branch", "rounded up", "root"],
)
def test_what_is_asked_of_floats_of_sizes_is_a_condition(function, same, other):
    recording, _, symbols, table = record_module(Wrong(function), (numbers(3, 4),), True)
    assert "(s0 == 3)" not in table.guards()
    for rows, holds in ((3, True), (same, True), (other, False)):
        sizes = dict(zip(symbols, (rows, 4), strict=True))
        assert recording.asked.hold_for({}, sizes) == holds


@pytest.mark.parametrize("rows", [0, 1])
def test_a_quotient_that_python_does_not_know_is_not_recorded(rows):
    function = Wrong(lambda w, x: w * (1 / (x.shape[0] * (x.shape[0] - 1))))
    with pytest.raises(NoCapture, match="Python raises ZeroDivisionError"):
        record_module(function, (numbers(rows, 4),), True)
    recording, *_ = record_module(function, (numbers(3, 4),), True)
    assert not recording.asked.hold_for({}, {"s0": rows, "s1": 4})


@pytest.mark.parametrize(
    ("factor", "want"),
    [
        (lambda rows: rows / (2 * rows), 0.5),
        (lambda rows: 3 * rows / (rows * 2) - 1.25, 0.25),
        (lambda rows: 1 / (rows / (8 * rows)), 8.0),
    ],
)
def test_floats_that_are_the_same_for_all_sizes_are_numbers(factor, want):
    function = Wrong(lambda w, x: w * x * factor(x.shape[0]))
    recording, _, _, table = record_module(function, (numbers(3, 4),), True)
    multiplied = recording.module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert want in [node.args[1] for node in multiplied]
    assert "(s0 != 0)" in table.guards()


def test_a_fraction_of_a_size_that_a_rule_asks_for_is_a_condition(monkeypatch):
    def rule(a, b):
        wide = max(a, b, key=lambda spec: len(spec.sizes))
        assert int(wide.sizes[0] * 2.5) == 7
        return wide

    find = answers.find
    monkeypatch.setattr(
        answers, "find", lambda func: rule if func is aten.mul.Tensor else find(func)
    )
    recording, *_ = record_module(Wrong(lambda w, x: w * x), (numbers(3, 4),), True)
    assert recording.module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert [recording.asked.hold_for({}, {"s0": n, "s1": 4}) for n in (3, 4)] == [True, False]


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_pytorch_is_asked_once_for_calls_of_one_form(is_symbolic, monkeypatch):
    asked, ask = [], answers._ask_pytorch

    def counted(func, args, kwargs):
        if func in (aten.logcumsumexp.default, aten.cumprod.default):
            asked.append((func, args[1]))
        return ask(func, args, kwargs)

    def forward(w, x):
        for _ in range(3):
            x = torch.logcumsumexp(w.detach() * x, 1)
        # Another dim, dtype, order in memory or operator makes another form.
        others = x.logcumsumexp(0), x.double().logcumsumexp(1), x.t().logcumsumexp(1), x.cumprod(1)
        return sum(each.sum() for each in (x, *others))

    monkeypatch.setattr(answers, "_ask_pytorch", counted)
    recording, *_ = record_module(Wrong(forward), (numbers(3, 4),), is_symbolic)
    again = aten.logcumsumexp.default
    assert asked == [(again, 1), (again, 0), (again, 1), (again, 1), (aten.cumprod.default, 1)]
    assert len(recording.module.graph.find_nodes(op="call_function", target=again)) == 6


def test_bugs_of_sizes_are_no_reason_to_hand_over():
    assert not is_beyond_sizes(RuntimeError("sizes: s0 has a symbol that was not made here"))


def test_a_size_as_a_float():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.scale).sum(0) / (2 * x.shape[0])

    recording, given, symbols, _ = record_module(Mean(), (numbers(6, 4),), True)
    (divide, *_) = recording.module.graph.find_nodes(op="call_function", target=aten.div.Tensor)
    assert isinstance(divide.args[1], Symbolic)
    symbols = dict(zip(symbols, (3, 4), strict=True))
    x = numbers(3, 4)
    got, gradient, _ = Replay(recording, symbols)([given[0].detach(), x], [torch.ones(4)])
    torch.testing.assert_close(got, x.sum(0) / 6)
    torch.testing.assert_close(gradient, x.sum(0) / 6)


def test_a_size_as_a_float_that_makes_floats_of_integers_hands_over():
    class Shares(nn.Module):
        def forward(self, ids):
            return ids * torch.sym_float(ids.shape[0])

    with pytest.raises(HandOver, match="an argument that depends on sizes and is no integer"):
        record_module(Shares(), (torch.arange(6),), True)


@pytest.mark.parametrize(
    "of_numbers",
    [
        lambda rows: torch.div(rows, 2, rounding_mode="trunc"),
        lambda rows: torch.div(rows, 2),
        lambda rows: torch.div(7, 2, rounding_mode="floor"),
        lambda rows: torch.div(7.0, rows),
        lambda rows: torch.add(rows, 2, alpha=3),
        lambda rows: torch.mul(rows, 1 + 2j).real,
        lambda rows: torch.true_divide(True, rows),
        lambda rows: torch.floor_divide(rows, 2).add_(1),
    ],
)
def test_an_operator_of_numbers_alone_gives_a_tensor(of_numbers):
    function = Wrong(lambda w, x: w * x * of_numbers(x.shape[0]))
    recording, given, symbols, _ = record_module(function, (numbers(6, 4),), True)
    x = numbers(3, 4)
    replay = Replay(recording, dict(zip(symbols, x.shape, strict=True)))
    got, gradient, _ = replay([given[0].detach(), x], [torch.ones(3, 4)])
    torch.testing.assert_close(got, x * of_numbers(3))
    torch.testing.assert_close(gradient, (x * of_numbers(3)).sum(0))


@pytest.mark.parametrize(
    "number",
    [
        lambda rows: torch.div(rows, 2, rounding_mode="trunc").item(),
        lambda rows: (torch.floor_divide(rows, 2) * 2 - 1).item(),
        lambda rows: torch.add(torch.div(rows, 2, rounding_mode="floor"), rows, alpha=3).item(),
        lambda rows: torch.div(9, 2, rounding_mode="trunc").sub_(1).item(),
    ],
)
def test_integers_that_follow_from_sizes_are_known(number):
    function = Wrong(lambda w, x: w * x * number(x.shape[0]))
    recording, given, symbols, table = record_module(function, (numbers(6, 4),), True)
    for rows in (3, 6, 10):
        named = dict(zip(symbols, (rows, 4), strict=True))
        assert all(eval(guard, dict(named)) for guard in table.guards())
        x = numbers(rows, 4)
        got, *_ = Replay(recording, named)([given[0].detach(), x], [torch.ones(rows, 4)])
        torch.testing.assert_close(got, x * number(rows))


@pytest.mark.parametrize(
    "number",
    [
        lambda rows: torch.div(-rows, 2, rounding_mode="trunc").item(),
        lambda rows: torch.div(rows, 2).item(),
    ],
)
def test_other_numbers_in_tensors_are_not_known(number):
    function = Wrong(lambda w, x: w * x * number(x.shape[0]))
    with pytest.raises(HandOver, match="depends on numbers"):
        record_module(function, (numbers(6, 4),), True)


def test_autograd_that_is_switched_on_inside_hands_over():
    def function(weight, x):
        with torch.enable_grad():
            return weight * x

    with torch.no_grad(), pytest.raises(HandOver, match="grad mode is switched inside"):
        record_module(Wrong(function), (numbers(3, 4),), False)


def test_an_input_that_autograd_watches_is_not_written_into():
    x = numbers(3, 4).requires_grad_()
    with pytest.raises((HandOver, RuntimeError), match=r"leaf Variable|which autograd watches"):
        record_module(Wrong(lambda w, x: w * x.add_(w)), ((x * 1),), False)


def test_what_the_function_raises_comes_through():
    def fail(weight, x):
        raise ValueError("the user's own words")

    with pytest.raises(ValueError, match="the user's own words"):
        record_module(Wrong(fail), (numbers(2, 4),), True)


def test_torch_is_left_as_it_was():
    def raises(weight, x):
        raise ValueError("no")

    record_module(nn.Linear(4, 4), (numbers(2, 4),), True)
    with pytest.raises(ValueError, match="no"):
        record_module(
            Wrong(lambda w, x: (_ for _ in ()).throw(ValueError("no"))), (numbers(4),), True
        )
    x = numbers(2, 3).requires_grad_()
    (x * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
    assert not torch.compiler.is_compiling()
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_a_function_that_is_not_settled_runs_again():
    runs = []

    def function(x):
        runs.append(1)
        return [x * len(runs)]

    recording = record(function, DynamoInputs([numbers(2)]).inputs, lambda: len(runs) > 1)
    (multiply,) = recording.module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert multiply.args[1] == 2


def test_constants_are_held_by_the_graph():
    table = numbers(4)
    recording, *_ = record_module(Wrong(lambda w, x: w * x + table), (numbers(3, 4),), False)
    (node,) = recording.module.graph.find_nodes(op="get_attr")
    assert getattr(recording.module, node.target) is table


def test_the_users_lines_are_named():
    recording, *_ = record_module(Wrong(lambda w, x: (w * x).exp()), (numbers(3, 4),), False)
    (node,) = recording.module.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert str(node.meta["line"]).startswith("test_recorder.py:")


def test_parameters_are_parameters_to_forward():
    seen = []
    record_module(
        Wrong(lambda w, x: seen.append(isinstance(w, nn.Parameter)) or w * x),
        (numbers(3, 4),), False,
    )  # fmt: skip
    assert seen == [True]
