"""Shape rules of recurrent layers on the CPU, and of cells that a GPU runs as one kernel each."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort.rules.forms import Size, Spec, empty, rows, spec_of
from torch_ort.rules.table import rule_of

aten = torch.ops.aten
ops = torch.ops.torch_ort


# By the name of a cell: the parts of its gates, and of what forward keeps of each time for backward
# (csrc/cpu/recurrent.h).
_PARTS = {"lstm": (4, 5), "gru": (3, 4), "rnn_tanh": (1, 0), "rnn_relu": (1, 0)}


@rule_of(ops.recurrent.default)
def _layer(
    sequence: Spec, weight: Spec, bias: Spec | None, state: Spec, memory: Spec | None, cell: str,
    reverse: bool, keeps: bool,
) -> tuple[Spec, ...]:  # fmt: skip
    steps, (batch, width) = sequence.sizes[0], state.sizes
    kept = _PARTS[cell][1] if keeps else 0
    return (
        rows([steps, batch, width], state),
        rows([batch, width], state),
        rows([_or_none(batch, memory), width], state),
        rows([steps, kept, batch, width], state),
    )


@rule_of(ops.recurrent_backward.default)
def _layer_backward(
    output_gradient: Spec | None, last_gradient: Spec | None, last_memory_gradient: Spec | None,
    weight: Spec, state: Spec, memory: Spec | None, output: Spec, kept: Spec, cell: str,
    reverse: bool,
) -> tuple[Spec, ...]:  # fmt: skip
    steps, (batch, width) = output.sizes[0], state.sizes
    gates = [steps, batch, width * _PARTS[cell][0]]
    return (
        rows(gates, state),
        rows(gates if cell == "gru" else [0], state),
        rows([batch, width], state),
        rows([_or_none(batch, memory), width], state),
    )


def _or_none(batch: Size, memory: Spec | None) -> Size:
    return 0 if memory is None else batch


def _register_fake(name: str, rule: Any) -> None:
    def fake(*args: Any) -> tuple[torch.Tensor, ...]:
        specs = [spec_of(each) if isinstance(each, torch.Tensor) else each for each in args]
        return tuple(map(empty, rule(*specs)))

    torch.library.register_fake(f"torch_ort::{name}", fake)


_register_fake("recurrent", _layer)
_register_fake("recurrent_backward", _layer_backward)


@rule_of(aten._thnn_fused_lstm_cell.default)
def _lstm_cell(
    input_gates: Spec, hidden_gates: Spec, cell: Spec, input_bias: Spec | None = None,
    hidden_bias: Spec | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    state = rows(cell.sizes, cell)
    return state, state, rows(input_gates.sizes, input_gates)


@rule_of(aten._thnn_fused_lstm_cell_backward_impl.default)
def _lstm_cell_backward(
    gradient: Spec | None, cell_gradient: Spec | None, cell: Spec, new_cell: Spec, workspace: Spec,
    has_bias: bool,
) -> tuple[Spec | None, ...]:  # fmt: skip
    bias = rows([workspace.sizes[1]], workspace) if has_bias else None
    return rows(workspace.sizes, workspace), rows(cell.sizes, cell), bias


# What the gradient of the cell reads: three gates, the state, and the factor of the reset gate.
_GRU_GATES, _GRU_SAVED = 3, 5


@rule_of(aten._thnn_fused_gru_cell.default)
def _gru_cell(
    input_gates: Spec, hidden_gates: Spec, state: Spec, input_bias: Spec | None = None,
    hidden_bias: Spec | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    batch, width = state.sizes
    return rows(state.sizes, state), rows([batch, width * _GRU_SAVED], state)


@rule_of(aten._thnn_fused_gru_cell_backward.default)
def _gru_cell_backward(
    gradient: Spec, workspace: Spec, has_bias: bool
) -> tuple[Spec | None, ...]:  # fmt: skip
    batch, width = gradient.sizes
    gates = rows([batch, width * _GRU_GATES], gradient)
    bias = rows([width * _GRU_GATES], gradient) if has_bias else None
    return gates, gates, rows(gradient.sizes, gradient), bias, bias
