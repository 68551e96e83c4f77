"""Shape rules of recurrent layers on the CPU, and of cells that a GPU runs as one kernel each."""

from __future__ import annotations

import torch

from torch_ort.rules.forms import Size, Spec, rows
from torch_ort.rules.table import rule_of, rule_of_ours

aten = torch.ops.aten

# The parts of what forward keeps of each time for backward, by the name of a cell
# (csrc/cpu/recurrent.h).
_KEPT = {"lstm": 5, "gru": 4, "rnn_tanh": 0, "rnn_relu": 0}


@rule_of_ours("recurrent")
def _layer(
    sequence: Spec, weight: Spec, bias: Spec | None, state: Spec, memory: Spec | None, cell: str,
    reverse: bool, keeps: bool,
) -> tuple[Spec, ...]:  # fmt: skip
    steps, (batch, width) = sequence.sizes[0], state.sizes
    kept = _KEPT[cell] if keeps else 0
    return (
        rows([steps, batch, width], state),
        rows([batch, width], state),
        rows([_or_none(batch, memory), width], state),
        rows([steps, kept, batch, width], state),
    )


@rule_of_ours("recurrent_backward")
def _layer_backward(
    output_gradient: Spec | None, last_gradient: Spec | None, last_memory_gradient: Spec | None,
    weight: Spec, state: Spec, memory: Spec | None, output: Spec, kept: Spec, cell: str,
    reverse: bool,
) -> tuple[Spec, ...]:  # fmt: skip
    steps, (batch, width) = output.sizes[0], state.sizes
    gates = [steps, batch, weight.sizes[0]]
    return (
        rows(gates, state),
        rows(gates if cell == "gru" else [0], state),
        rows([batch, width], state),
        rows([_or_none(batch, memory), width], state),
    )


def _or_none(batch: Size, memory: Spec | None) -> Size:
    return 0 if memory is None else batch


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
