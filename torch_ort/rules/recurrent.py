"""Shape rules of recurrent cells that a GPU runs as one kernel each."""

from __future__ import annotations

import torch

from torch_ort.rules.forms import Spec, rows
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


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
