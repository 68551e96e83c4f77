"""Convolutions, pools and recurrent layers that are functions: numbers, against onnxruntime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from function_cases import Case, Given, assert_same, bytes_of, compare, integers, results
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.ort_only


def integers_below_usual(image: Sequence[int]) -> Tensor:
    """Places of a pool with windows of 2, no two of them equal."""
    count, size = torch.Size(image).numel(), 2 ** (len(image) - 2)
    return (torch.arange(count) * size + torch.randint(0, size, (count,))).view(tuple(image))


WINDOWS: dict[str, Given] = {}
for op, (image, kernel, strides, pads), more in itertools.product(
    ("MaxPool", "AveragePool", "LpPool"),
    [((2, 3, 9), [3], [2], [1, 0]), ((1, 2, 7, 8), [2, 3], [3, 2], [1, 1, 0, 2]),
     ((0, 2, 6, 5), [2, 2], [2, 1], [0, 1, 1, 0]),
     ((1, 1, 5, 6, 5), [2, 1, 3], [2, 2, 1], [0] * 6)],
    [{}, {"ceil_mode": 1}, {"ceil_mode": 1, "dilations": 2}, {"dilations": 2},
     {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID", "ceil_mode": 1}],
):  # fmt: skip
    attributes = {"kernel_shape": kernel, "strides": strides, **more}
    if "dilations" in more:
        attributes["dilations"] = [2] * len(kernel)
    if "auto_pad" not in more:
        attributes["pads"] = pads
    elif "SAME" in str(more):  # onnxruntime pads by less than nothing, where windows leave gaps
        attributes["strides"] = [min(pair) for pair in zip(kernel, strides, strict=True)]
    words = f"{op}: {len(kernel)}-D, {image[0]}, {more}"
    WINDOWS[words] = ([image], attributes)
    if op == "AveragePool":
        WINDOWS[f"{words}, padding counts"] = ([image], {**attributes, "count_include_pad": 1})
    if op == "MaxPool":
        WINDOWS[f"{words}, places"] = ([image], attributes, 2)
        WINDOWS[f"{words}, columns"] = ([image], {**attributes, "storage_order": 1}, 2)
for op, kernels in (("Conv", (2, 3)), ("ConvTranspose", (3, 2))):
    for rank, auto_pad in itertools.product((1, 2, 3), ("SAME_UPPER", "SAME_LOWER", "VALID")):
        image = (2, 4, 7, 5, 6)[: 2 + rank]
        WINDOWS[f"{op}: {rank}-D, {auto_pad}"] = (
            [image, (4, *kernels[:1], *(3, 2, 4)[:rank]), (6 if op == "ConvTranspose" else 4,)],
            {"auto_pad": auto_pad, "strides": [2, 1, 3][:rank], "group": 2},
        )  # fmt: skip
WINDOWS |= {
    "ConvTranspose: sizes": (
        [(1, 2, 5, 4), (2, 3, 4, 3), (3,)], {"output_shape": [11, 9], "strides": [2, 2]}
    ),
    "ConvTranspose: sizes, same upper": (
        [(1, 2, 5), (2, 3, 4), (3,)],
        {"output_shape": [9], "strides": [2], "auto_pad": "SAME_UPPER"},
    ),
    "ConvTranspose: sizes and more": (
        [(2, 2, 5, 4), (2, 1, 3, 3), (1,)],
        {"output_shape": [14, 10], "strides": [3, 2], "output_padding": [1, 1]},
    ),
    "ConvTranspose: more than there is": (
        [(2, 2, 5), (2, 3, 3), (3,)], {"output_shape": [17], "strides": [3]}
    ),
    "ConvTranspose: none": ([(0, 2, 5), (2, 3, 3)], {"auto_pad": "SAME_LOWER", "strides": [2]}),
    "MaxPool: int8": (
        [(bytes_of, (1, 2, 6, 5), torch.int8)], {"kernel_shape": [2, 3], "ceil_mode": 1}
    ),
    "MaxPool: int8, pads that differ": (
        [(bytes_of, (1, 2, 6, 5), torch.int8)], {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}
    ),
    "MaxPool: uint8": ([(bytes_of, (1, 2, 6))], {"kernel_shape": [3], "strides": [2]}),
    **{
        f"GlobalLpPool: {p}, {len(image)}-D": ([image], {"p": p}, 1, 13)
        for p in (1, 2, 3) for image in ((2, 3, 5), (1, 2, 3, 4), (0, 1, 2, 2, 3))
    },
    **{
        f"MaxUnpool: {image}": (
            [image, (integers_below_usual, image)],
            {"kernel_shape": [2] * (len(image) - 2), "strides": [2] * (len(image) - 2)},
        )
        for image in ((2, 1, 3), (1, 2, 3, 2), (1, 1, 2, 1, 3))
    },
    **{
        f"Col2Im: {words}": (
            [(batch, 2 * blocks, count), image, block], attributes, 1, 18
        )
        for words, batch, blocks, count, image, block, attributes in (
            ("1-D", 2, 3, 4, [8], [3], {"strides": [2], "pads": [0, 1]}),
            ("2-D", 1, 6, 16, [5, 6], [2, 3], {}),
            ("none", 0, 4, 12, [4, 5], [2, 2], {}),
            ("3-D", 1, 2, 32, [4, 2, 5], [1, 1, 2], {"pads": [0] * 6}),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    compare(name, WINDOWS[name], rtol=1e-3, atol=1e-4)


def test_blocks_with_gaps() -> None:
    """PyTorch is asked, since onnxruntime adds blocks with dilations to wrong places."""
    case = Case(
        [(2, 12, 9), [6, 7], [2, 3]],
        {"dilations": [2, 1], "strides": [2, 2], "pads": [1, 0, 1, 0]},
        1,
        18,
    )
    inputs = case.made()
    want = F.fold(inputs[0], (6, 7), (2, 3), (2, 1), (1, 0), (2, 2))
    torch.testing.assert_close(results("Col2Im", case, inputs)[1][0], want)


# ---- recurrent layers


def short(length: int, batch: int) -> Tensor:
    """Lengths of sequences: the first is whole."""
    lengths = integers(1, length + 1, (batch,), torch.int32)
    lengths[0] = length
    return lengths


LAYERS = {"RNN": (1, 1), "GRU": (3, 2), "LSTM": (4, 3)}  # gates, and activations
ALPHA = ["Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu"]
BETA = ["Affine", "ScaledTanh", "HardSigmoid"]
FUNCTIONS = ["Relu", "Tanh", "Sigmoid", *ALPHA, "Softsign", "Softplus"]


def layer(
    op: str, length: int, batch: int, hidden: int, direction: str, is_short: bool, has_states: bool
) -> list[Any]:
    gates, directions = LAYERS[op][0], 2 if direction == "bidirectional" else 1
    state = (directions, batch, hidden) if has_states else None
    return [
        (length, batch, 2), (directions, gates * hidden, 2), (directions, gates * hidden, hidden),
        (directions, 2 * gates * hidden) if has_states else None,
        (short, length, batch) if is_short else None, state, *([state] if op == "LSTM" else []),
    ]  # fmt: skip


def functions(op: str, first: int, directions: int) -> dict[str, Any]:
    names = [FUNCTIONS[(first + i) % len(FUNCTIONS)] for i in range(LAYERS[op][1] * directions)]
    return {
        "activations": names,
        "activation_alpha": [0.4 + 0.1 * i for i in range(sum(each in ALPHA for each in names))],
        "activation_beta": [0.3 + 0.1 * i for i in range(sum(each in BETA for each in names))],
    }


RECURRENT: dict[str, Given] = {}
for op, direction, is_short, has_states in itertools.product(
    LAYERS, ("forward", "reverse", "bidirectional"), (False, True), (False, True)
):
    inputs = layer(op, 5, 3, 4, direction, is_short, has_states)
    named = {"direction": direction, "hidden_size": 4}
    words = (
        f"{op}: {direction}, {'lengths' if is_short else 'whole'}{', states' if has_states else ''}"
    )
    num_outputs = 3 if op == "LSTM" else 2
    RECURRENT[words] = (inputs, named, num_outputs)
    RECURRENT[f"{words}, clip"] = (inputs, {**named, "clip": 0.7}, num_outputs)
    if op == "GRU":
        RECURRENT[f"{words}, linear"] = (inputs, {**named, "linear_before_reset": 1}, 2)
    if op == "LSTM":
        peepholes = (2 if direction == "bidirectional" else 1, 12)
        RECURRENT[f"{words}, peepholes"] = ([*inputs, peepholes], {**named, "input_forget": 1}, 3)
for op, first in itertools.product(LAYERS, range(len(FUNCTIONS))):
    inputs = layer(op, 1, 2, 3, "bidirectional", False, True)
    named = {"direction": "bidirectional", "hidden_size": 3}
    RECURRENT[f"{op}: functions from {FUNCTIONS[first]}"] = (
        inputs, {**named, **functions(op, first, 2)}, 3 if op == "LSTM" else 2
    )  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    compare(name, RECURRENT[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", LAYERS)
def test_layout_1_is_layout_0_transposed(op: str) -> None:
    """onnxruntime has no layout 1."""
    case = Case(layer(op, 4, 3, 5, "bidirectional", True, True), {"direction": "bidirectional"},
                3 if op == "LSTM" else 2)  # fmt: skip
    inputs = case.made()
    _, (all_states, *last) = results(op, case, inputs)
    turned = [x.transpose(0, 1).contiguous() if i in (0, 5, 6) else x for i, x in enumerate(inputs)]
    other = Case([], {**case.attributes, "layout": 1}, case.num_outputs)
    _, (got, *got_last) = results(op, other, turned)
    assert_same([got], [all_states.permute(2, 0, 1, 3)])
    assert_same(got_last, [each.transpose(0, 1) for each in last])
