"""RNN, GRU and LSTM.

PyTorch's kernels compute the layers that PyTorch has itself. All others, those with lengths of
their own for sequences included, are a loop over the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.indexing import reversed_within
from torch_ort.onnx.functions.table import Dims, of_onnx

# Activations by name: the function, and the defaults of its alpha and beta.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], float, float]] = {
    "relu": (lambda x, a, b: F.relu(x), 0, 0),
    "tanh": (lambda x, a, b: x.tanh(), 0, 0),
    "sigmoid": (lambda x, a, b: x.sigmoid(), 0, 0),
    "affine": (lambda x, a, b: a * x + b, 1, 0),
    "leakyrelu": (lambda x, a, b: F.leaky_relu(x, a), 0.01, 0),
    "thresholdedrelu": (lambda x, a, b: F.threshold(x, a, 0.0), 1, 0),
    "scaledtanh": (lambda x, a, b: a * torch.tanh(b * x), 1, 1),
    "hardsigmoid": (lambda x, a, b: (a * x + b).clamp(0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: F.elu(x, a), 1, 0),
    "softsign": (lambda x, a, b: F.softsign(x), 0, 0),
    "softplus": (lambda x, a, b: F.softplus(x), 0, 0),
}
# How many of these have an alpha, and a beta: those that the attributes count.
_HAVE_ALPHA = ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
_HAVE_BETA = ("affine", "scaledtanh", "hardsigmoid")

Activation = Callable[[Tensor], Tensor]
# Gives the next states from the input's part of the gates and the states, each (batch, ...).
Cell = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _names(given: Sequence[str], usual: Sequence[str], directions: int) -> list[str]:
    """Give the names of activations of all directions, in small letters."""
    names = [name.lower() for name in given] or [*usual] * directions
    if len(names) != len(usual) * directions:
        raise _C.UserError(
            f"recurrent layer: activations: got {len(names)}, want {len(usual) * directions}"
        )
    return names


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> list[Activation]:
    rest_alphas, rest_betas, found = list(alphas), list(betas), []
    for name in names:
        key = name.lower()
        if key not in _ACTIVATIONS:
            raise _C.UserError(f"recurrent layer: activations: got {name}, want one of ONNX's")
        function, alpha, beta = _ACTIVATIONS[key]
        if key in _HAVE_ALPHA and rest_alphas:
            alpha = rest_alphas.pop(0)
        if key in _HAVE_BETA and rest_betas:
            beta = rest_betas.pop(0)
        found.append(lambda x, function=function, alpha=alpha, beta=beta: function(x, alpha, beta))
    return found


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else x.clamp(-clip, clip)


def _reordered(weight: Tensor, order: Sequence[int]) -> Tensor:
    """Give (gates · hidden, ...) with the gates in another order."""
    parts = weight.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def _by_kernel(
    kernel: Callable, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None,
    states: tuple[Tensor, ...], order: Sequence[int], direction: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a kernel of PyTorch's over (length, batch, features); gives what ONNX's layer gives.

    `order` has the places of PyTorch's gates among ONNX's.
    """
    params = []
    for i in range(w.shape[0]):
        params += [_reordered(w[i], order), _reordered(r[i], order)]
        if b is not None:
            params += [_reordered(half, order) for half in b[i].chunk(2)]
    is_reverse = direction == "reverse"
    given = states if len(states) > 1 else states[0]
    result, *last = kernel(
        x.flip(0) if is_reverse else x, given, params, b is not None, 1, 0.0, False,
        direction == "bidirectional", False,
    )  # fmt: skip
    if is_reverse:
        result = result.flip(0)
    length, batch, _ = result.shape
    by_direction = result.view(length, batch, w.shape[0], r.shape[-1]).transpose(1, 2)
    return by_direction, *last


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse (length, batch, ...) along the first dim, each sequence within its length."""
    return x.flip(0) if lengths is None else reversed_within(x, lengths)


def _by_steps(
    cells: Sequence[Cell], x: Tensor, w: Tensor, b: Tensor | None, states: tuple[Tensor, ...],
    lengths: Tensor | None, direction: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a cell for each direction over (length, batch, features), position by position.

    A state stays what it is behind the end of its sequence, and results are 0 there.
    """
    results, last = [], []
    for i, cell in enumerate(cells):
        is_reverse = direction == "reverse" or i == 1
        given = _reversed(x, lengths) if is_reverse else x
        gates = given @ w[i].t()
        if b is not None:
            gates = gates + b[i]
        state = tuple(each[i] for each in states)
        steps = []
        for position in range(x.shape[0]):
            made = cell(gates[position], state)
            if lengths is None:
                state = made
                steps.append(state[0])
                continue
            is_inside = (position < lengths).unsqueeze(1)
            state = tuple(
                torch.where(is_inside, new, old) for new, old in zip(made, state, strict=True)
            )
            steps.append(torch.where(is_inside, made[0], 0))
        result = torch.stack(steps) if steps else gates[..., : state[0].shape[-1]]
        results.append(_reversed(result, lengths) if is_reverse else result)
        last.append(state)
    return torch.stack(results, 1), *(torch.stack(each) for each in zip(*last, strict=True))


def _run(
    x: Tensor, w: Tensor, r: Tensor, lengths: Tensor | None, states: Sequence[Tensor | None],
    layout: int, run: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a layer with positions first, and states of zeros where there are none."""
    if layout:
        x = x.transpose(0, 1)
    zeros = x.new_zeros(w.shape[0], x.shape[1], r.shape[-1])
    given = tuple(
        zeros if each is None else each.transpose(0, 1) if layout else each for each in states
    )
    result, *last = run(x, given)
    if layout:  # (batch, length, directions, hidden), and (batch, directions, hidden)
        return result.permute(2, 0, 1, 3), *(each.transpose(0, 1) for each in last)
    return result, *last


def _types(
    layer: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor | None, layout: int = 0,
    **attributes: Any,
) -> list[tuple[torch.dtype, Dims]]:  # fmt: skip
    """Run a layer over one position; of all of them, the results are as long as the input.

    On the meta device, PyTorch computes each position by itself, of hundreds that it is tried with.
    """
    along = 1 if layout else 0
    results = layer(
        x.narrow(along, 0, min(x.shape[along], 1)), *others, layout=layout, **attributes
    )
    types: list[tuple[torch.dtype, Dims]] = [(each.dtype, list(each.shape)) for each in results]
    types[0][1][along] = x.shape[along]
    return types


@of_onnx("RNN", types=lambda *inputs, **attributes: _types(rnn, *inputs, **attributes))
def rnn(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, *, activations: Sequence[str] = (),
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
    clip: float | None = None, direction: str = "forward", hidden_size: int = 0, layout: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute h = f(W x + R h + b) over (length, batch, features).

    Gives all states (length, directions, batch, hidden), and the last ones.
    """
    directions = w.shape[0]
    names = _names(activations, ["tanh"], directions)

    def run(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}.get(names[0])
        if kernel and len(set(names)) == 1 and sequence_lens is None and clip is None:
            return _by_kernel(kernel, x, w, r, b, states, (0,), direction)
        cells = []
        for i, f in enumerate(_activations(names, activation_alpha, activation_beta)):

            def cell(gate: Tensor, state: tuple[Tensor, ...], i: int = i, f: Activation = f):
                return (f(_clipped(gate + state[0] @ r[i].t(), clip)),)

            cells.append(cell)
        bias = None if b is None else torch.stack([sum(each.chunk(2)) for each in b])
        return _by_steps(cells, x, w, bias, states, sequence_lens, direction)

    return _run(x, w, r, sequence_lens, [initial_h], layout, run)


@of_onnx("GRU", types=lambda *inputs, **attributes: _types(gru, *inputs, **attributes))
def gru(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, *, activations: Sequence[str] = (),
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
    clip: float | None = None, direction: str = "forward", hidden_size: int = 0, layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gated recurrent units; gates are update, reset and hidden. Shapes are those of `rnn`."""
    directions = w.shape[0]
    names = _names(activations, ["sigmoid", "tanh"], directions)
    is_usual = names == ["sigmoid", "tanh"] * directions and sequence_lens is None and clip is None

    def run(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if is_usual and linear_before_reset:
            return _by_kernel(torch.gru, x, w, r, b, states, (1, 0, 2), direction)
        functions = _activations(names, activation_alpha, activation_beta)
        cells = []
        for i in range(directions):
            f, g = functions[2 * i : 2 * i + 2]
            of_state = None if b is None else b[i].chunk(2)[1]

            def cell(
                gates: Tensor, state: tuple[Tensor, ...], i: int = i, f: Activation = f,
                g: Activation = g, bias: Tensor | None = of_state,
            ) -> tuple[Tensor, ...]:  # fmt: skip
                h = state[0]
                hidden = h.shape[-1]
                rzr, rh = r[i][: 2 * hidden], r[i][2 * hidden :]
                of_gates = gates[:, : 2 * hidden] + h @ rzr.t()
                if bias is not None:
                    of_gates = of_gates + bias[: 2 * hidden]
                update, reset = f(_clipped(of_gates, clip)).chunk(2, -1)
                if linear_before_reset:
                    part = h @ rh.t()
                    part = reset * (part if bias is None else part + bias[2 * hidden :])
                else:
                    part = (reset * h) @ rh.t()
                    part = part if bias is None else part + bias[2 * hidden :]
                new = g(_clipped(gates[:, 2 * hidden :] + part, clip))
                return ((1 - update) * new + update * h,)

            cells.append(cell)
        bias = None if b is None else torch.stack([each.chunk(2)[0] for each in b])
        return _by_steps(cells, x, w, bias, states, sequence_lens, direction)

    return _run(x, w, r, sequence_lens, [initial_h], layout, run)


@of_onnx("LSTM", types=lambda *inputs, **attributes: _types(lstm, *inputs, **attributes))
def lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, initial_c: Tensor | None = None, p: Tensor | None = None, *,
    activations: Sequence[str] = (), activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (), clip: float | None = None, direction: str = "forward",
    hidden_size: int = 0, input_forget: int = 0, layout: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Long short-term memory; gates are input, output, forget and cell. Shapes are those of `rnn`.

    The peephole weights `p` are those of input, output and forget.
    """
    directions = w.shape[0]
    names = _names(activations, ["sigmoid", "tanh", "tanh"], directions)
    is_usual = (
        names == ["sigmoid", "tanh", "tanh"] * directions
        and sequence_lens is None and clip is None and p is None and not input_forget
    )  # fmt: skip

    def run(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if is_usual:
            return _by_kernel(torch.lstm, x, w, r, b, states, (0, 2, 3, 1), direction)
        functions = _activations(names, activation_alpha, activation_beta)
        cells = []
        for i in range(directions):
            f, g, h = functions[3 * i : 3 * i + 3]
            peepholes = (None, None, None) if p is None else p[i].chunk(3)

            def cell(
                gates: Tensor, state: tuple[Tensor, ...], i: int = i, f: Activation = f,
                g: Activation = g, h: Activation = h, peepholes: Sequence = peepholes,
            ) -> tuple[Tensor, ...]:  # fmt: skip
                hidden, cell = state
                into, out, forget, new = (gates + hidden @ r[i].t()).chunk(4, -1)
                of_in, of_out, of_forget = peepholes
                if of_in is not None:
                    into, forget = into + of_in * cell, forget + of_forget * cell
                into = f(_clipped(into, clip))
                kept = 1 - into if input_forget else f(_clipped(forget, clip))
                cell = kept * cell + into * g(_clipped(new, clip))
                if of_out is not None:
                    out = out + of_out * cell
                return f(_clipped(out, clip)) * h(cell), cell

            cells.append(cell)
        bias = None if b is None else torch.stack([sum(each.chunk(2)) for each in b])
        return _by_steps(cells, x, w, bias, states, sequence_lens, direction)

    return _run(x, w, r, sequence_lens, [initial_h, initial_c], layout, run)
