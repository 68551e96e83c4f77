"""Functions that compute ONNX's operators: their gradients, against finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from function_cases import Case, Given, distinct, file_of, tensors_of
from torch import Tensor

import torch_ort

pytestmark = pytest.mark.ort_only


def positive(*sizes: int) -> Tensor:
    return torch.rand(*sizes, dtype=torch.float64) + 0.5


def places(*sizes: int) -> Tensor:
    """Places in grids, between -1 and 1."""
    return torch.rand(*sizes, dtype=torch.float64) * 1.8 - 0.9


def lower(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


def without_first(rows: int, columns: int) -> Tensor:
    """A mask of which the first row allows nothing."""
    return (torch.arange(rows) > 0).unsqueeze(1).expand(rows, columns).clone()


def minus_infinity(rows: int, columns: int) -> Tensor:
    """The same as numbers to be added."""
    return torch.zeros(rows, columns, dtype=torch.float64).masked_fill(
        ~without_first(rows, columns), -torch.inf
    )


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers)


HEADS: list[Any] = [(2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3)]
SQUARE: list[Any] = [(1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3)]
PAST: list[Any] = [(2, 2, 2, 4), (2, 2, 2, 3)]

ATTENTION: dict[str, Given] = {
    "plain": (SQUARE, {}),
    "gqa": (HEADS, {}),
    "scale": (SQUARE, {"scale": 0.3}),
    "flat": ([(2, 3, 8), (2, 4, 4), (2, 4, 6)], {"q_num_heads": 4, "kv_num_heads": 2}),
    "bool mask": ([*HEADS, lower(3, 5)], {}),
    "bool mask, a row of nothing": ([*HEADS, without_first(3, 5)], {}),
    "bool mask, short": ([*HEADS, lower(3, 4)], {}),
    "float mask": ([*HEADS, (2, 1, 3, 5)], {}),
    "float mask, short": ([*HEADS, (3, 4)], {}),
    "float mask, a row of nothing": ([*HEADS, minus_infinity(3, 5)], {}),
    "float mask, causal": ([*SQUARE, (4, 4)], {"is_causal": 1}),
    "causal": (SQUARE, {"is_causal": 1}),
    "causal, gqa": (HEADS, {"is_causal": 1}),
    "past": ([*HEADS, None, *PAST], {}, 3),
    "past, causal": ([*HEADS, None, *PAST], {"is_causal": 1}),
    "past, mask, causal": ([*HEADS, lower(3, 7), *PAST], {"is_causal": 1}),
    "lengths": ([*HEADS, None, None, None, ints(3, 5)], {"is_causal": 1}),
    "lengths, a row of nothing": ([*HEADS, None, None, None, ints(2, 5)], {"is_causal": 1}),
    "left window": (SQUARE, {"left_window_size": 1, "is_causal": 1}),
    "windows": ([*HEADS, None, *PAST], {"left_window_size": 1, "right_window_size": 2}),
    "softcap": (HEADS, {"softcap": 2.0}),
    "softcap, causal": (SQUARE, {"softcap": 2.0, "is_causal": 1}),
    "softcap, float mask": ([*HEADS, (3, 5)], {"softcap": 2.0}),
    "softcap, bool mask, a row of nothing": ([*HEADS, without_first(3, 5)], {"softcap": 2.0}),
    "softcap, float mask, a row of nothing": ([*HEADS, minus_infinity(3, 5)], {"softcap": 2.0}),
    "scores": ([*HEADS, (3, 5)], {"qk_matmul_output_mode": 1}, 4),
    "weights": ([*HEADS, lower(3, 5)], {"qk_matmul_output_mode": 3, "is_causal": 1}, 4),
    "precision": (SQUARE, {"softmax_precision": 11}),
}

ROTARY: dict[str, Given] = {
    "halves": ([(2, 2, 3, 4), (5, 2), (5, 2), ints([0, 1, 4], [2, 2, 3])], {}),
    "pairs": ([(2, 2, 3, 4), (5, 2), (5, 2), ints([0, 1, 4], [2, 2, 3])], {"interleaved": 1}),
    "of tokens": ([(2, 2, 3, 4), (2, 3, 2), (2, 3, 2)], {}),
    "flat, part": (
        [(2, 3, 12), (2, 3, 1), (2, 3, 1)], {"num_heads": 3, "rotary_embedding_dim": 2}
    ),
}  # fmt: skip

LINEAR: list[Any] = [(2, 3, 8), (2, 3, 4), (2, 3, 6)]
STATE = (2, 2, 2, 3)
LINEAR_ATTENTION: dict[str, Given] = {
    rule: (
        [*LINEAR, STATE, (2, 3, 2) if "gated" in rule else None,
         (2, 3, 2) if "delta" in rule else None],
        {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}, 2,
    ) for rule in ("linear", "gated", "delta", "gated_delta")
} | {
    "decay of features": (
        [*LINEAR, None, (2, 3, 4)],
        {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": "gated", "scale": 0.7}, 2,
    ),
}  # fmt: skip

GRID_SAMPLE: dict[str, Given] = {
    f"{len(sizes)}-D, {mode}, {padding}, {align}": (
        [(1, 2, *sizes), (places, 1, 2, *[1] * (len(sizes) - 1), len(sizes))],
        {"mode": mode, "padding_mode": padding, "align_corners": align},
    )
    for sizes, mode in (
        ((4,), "linear"), ((4,), "cubic"), ((3, 4), "linear"), ((3, 4), "cubic"),
        ((3, 4), "nearest"), ((2, 3, 4), "linear"), ((2, 2, 3), "cubic"),
    )
    for padding in ("zeros", "border", "reflection")
    for align in (0, 1)
}  # fmt: skip

COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize",
)  # fmt: skip
RESIZE: dict[str, Given] = {
    f"{mode}, {coordinates}, {word}": (
        [(1, 2, 4, 5),
         [0.0, 0.0, 0.1, 0.2, 1.0, 1.0, 0.8, 0.9] if coordinates[:2] == "tf" else None, *target],
        {"mode": mode, "coordinate_transformation_mode": coordinates},
    )
    for mode in ("nearest", "linear", "cubic")
    for coordinates in COORDINATES
    for word, target in (
        ("factors", ([1.0, 1.0, 0.6, 1.7],)), ("sizes", (None, [1, 2, 7, 3]))
    )
} | {
    "antialias": ([(1, 1, 6, 7), None, [1, 1, 0.4, 0.6]], {"mode": "linear", "antialias": 1}),
    "antialias, cubic": ([(1, 1, 6, 7), None, [1, 1, 0.4, 2]], {"mode": "cubic", "antialias": 1}),
    "exclude outside": (
        [(1, 1, 3, 4), None, [1.0, 1.0, 2.0, 0.8]], {"mode": "cubic", "exclude_outside": 1}
    ),
    "axes": ([(3, 4, 2), None, None, [5, 3]], {"mode": "linear", "axes": [0, 1]}),
    "aspect": (
        [(1, 1, 4, 6), None, None, [7, 8]],
        {"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"},
    ),
}  # fmt: skip

ROIS = torch.tensor([[0.3, 0.4, 3.6, 4.1], [1.1, 0.2, 5.3, 2.7]], dtype=torch.float64)
OFFSETS = (2, 8, 2, 3)  # of windows of 2 by 2 over images of 3 by 4
SAMPLING: dict[str, Given] = {
    "AffineGrid: 2-D": ([(2, 2, 3), [2, 1, 3, 4]], {"align_corners": 1}),
    "AffineGrid: 3-D": ([(1, 3, 4), [1, 1, 2, 3, 2]], {}),
    **{
        f"RoiAlign: {mode}, {ratio}, {coordinates}": (
            [(2, 2, 5, 6), ROIS, ints(1, 0)],
            {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3,
             "coordinate_transformation_mode": coordinates},
        )
        for mode in ("avg", "max")
        for ratio, coordinates in ((0, "half_pixel"), (2, "half_pixel"), (2, "output_half_pixel"))
    },
    "DeformConv: plain": ([(2, 2, 3, 4), (3, 2, 2, 2), (places, *OFFSETS)], {}),
    "DeformConv: bias, mask": (
        [(2, 2, 3, 4), (3, 2, 2, 2), (places, *OFFSETS), (3,), (2, 4, 2, 3)], {}
    ),
    "DeformConv: groups, strides": (
        [(1, 4, 5, 4), (2, 2, 2, 1), (places, 1, 8, 3, 3), None, (1, 4, 3, 3)],
        {"group": 2, "offset_group": 2, "strides": [2, 2], "pads": [1, 0, 1, 1],
         "dilations": [2, 1]},
    ),
}  # fmt: skip

PICKED: dict[str, Given] = {
    "Col2Im: 2-D": ([(1, 8, 6), [3, 4], [2, 2]], {}),
    "Col2Im: 1-D, strides": (
        [(2, 4, 4), [6], [2]], {"strides": [2], "pads": [1, 1], "dilations": [1]}
    ),
    "Col2Im: 3-D": ([(1, 4, 24), [2, 4, 4], [2, 1, 2]], {"dilations": [1, 1, 1],
                    "strides": [1, 1, 1], "pads": [0, 0, 0, 1, 0, 0]}),
    **{
        f"ScatterND: {reduction}": (
            [(distinct, 4, 3), ints([[2], [-4]], [[2], [1]]), (distinct, 2, 2, 3)],
            {"reduction": reduction},
        )
        for reduction in ("add", "mul", "max", "min")
    },
    "ScatterND: none": ([(4, 3), ints([2, 1], [-4, -1]), (2,)], {}),
    "GatherND: negative": ([(3, 4, 2), ints([[0, 1], [2, -1]])], {}),
    "GatherND: batch": ([(2, 3, 4, 2), ints([[1], [-1]], [[0], [2]])], {"batch_dims": 1}),
    "Scatter: axis": ([(3, 4), ints([0, -1], [2, 1]), (2, 2)], {"axis": 1}),
    "TensorScatter: linear": ([(2, 1, 5, 2), (2, 1, 2, 2), ints(1, 3)], {}),
    "TensorScatter: circular": ([(2, 5, 2), (2, 3, 2), ints(1, 4)], {"mode": "circular"}),
    "TensorScatter: start": ([(2, 5, 2), (2, 3, 2)], {"axis": 1}),
    "OneHot: values": ([ints(0, -1, 7), [3], (2,)], {"axis": 0}),
    "Compress: axis": ([(3, 4), torch.tensor([True, False, True])], {"axis": 1}),
    "Compress: flat": ([(3, 4), torch.tensor([False, True, True, False, True])], {}),
    "Unique: flat": ([(distinct, 2, 3)], {}),
    "Unique: axis": ([(distinct, 3, 2)], {"axis": 0, "sorted": 0}),
    "TopK: largest": ([(distinct, 3, 5), [2]], {}),
    "TopK: smallest": ([(distinct, 3, 5), [2]], {"axis": 0, "largest": 0}),
    "ReverseSequence: time first": ([(4, 3, 2), ints(1, 4, 0)], {}),
    "ReverseSequence: batch first": (
        [(2, 4), ints(3, 2)], {"batch_axis": 0, "time_axis": 1}
    ),
    "DepthToSpace: DCR": ([(1, 8, 2, 3)], {"blocksize": 2}),
    "DepthToSpace: CRD": ([(1, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    "SpaceToDepth: DCR": ([(1, 2, 4, 6)], {"blocksize": 2}),
    "CenterCropPad: both": ([(5, 3, 2), [2, 6]], {"axes": [0, 1]}),
    "Pad: edge": ([(2, 3), [1, 0, 2, 1]], {"mode": "edge"}),
    "Pad: reflect": ([(3, 4), [1, 2, 0, 3]], {"mode": "reflect"}),
    "Pad: wrap": ([(2, 3), [1, 5, 0, 1]], {"mode": "wrap"}),
    "Pad: negative": ([(4, 3), [-1, 2, 1, -1]], {"mode": "edge"}),
    "Pad: axes": ([(2, 3, 2), [1, 2], None, [1]], {"mode": "reflect"}),
}  # fmt: skip

POOLS: dict[str, Given] = {
    **{
        f"{op}: {word}": ([(distinct, 1, 2, *sizes)], attributes)
        for op in ("AveragePool", "MaxPool", "LpPool")
        for word, sizes, attributes in (
            ("1-D", (6,), {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
            ("ceil", (5, 4), {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1,
                              "pads": [1, 1, 0, 1]}),
            ("same upper", (4, 5), {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER",
                                    "strides": [2, 1]}),
            ("same lower", (4, 5), {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER",
                                    "strides": [2, 2]}),
            ("valid", (4, 5), {"kernel_shape": [3, 2], "auto_pad": "VALID"}),
            ("dilations", (5, 5), {"kernel_shape": [2, 3], "dilations": [2, 2], "ceil_mode": 1,
                                   "strides": [2, 1]}),
            ("3-D", (3, 2, 4), {"kernel_shape": [2, 2, 2], "ceil_mode": 1, "strides": [2, 1, 2]}),
        )
    },
    "AveragePool: padding counts": (
        [(1, 2, 4, 5)],
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1,
         "count_include_pad": 1},
    ),
    "AveragePool: dilations, padding counts": (
        [(1, 2, 4, 5)],
        {"kernel_shape": [2, 2], "dilations": [2, 1], "pads": [1, 0, 1, 1],
         "count_include_pad": 1},
    ),
    "MaxPool: places": (
        [(distinct, 2, 1, 4, 5)],
        {"kernel_shape": [2, 3], "pads": [1, 0, 0, 1], "storage_order": 1}, 2,
    ),
    "LpPool: p 1": ([(distinct, 1, 2, 5)], {"kernel_shape": [2], "p": 1}),
    "LpPool: p 3": ([(distinct, 1, 2, 5)], {"kernel_shape": [2], "p": 3}),
    "GlobalLpPool: 2": ([(2, 2, 3, 2)], {}),
    "GlobalLpPool: 3": ([(2, 2, 4)], {"p": 3}),
    "MaxUnpool: usual": ([(1, 1, 2, 2), ints([[[[5, 7], [13, 15]]]])],
                         {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "MaxUnpool: sizes": ([(1, 1, 2, 2), ints([[[[5, 7], [13, 15]]]]), [1, 1, 5, 6]],
                         {"kernel_shape": [2, 2], "strides": [2, 2]}),
}  # fmt: skip

CONVOLUTIONS: dict[str, Given] = {
    "Conv: same upper": (
        [(1, 2, 4, 5), (4, 1, 3, 2), (4,)],
        {"auto_pad": "SAME_UPPER", "group": 2, "strides": [2, 1]},
    ),
    "Conv: same lower, 1-D": (
        [(2, 1, 6), (2, 1, 2)], {"auto_pad": "SAME_LOWER", "dilations": [3]}
    ),
    "ConvTranspose: same upper": (
        [(1, 2, 3, 2), (2, 3, 3, 2), (3,)], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}
    ),
    "ConvTranspose: same lower": (
        [(1, 2, 3), (2, 2, 4)], {"auto_pad": "SAME_LOWER", "strides": [2], "group": 2}
    ),
    "ConvTranspose: sizes": (
        [(1, 1, 3, 3), (1, 2, 3, 3)],
        {"output_shape": [9, 8], "strides": [3, 2], "output_padding": [1, 1]},
    ),
    "CausalConvWithState: plain": ([(2, 3, 4), (3, 1, 3)], {}, 2),
    "CausalConvWithState: all": (
        [(2, 3, 4), (3, 1, 3), (3,), (2, 3, 2)], {"activation": "silu"}, 2
    ),
    "CausalConvWithState: one place": ([(2, 3, 4), (3, 1, 1)], {}, 2),
}  # fmt: skip


def layer(gates: int, directions: int = 1, *, layout: int = 0, lengths: Any = None) -> list[Any]:
    """Inputs of a recurrent layer with 2 features, 3 hidden ones, 3 positions and a batch of 2."""
    x, state = (3, 2, 2), (directions, 2, 3)
    if layout:
        x, state = (2, 3, 2), (2, directions, 3)
    return [
        x, (directions, 3 * gates, 2), (directions, 3 * gates, 3), (directions, 6 * gates), lengths,
        state,
    ]  # fmt: skip


SHORT = torch.tensor([3, 1], dtype=torch.int32)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {
    "RNN": ["Softsign"], "GRU": ["HardSigmoid", "ScaledTanh"],
    "LSTM": ["Sigmoid", "Affine", "Elu"],
}  # fmt: skip
RECURRENT: dict[str, Given] = {}
for op, gates in GATES.items():
    num_outputs = 3 if op == "LSTM" else 2

    def states(given: list[Any], op: str = op) -> list[Any]:
        return [*given, given[-1]] if op == "LSTM" else given

    RECURRENT |= {
        f"{op}: {word}": (states(given), attributes, num_outputs)
        for word, given, attributes in (
            ("forward", layer(gates), {}),
            ("reverse", layer(gates), {"direction": "reverse"}),
            ("both", layer(gates, 2), {"direction": "bidirectional"}),
            ("layout 1", layer(gates, 2, layout=1), {"direction": "bidirectional", "layout": 1}),
            ("lengths", layer(gates, lengths=SHORT), {}),
            ("lengths, both", layer(gates, 2, lengths=SHORT), {"direction": "bidirectional"}),
            ("lengths, reverse, layout 1", layer(gates, layout=1, lengths=SHORT),
             {"direction": "reverse", "layout": 1}),
            ("clip", layer(gates), {"clip": 0.6}),
            ("functions", layer(gates),
             {"activations": FUNCTIONS[op], "activation_alpha": [0.3, 0.8],
              "activation_beta": [0.6, 0.7]}),
        )
    } | {f"{op}: weights alone": (layer(gates)[:3], {}, num_outputs)}  # fmt: skip
RECURRENT |= {
    "RNN: relu": (layer(1), {"activations": ["Relu"]}, 2),
    "GRU: linear before reset": (layer(3, 2), {"linear_before_reset": 1,
                                               "direction": "bidirectional"}, 2),
    "GRU: linear before reset, lengths": (
        layer(3, lengths=SHORT), {"linear_before_reset": 1, "direction": "reverse"}, 2
    ),
    "LSTM: peepholes": ([*layer(4, 2), (2, 2, 3), (2, 9)], {"direction": "bidirectional"}, 3),
    "LSTM: input and forget": ([*layer(4), (1, 2, 3)], {"input_forget": 1}, 3),
}  # fmt: skip

CHANNELS = (2, 3, 2, 2)
ONE_VALUE = torch.full((1, 2, 3), 0.7, dtype=torch.float64, requires_grad=True)
NORMS: dict[str, Given] = {
    "InstanceNormalization: 2-D": ([CHANNELS, (3,), (3,)], {}),
    "InstanceNormalization: 1-D": ([(2, 3, 4), (3,), (3,)], {"epsilon": 0.1}),
    "InstanceNormalization: one element": ([(2, 3, 1), (3,), (3,)], {"epsilon": 0.1}),
    "BatchNormalization: 2-D": (
        [CHANNELS, (3,), (3,), ONE_VALUE.new_ones(3), ONE_VALUE.new_ones(3)],
        {"training_mode": 1},
    ),
    "BatchNormalization: no image": (
        [(4, 3), (3,), (3,), ONE_VALUE.new_ones(3), ONE_VALUE.new_ones(3)],
        {"training_mode": 1, "epsilon": 0.01},
    ),
    "BatchNormalization: one element": (
        [(1, 3), (3,), (3,), ONE_VALUE.new_ones(3), ONE_VALUE.new_ones(3)],
        {"training_mode": 1, "epsilon": 0.1},
    ),
    "LRN: odd": ([(2, 5, 2)], {"size": 3, "alpha": 0.5, "bias": 2.0}),
    "LRN: even": ([(1, 4, 2, 2)], {"size": 4, "alpha": 0.5, "beta": 0.6}),
    "MeanVarianceNormalization: usual": ([CHANNELS], {}),
    "MeanVarianceNormalization: axes": ([(2, 3, 4)], {"axes": [-1, 0]}),
    "LpNormalization: 1": ([(distinct, 2, 3)], {"p": 1}),
    "LpNormalization: 2": ([(2, 3, 2)], {"axis": 1}),
    "SimplifiedLayerNormalization: last": ([(2, 3, 4), (4,)], {}),
    "SimplifiedLayerNormalization: two": ([(2, 3, 4), (3, 4)], {"axis": 1}),
}  # fmt: skip

LABELS: dict[str, Any] = {
    "2-D": ((4, 3), ints(0, 2, 1, 2)),
    "3-D": ((2, 3, 2), ints([0, 2], [1, 1])),
    "4-D": ((1, 3, 2, 2), ints([[0, 2], [1, 1]])),
    "5-D": ((1, 3, 2, 1, 2), ints([[[0, 2]], [[1, 1]]])),
}
LOSSES: dict[str, Given] = {
    f"{op}: {rank}, {reduction}{words}": (
        [*LABELS[rank], (positive, 3) if words else None],
        {"reduction": reduction, **({"ignore_index": 1} if "without" in words else {})},
        2 if op[0] == "S" and rank != "2-D" else 1,
    )
    for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    for rank in LABELS
    for reduction in ("mean", "sum", "none")
    for words in ("", ", weights", ", weights without one")
}  # fmt: skip

SIGNALS: dict[str, Given] = {
    "DFT: real": ([(2, 5, 1), None, [1]], {}),
    "DFT: complex": ([(2, 4, 2), None, [-2]], {}),
    "DFT: inverse": ([(2, 4, 2), None, [1]], {"inverse": 1}),
    "DFT: one side": ([(2, 6, 1), None, [1]], {"onesided": 1}),
    "DFT: one side, inverse": ([(2, 4, 2), [6], [1]], {"onesided": 1, "inverse": 1}),
    "DFT: longer": ([(3, 4, 2), [6], [0]], {}),
    "DFT: shorter": ([(2, 5, 1), [3], [1]], {}),
    "STFT: window": ([(2, 8, 1), [2], (4,)], {}),
    "STFT: complex": ([(1, 6, 2), [3], (4,)], {"onesided": 0}),
    "STFT: no window": ([(1, 7, 1), [2], None, [3]], {}),
}

SINGLE: dict[str, Given] = {
    "Celu: alpha": ([(distinct, 3, 4)], {"alpha": 0.6}),
    "Shrink: all": ([(distinct, 3, 4)], {"lambd": 0.45, "bias": 0.2}),
    "ThresholdedRelu: alpha": ([(distinct, 3, 4)], {"alpha": 0.6}),
    "SwiGLU: plain": ([(2, 3), (2, 3)], {}),
    "SwiGLU: alpha": ([(2, 3), (2, 3)], {"alpha": 1.7}),
    "Sum: broadcast": ([(2, 3), (3,), (2, 1)], {}),
    "Mean: broadcast": ([(2, 3), (3,), (2, 1)], {}),
    "Einsum: products": ([(2, 3, 2), (2, 2, 4)], {"equation": "bij,bjk->bik"}),
    "Einsum: ellipsis, diagonal": ([(2, 3, 3), (3,)], {"equation": "...ii,i->...i"}),
    "Einsum: implicit": ([(2, 3), (3, 2)], {"equation": "ij,jk"}),
    **{
        f"{op}: {exclusive}{reverse}": (
            [(positive, 2, 4), [1]], {"exclusive": exclusive, "reverse": reverse}
        )
        for op in ("CumSum", "CumProd") for exclusive in (0, 1) for reverse in (0, 1)
    },
    "ReduceSumSquare: axes": ([(2, 3, 2), [0, -1]], {"keepdims": 0}),
    "ReduceSumSquare: all": ([(2, 3)], {}),
    "ReduceSumSquare: none": ([(2, 3)], {"noop_with_empty_axes": 1}),
    "ReduceLogSum: axes": ([(positive, 2, 3, 2), [1]], {}),
    "ReduceLogSum: attribute": ([(positive, 2, 3)], {"axes": [1], "keepdims": 0}),
    "Det: batch": ([(2, 3, 3)], {}),
}  # fmt: skip

GRADIENTS: dict[str, Given] = {
    f"{op}: {words}": case
    for op, cases in {
        "Attention": ATTENTION, "RotaryEmbedding": ROTARY, "LinearAttention": LINEAR_ATTENTION,
        "GridSample": GRID_SAMPLE, "Resize": RESIZE,
    }.items()
    for words, case in cases.items()
}  # fmt: skip
GRADIENTS |= SAMPLING | PICKED | POOLS | CONVOLUTIONS | RECURRENT | NORMS | LOSSES | SIGNALS
GRADIENTS |= SINGLE


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    case = Case(*GRADIENTS[name])
    inputs = case.made(torch.float64)
    module = torch_ort.load_onnx(file_of(name.partition(":")[0], case, inputs))
    given = tensors_of(inputs)
    leaves = [
        each for each, of_case in zip(inputs, case.inputs, strict=True)
        if isinstance(of_case, tuple) and each.is_floating_point()
    ]  # fmt: skip
    assert leaves
    for each in leaves:
        each.requires_grad_()

    def call(*values: Tensor) -> Sequence[Tensor]:
        rest = iter(values)
        outputs = module(*(next(rest) if each.requires_grad else each for each in given))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [each for each in outputs if each.requires_grad]

    assert torch.autograd.gradcheck(call, leaves)


# Inputs of zeros, at which roots and quotients have no finite slope of their own.
ZEROS: dict[str, Given] = {
    "LpNormalization: 1": ([(torch.zeros, 2, 3)], {"p": 1}),
    "LpNormalization: 2": ([(torch.zeros, 2, 3)], {}),
    "GlobalLpPool: 2": ([(torch.zeros, 1, 2, 3)], {}),
    "GlobalLpPool: 3": ([(torch.zeros, 1, 2, 3)], {"p": 3}),
    "LpPool: 2": ([(torch.zeros, 1, 2, 4)], {"kernel_shape": [2]}),
    "LpPool: 3": ([(torch.zeros, 1, 2, 4)], {"kernel_shape": [2], "p": 3}),
    "MeanVarianceNormalization: usual": ([(torch.zeros, 2, 3, 2, 2)], {}),
    "InstanceNormalization: usual": ([(torch.zeros, 2, 3, 4), (3,), (3,)], {}),
    "BatchNormalization: usual": (
        [(torch.zeros, 2, 3, 4), (3,), (3,), torch.ones(3), torch.ones(3)], {"training_mode": 1}
    ),
    "LRN: usual": ([(torch.zeros, 1, 4, 2)], {"size": 3}),
    "SimplifiedLayerNormalization: usual": ([(torch.zeros, 2, 4), (4,)], {}),
    "Det: singular": ([(torch.zeros, 3, 3)], {}),
    "CumProd: usual": ([(torch.zeros, 2, 3), 1], {}),
    "ScatterND: mul": (
        [(torch.zeros, 3), ints([1], [1]), (torch.zeros, 2)], {"reduction": "mul"}
    ),
    **{f"Attention: {words}": ATTENTION[words] for words in ATTENTION if "nothing" in words},
}  # fmt: skip


@pytest.mark.parametrize("name", ZEROS)
def test_gradients_of_zeros_are_finite(name: str) -> None:
    case = Case(*ZEROS[name])
    inputs = case.made(torch.float32)
    inputs = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each
              for each in inputs]  # fmt: skip
    module = torch_ort.load_onnx(file_of(name.partition(":")[0], case, inputs))
    leaves = [each for each in tensors_of(inputs) if each.is_floating_point()]
    for each in leaves:
        each.requires_grad_()
    outputs = module(*tensors_of(inputs))
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    assert first.isfinite().all()
    for gradient in torch.autograd.grad(first.sum(), leaves, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()
