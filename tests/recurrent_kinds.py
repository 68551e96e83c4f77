"""The recurrent layers of torch.nn, by the names of the functions that they call."""

from __future__ import annotations

import functools

from torch import nn

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
