"""Recurrent layers in graphs of Dynamo's: allowed by its option, or written as loops over cells."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config

import torch_ort


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


def check(model: nn.Module, lengths: tuple[int, ...], *states: Any) -> None:
    """Compare with eager PyTorch; each length has to be one graph of the engine's."""
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
    assert after["graphs_recorded"] - before["graphs_recorded"] == len(set(lengths))


@pytest.fixture
def allowed():
    with config.patch(allow_rnn=True):
        yield


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_of_several_lengths(kind):
    check(Net(kind(5, 4, batch_first=True)), (3, 3, 2, 4))


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_in_both_directions(kind):
    check(Net(kind(5, 3, num_layers=2, bidirectional=True, batch_first=True)), (2,))


@pytest.mark.usefixtures("allowed")
def test_given_states():
    state = torch.randn(1, 2, 4, dtype=torch.float64)
    check(Net(nn.LSTM(5, 4, batch_first=True)), (3,), (state, state.cos()))
    check(Net(nn.GRU(5, 4, batch_first=True)), (3,), state)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop(cell):
    check(Loop(cell(5, 4)), (3, 3))
