"""Recurrent layers in graphs of Dynamo's: layers of torch.nn, and cells in loops."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from recurrent_kinds import KINDS
from torch import Tensor, nn
from torch._dynamo import config

import torch_ort
from torch_ort.fallback import FallbackWarning


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, sequence: Tensor, *states: Any) -> Any:
        return self.layer(sequence.tanh(), *states)


class Loop(nn.Module):
    """A cell over the positions of a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, sequence: Tensor) -> Tensor:
        state, results = None, []
        for position in sequence.unbind(1):
            state = self.cell(position, state)
            results.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(results, 1)


def tensors_of(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [tensor for each in results for tensor in tensors_of(each)]


def run(call: Any, model: nn.Module, *inputs: Any) -> list[Tensor]:
    """Give results and gradients of one call."""
    model.zero_grad()
    results = tensors_of(call(*inputs))
    sum((result * (i + 1)).sin().sum() for i, result in enumerate(results)).backward()
    return [*results, *(parameter.grad for parameter in model.parameters())]


def check(model: nn.Module, lengths: tuple[int, ...], graphs: int, *states: Any) -> None:
    """Compare with eager PyTorch; the lengths have to be so many graphs of the engine's."""
    model = model.double()
    eager, call = copy.deepcopy(model), torch.compile(model, backend="ort", fullgraph=True)
    before = torch_ort.counters()
    for length in lengths:
        sequence = torch.randn(2, length, 5, dtype=torch.float64)
        torch.testing.assert_close(
            run(call, model, sequence, *states), run(eager, eager, sequence, *states)
        )
    after = torch_ort.counters()
    assert after["fallbacks"] == before["fallbacks"]
    assert after["graphs_recorded"] - before["graphs_recorded"] == graphs


# One graph for the first length, one for any, and one for 1, by which Dynamo decides.
LENGTHS, GRAPHS = (3, 3, 2, 4, 9, 7, 1), 3


@pytest.fixture(params=[False, True], ids=["usual", "allow_rnn"])
def setting(request):
    """Dynamo's setting for recurrent layers, which changes nothing for our backend."""
    with config.patch(allow_rnn=request.param):
        yield request.param
        assert config.allow_rnn is request.param


@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bidirectional": True, "num_layers": 2, "bias": False}],
    ids=["plain", "deep"],
)
def test_one_graph_for_all_lengths(kind, settings):
    check(Net(kind(5, 4, batch_first=True, **settings)), LENGTHS, GRAPHS)


def test_sizes_that_are_dynamic_from_the_first():
    model = Net(nn.GRU(5, 4, batch_first=True)).double()
    call = torch.compile(model, backend="ort", dynamic=True)
    for length in (3, 8, 5):
        x = torch.randn(2, length, 5, dtype=torch.float64)
        torch.testing.assert_close(call(x), model(x))
    assert torch_ort.counters()["graphs_recorded"] == 1


def test_given_states():
    state = torch.randn(1, 2, 4, dtype=torch.float64)
    check(Net(nn.LSTM(5, 4, batch_first=True)), (3,), 1, (state, state.cos()))
    check(Net(nn.GRU(5, 4, batch_first=True)), (3,), 1, state)


def test_sequences_without_a_batch():
    model = Net(nn.LSTM(5, 4))
    x = torch.randn(3, 5)
    call = torch.compile(model, backend="ort", fullgraph=True)
    torch.testing.assert_close(call(x), model(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_is_that_of_eager(kind):
    model = Net(kind(5, 4, num_layers=3, dropout=0.4))
    call = torch.compile(model, backend="ort", fullgraph=True)
    x = torch.randn(6, 2, 5)
    for training in (True, False):
        model.train(training)
        results = []
        for function in (model, call):
            torch.manual_seed(3)
            results.append(run(function, model, x))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode):
    model = Net(nn.LSTM(5, 4, num_layers=2)).eval()
    call = torch.compile(model, backend="ort", fullgraph=True)
    with mode():
        for length in (3, 5, 7):
            x = torch.randn(length, 2, 5)
            torch.testing.assert_close(call(x), model(x))
    assert torch_ort.counters()["fallbacks"] == 0


def test_several_steps_of_an_optimizer():
    models = [Net(nn.GRU(5, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls = [models[0], torch.compile(models[1], backend="ort", fullgraph=True)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    for step in range(5):
        x = torch.randn(4 + step, 3, 5)
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            call(x)[0].square().sum().backward()
            optimizer.step()
    for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_calls_before_their_backwards():
    model = Net(nn.LSTM(5, 4))
    call = torch.compile(model, backend="ort", fullgraph=True)
    results = []
    for function in (model, call):
        torch.manual_seed(0)
        x = [torch.randn(length, 2, 5, requires_grad=True) for length in (3, 6)]
        losses = [function(each)[0].sin().sum() for each in x]
        results.append(torch.autograd.grad(losses[0], x[0]) + torch.autograd.grad(losses[1], x[1]))
    torch.testing.assert_close(results[1], results[0])


# What is left to eager PyTorch.


class Mixed(Net):
    """A layer under autocast, between other layers, with all that it gives."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(layer)
        self.dtype = dtype

    def forward(self, sequence: Tensor, *states: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            return super().forward(sequence, *states)


def has_kernels_of_pytorch(model: nn.Module, *inputs: Any) -> bool:
    """Tell whether PyTorch computes it: oneDNN's LSTMs want a processor that has the dtype."""
    try:
        model(*inputs)
    except RuntimeError:
        return False
    return True


def assert_near(
    got: list[Tensor], want: list[Tensor], exact: list[Tensor], dtype: torch.dtype
) -> None:
    """Check that results have the dtypes of PyTorch's, and are about as near to exact ones.

    Products are of `dtype`. A number near the kink of a relu may be rounded to either side of it.
    """
    for ours, theirs, true in zip(got, want, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, of_theirs = ((x.double() - true).abs().max() for x in (ours, theirs))
        rounding = 4 * torch.finfo(dtype).eps * true.abs().max()
        assert error <= 1.5 * of_theirs + rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["all", "autocast", "autocast_of_inputs", "autocast_of_states"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_short_floats(kind, way, dtype):
    torch.manual_seed(2)
    layer = kind(5, 16, num_layers=2, bidirectional=True)
    sequence, state = torch.randn(6, 3, 5), torch.randn(4, 3, 16) / 2
    states = (state, state.cos()) if isinstance(layer, nn.LSTM) else state
    exact = Net(copy.deepcopy(layer)).double()
    double = tuple(x.double() for x in states) if isinstance(states, tuple) else states.double()
    want = run(exact, exact, sequence.double(), double)
    if way in ("all", "autocast_of_inputs"):
        sequence = sequence.to(dtype)
    if way in ("all", "autocast_of_states"):
        states = (
            tuple(x.to(dtype) for x in states) if isinstance(states, tuple) else states.to(dtype)
        )
    model = Net(layer.to(dtype)) if way == "all" else Mixed(layer, dtype)
    if not has_kernels_of_pytorch(model, sequence, states):
        pytest.skip("eager PyTorch has no kernel for it here")
    eager, call = copy.deepcopy(model), torch.compile(model, backend="ort", fullgraph=True)
    assert_near(
        run(call, model, sequence, states), run(eager, eager, sequence, states), want, dtype
    )
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_short_floats_that_are_not_autocasts(kind, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model, x = Mixed(kind(5, 16), torch.bfloat16), torch.randn(6, 3, 5).half()
    call = torch.compile(model, backend="ort")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got, want = tensors_of(call(x)), tensors_of(model(x))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_states_of_another_dtype_raise_as_in_eager(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model, x = nn.GRU(5, 4).bfloat16(), torch.randn(3, 2, 5).bfloat16()
    state = torch.zeros(1, 2, 4)
    for call in (model, torch.compile(model, backend="ort")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            with pytest.raises(RuntimeError):
                call(x, state)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_autocast_around_the_call(kind):
    torch.manual_seed(2)
    model = Net(kind(5, 16, batch_first=True))
    eager, call = copy.deepcopy(model), torch.compile(model, backend="ort", fullgraph=True)
    for length in (4, 7, 5):
        x = torch.randn(3, length, 5)
        exact = copy.deepcopy(eager).double()
        want = run(exact, exact, x.double())
        with torch.autocast("cpu", torch.bfloat16):
            if not has_kernels_of_pytorch(eager, x):
                pytest.skip("eager PyTorch has no kernel for it here")
            results = call(x), eager(x)
        got, theirs = ([*tensors_of(each)] for each in results)
        assert_near(got, theirs, want[: len(got)], torch.bfloat16)
    assert torch_ort.counters()["fallbacks"] == 0


class Around(nn.Module):
    """Runs a layer in a way that has no kernels."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.before = way, nn.Linear(5, 5)
        self.layer = nn.LSTM(5, 4, proj_size=3 if way == "projections" else 0)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x).relu()
        if self.way == "packed":
            return self.layer(nn.utils.rnn.pack_sequence([x[:, 0], x[:2, 1]]))[1]
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("way", ["projections", "packed"])
def test_layers_without_kernels_run_in_eager_pytorch(way, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = Around(way)
    call = torch.compile(model, backend="ort")
    for length in (3, 5):
        x = torch.randn(length, 2, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            torch.testing.assert_close(run(call, model, x), run(model, model, x))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_why_a_layer_is_left_out_is_said(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with pytest.warns(FallbackWarning, match="Attempted to wrap RNN, GRU, or LSTM.*allow_rnn"):
        torch.compile(Net(nn.LSTM(5, 4, proj_size=3)), backend="ort")(torch.randn(3, 2, 5))


def test_other_backends_break_their_graphs_as_before():
    model, x = Net(nn.LSTM(5, 4)), torch.randn(3, 2, 5)
    torch.compile(model, backend="ort", fullgraph=True)(x)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Attempted to wrap RNN"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_gradients_that_are_differentiated_again_say_so(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model, x = Net(nn.GRU(5, 4)), torch.randn(3, 2, 5, requires_grad=True)
    result = torch.compile(model, backend="ort")(x)[0].sin().sum()
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    with pytest.raises(RuntimeError, match="torch_ort::recurrent_backward is not implemented"):
        gradient.sum().backward()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop(cell):
    check(Loop(cell(5, 4)), (3, 3), 1)
