"""Attention, signals, losses and other functions: their numbers, against onnxruntime, and what is
refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from function_cases import (
    NUMBERS,
    Case,
    Given,
    assert_same,
    by_reference,
    bytes_of,
    compare,
    few,
    file_of,
    integers,
    results,
    uniform,
)
from torch import Tensor

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only


def labels(sizes: Sequence[int], ignored: int | None) -> Tensor:
    found = integers(0, sizes[1], (sizes[0], *sizes[2:]))
    return found if ignored is None else found.masked_fill(torch.rand(found.shape) < 0.3, ignored)


def some(sizes: Sequence[int]) -> Tensor:
    """A mask that allows at least one place of each row."""
    return (torch.rand(tuple(sizes)) < 0.6) | (torch.arange(sizes[-1]) == 0)


# ---- signals, losses, and the rest

LABELS: dict[str, Any] = {
    "2-D": (5, 3), "3-D": (2, 4, 3), "4-D": (2, 3, 2, 5), "5-D": (1, 3, 2, 1, 3),
    "6-D": (2, 3, 1, 2, 1, 2),
}  # fmt: skip
REST: dict[str, Given] = {
    **{
        f"DFT: {parts}, {sizes}, {axis}, {length}, {attributes}, {opset}": (
            [(*sizes, parts), length, *([axis] if opset >= 20 else [])],
            {**attributes, **({} if opset >= 20 else {"axis": axis})}, 1, opset,
        )
        for sizes, axis in (((2, 5), 1), ((1, 6), 1), ((0, 4), 1), ((2, 3, 7), 2), ((3, 4, 2), 1))
        for length in (None, 3, 8)
        for parts, attributes, opset in (
            (1, {}, 17), (1, {"onesided": 1}, 20), (1, {"inverse": 1}, 20), (2, {}, 20),
            (2, {"inverse": 1}, 17),
        )
    },
    "DFT: usual axis": ([(2, 5, 3, 1)], {}, 1, 20),
    "DFT: usual axis before": ([(2, 5, 3, 1)], {}, 1, 17),
    "DFT: one side, inverse": ([(2, 5, 2), 8, 1], {"inverse": 1, "onesided": 1}, 1, 20),
    **{
        f"STFT: {sizes}, {parts}, {onesided}, {words}": (
            [(*sizes, parts), 3, window, length], {"onesided": onesided}, 1, 17
        )
        for sizes in ((2, 9), (1, 16), (0, 8)) for parts in (1, 2) for onesided in (0, 1)
        for words, window, length in (
            ("window", (uniform, 5), None), ("length", None, 4), ("both", (uniform, 4), 4)
        )
    },
    **{
        f"{op}: {size}, {periodic}": (
            [size], {"periodic": periodic, "output_datatype": 11}, 1, 17
        )
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow") for size in (2, 5, 10)
        for periodic in (0, 1)
    },
    **{
        f"MelWeightMatrix: {bins}, {length}": ([bins, length, rate, low, high], {}, 1, 17)
        for bins, length, rate, low, high in (
            (8, 16, 8192, 0.0, 4096.0), (5, 64, 16000, 20.0, 7600.0), (16, 17, 8000, 100.0, 3000.0),
            (3, 8, 800, 0.0, 400.0), (40, 512, 16000, 0.0, 8000.0),
        )
    },
    **{
        f"CumSum: {sizes}, {axis}, {exclusive}, {reverse}, {dtype}": (
            [(few, sizes, dtype), axis], {"exclusive": exclusive, "reverse": reverse}
        )
        for sizes, axis in (((3, 4), -1), ((0, 3), 0), ((2, 3, 2), 1))
        for exclusive, reverse in ((0, 1), (1, 0), (1, 1)) for dtype in NUMBERS
    },
    **{
        f"Einsum: {equation}, {dtype}": (
            [(few, each, dtype) for each in sizes], {"equation": equation}
        )
        for equation, sizes in (
            ("ij,jk->ik", ((2, 3), (3, 4))), ("bij,bjk->bik", ((0, 2, 3), (0, 3, 2))),
            ("ii->i", ((3, 3),)), ("ij,jk", ((2, 3), (3, 4))), ("ij->", ((2, 3),)),
            (" i j , j k -> i k ", ((2, 3), (3, 4))), ("...i,...i->...", ((2, 3), (2, 3))),
            ("abc,cd,de->abe", ((2, 3, 4), (4, 2), (2, 5))), ("aB,Bc->ac", ((2, 3), (3, 2))),
            ("i,j->ij", ((2,), (3,))),
        )
        for dtype in (torch.float32, torch.int32)
    },
    **{
        f"BitShift: {direction}, {dtype}": (
            [(bytes_of, (3, 5), dtype), (integers, 0, 8, (3, 1), dtype)], {"direction": direction}
        )
        for direction in ("LEFT", "RIGHT")
        for dtype in (torch.uint8, torch.uint16, torch.uint32)
    },
    "BitShift: by the greatest": (
        [torch.tensor([-1, 2**62 + 5, 1, 0]).view(torch.uint64),
         torch.tensor([63]).view(torch.uint64)],
        {"direction": "RIGHT"},
    ),
    **{
        f"EyeLike: {sizes}, {k}, {number}": (
            [sizes], {"k": k, **({"dtype": number} if number else {})}
        )
        for sizes in ((3, 4), (4, 2), (0, 3)) for k in (-3, -1, 0, 1, 5) for number in (0, 7, 11)
    },
    **{
        f"IsInf: {negative}, {positive}, {dtype}": (
            [torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).to(dtype)],
            {"detect_negative": negative, "detect_positive": positive}, 1, 20,
        )
        for negative in (0, 1) for positive in (0, 1)
        for dtype in (torch.float32, torch.float64, torch.float16)
    },
    **{
        f"{op}: {rank}, {reduction}{', weights' if has_weights else ''}, {ignored}": (
            [sizes, (labels, sizes, ignored), (uniform, sizes[1]) if has_weights else None],
            {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})},
            2 if op[0] == "S" else 1, 13,
        )
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for rank, sizes in LABELS.items() for reduction in ("mean", "sum", "none")
        for has_weights in (False, True) for ignored in (None, 1, -100)
    },
    **{
        f"{op}: {sizes}": ([sizes, (sizes[1],), (sizes[1],)], {"epsilon": 0.01})
        for op in ("InstanceNormalization",)
        for sizes in ((2, 3, 4), (0, 3, 4), (1, 2, 1), (2, 2, 2, 1, 3))
    },
    **{
        f"BatchNormalization: {sizes}": (
            [sizes, *[(sizes[1],)] * 3, (uniform, sizes[1])],
            {"training_mode": 1, "momentum": 0.3}, 3, 15,
        )
        for sizes in ((2, 3, 4), (5, 3), (1, 2, 1), (1, 2), (2, 2, 2, 1, 3))
    },
    **{
        f"LRN: {size}, {sizes}": ([sizes], {"size": size, "alpha": 0.4, "beta": 0.6, "bias": 1.5})
        for size in (1, 3, 5) for sizes in ((2, 4, 3, 2), (0, 3, 2, 2), (1, 1, 2, 3))
    },
    "MeanVarianceNormalization: usual": ([(2, 3, 4, 5)],),
    "MeanVarianceNormalization: axes": ([(2, 3, 4)], {"axes": [0, 2]}),
    **{
        f"LpNormalization: {p}, {sizes}, {axis}": ([sizes], {"p": p, "axis": axis})
        for p in (1, 2) for sizes, axis in (((2, 3, 4), 1), ((0, 3), -1), ((4, 1), 0))
    },
    **{
        f"ReduceSumSquare: {axes}, {keeps}, {noop}, {dtype}": (
            [(few, (2, 3, 4), dtype), axes],
            {"keepdims": keeps, "noop_with_empty_axes": noop}, 1, 18,
        )
        for axes in (None, [0], [1, -1]) for keeps in (0, 1) for noop in (0, 1) for dtype in NUMBERS
    },
    **{
        f"ReduceLogSum: {axes}, {sizes}": ([(uniform, *sizes), axes], {}, 1, 18)
        for axes in ([0], [-1]) for sizes in ((2, 3), (3, 1, 2))
    },
    **{f"Det: {sizes}": ([sizes],) for sizes in ((3, 3), (0, 2, 2), (2, 3, 4, 4))},
    **{f"Hardmax: {axis}": ([(few, (3, 4))], {"axis": axis}) for axis in (0, 1)},
    **{
        f"Shrink: {dtype}": ([(few, (3, 4), dtype)], {"lambd": 0.5, "bias": 1.0})
        for dtype in (*NUMBERS, torch.uint8, torch.int8)
    },
    "Celu: alpha": ([(3, 4)], {"alpha": 0.7}),
    "ThresholdedRelu: alpha": ([(3, 4)], {"alpha": 0.3}),
    "Mean: broadcast": ([(2, 3), (3,), (2, 1)],),
    "Sum: one": ([(0, 3)],),
    "Size: none": ([(0, 3)],),
    "Size: plain": ([(2, 3)],),
}  # fmt: skip


@pytest.mark.parametrize("name", REST)
def test_rest(name: str) -> None:
    compare(name, REST[name], rtol=1e-3, atol=1e-4)


# ---- attention

HEADS: dict[str, Sequence[Any]] = {
    "equal": [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)],
    "shared": [(1, 4, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
    "flat": [(2, 3, 8), (2, 5, 4), (2, 5, 6)],
}
ATTENTION: dict[str, Given] = {}
for words, mask, is_causal, past, softcap, opset in itertools.product(
    HEADS, (None, "bool", "float"), (0, 1), (0, 2), (0.0, 2.0), (23, 24)
):
    queries, keys, values = HEADS[words]
    is_flat = words == "flat"
    count = 2 if is_flat else keys[1]
    kept = [
        (keys[0], count, past, each[-1] // (count if is_flat else 1)) for each in (keys, values)
    ]  # fmt: skip
    size = (3, (keys[1] if is_flat else keys[2]) + past)
    given = {None: None, "bool": (some, size), "float": size}[mask]
    attributes = {"is_causal": is_causal, "softcap": softcap, "scale": 0.4}
    if is_flat:
        attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
    ATTENTION[f"Attention: {words}, {mask}, {is_causal}, {past}, {softcap}, opset {opset}"] = (
        [queries, keys, values, given, *(kept if past else [])], attributes, 3 if past else 1, opset
    )  # fmt: skip
for mode, words in itertools.product((0, 1, 3), HEADS):
    attributes = {"qk_matmul_output_mode": mode, "softcap": 1.5}
    if words == "flat":
        attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
    ATTENTION[f"Attention: scores, {mode}, {words}"] = (HEADS[words], attributes, 4, 24)
ATTENTION |= {
    f"RotaryEmbedding: {words}, {interleaved}": (
        given, {"interleaved": interleaved, **attributes}, 1, 23
    )
    for interleaved in (0, 1)
    for words, given, attributes in (
        ("positions", [(2, 3, 5, 8), (9, 4), (9, 4), (integers, 0, 9, (2, 5))], {}),
        ("tokens, flat", [(2, 5, 12), (2, 5, 2), (2, 5, 2)], {"num_heads": 3}),
        ("part", [(1, 2, 3, 8), (1, 3, 2), (1, 3, 2)], {"rotary_embedding_dim": 4}),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    compare(name, ATTENTION[name], rtol=1e-3, atol=1e-4)


WITHOUT_KERNELS: dict[str, Given] = {
    **{
        f"LinearAttention: {rule}, {sizes}, {words}": (
            [(*sizes, 8), (*sizes, 4), (*sizes, 6), (sizes[0], 2, 2, 3) if words else None,
             (uniform, *sizes, 4 if words else 2) if "gated" in rule else None,
             (uniform, *sizes, 2) if "delta" in rule else None],
            {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}, 2, 27,
        )
        for rule in ("linear", "gated", "delta", "gated_delta")
        for sizes, words in (((1, 1), ""), ((2, 5), "state"), ((3, 4), ""))
    },
    **{
        f"CausalConvWithState: {sizes}, {reach}, {activation}": (
            [sizes, (sizes[1], 1, reach + 1), (sizes[1],), (*sizes[:2], reach)],
            {"activation": activation}, 2, 27,
        )
        for sizes, reach in (((2, 3, 5), 2), ((1, 1, 1), 3), ((2, 2, 4), 0))
        for activation in ("none", "silu")
    },
    "SwiGLU: alpha": ([(2, 3), (2, 3)], {"alpha": 1.3}, 1, 28),
    **{
        f"BitCast: {dtype} to {number}": ([(few, (2, 3), dtype)], {"to": number}, 1, 26)
        for dtype, number in ((torch.float32, 6), (torch.int32, 1), (torch.float64, 7))
    },
    **{
        f"CumProd: {sizes}, {axis}, {exclusive}, {reverse}": (
            [sizes, axis], {"exclusive": exclusive, "reverse": reverse}, 1, 26
        )
        for sizes, axis in (((3, 4), -1), ((2, 3, 2), 1))
        for exclusive in (0, 1) for reverse in (0, 1)
    },
    **{
        f"Attention: windows of {left} and {right}, {is_causal}": (
            [(1, 2, 4, 4), (1, 2, 5, 4), (1, 2, 5, 4), None, (1, 2, 2, 4), (1, 2, 2, 4)],
            {"left_window_size": left, "right_window_size": right, "is_causal": is_causal}, 3, 27,
        )
        for left, right in ((1, -1), (-1, 2), (1, 1), (0, 0)) for is_causal in (0, 1)
    },
    "DFT: one side, inverse, fewer": ([(2, 5, 2), 4, 1], {"inverse": 1, "onesided": 1}, 1, 20),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_without_kernels_of_onnxruntime(name: str) -> None:
    case = Case(*WITHOUT_KERNELS[name])
    inputs = case.made()
    model, got = results(name.partition(":")[0], case, inputs)
    assert_same(got, by_reference(model, inputs))


# ---- what is refused

REFUSED: dict[str, tuple[Given, type[Exception], str]] = {
    "Resize: nearest without what is outside": (
        ([(1, 1, 2, 3), None, [1.0, 1.0, 2.0, 2.0]], {"exclude_outside": 1}), Unsupported,
        "Resize: exclude_outside: got mode nearest, want linear or cubic",
    ),
    "Resize: integers between integers": (
        ([(bytes_of, (1, 1, 2, 3)), None, [1.0, 1.0, 2.0, 2.0]], {"mode": "linear"}), Unsupported,
        "Resize: mode linear: got torch.uint8, want a floating-point dtype",
    ),
    "Resize: to nothing": (
        ([(1, 1, 2, 3)],), UserError, "Resize: got neither scales nor sizes",
    ),
    "AffineGrid: corners of one pixel": (
        ([(1, 2, 3), [1, 1, 1, 4]], {"align_corners": 1}), Unsupported,
        "AffineGrid: align_corners: got a size of 1, want 2 or more",
    ),
    "DeformConv: lines": (
        ([(1, 1, 4), (1, 1, 2), (1, 2, 3)],), Unsupported, "DeformConv: input: got rank 3, want 4"
    ),
    "HannWindow: one point": (
        ([1], {"periodic": 0}), UserError, "window: size: got 1, want more, or a periodic one"
    ),
    "RNN: other activations": (
        ([(2, 1, 2), (1, 3, 2), (1, 3, 3)], {"activations": ["Mish"]}, 2), UserError,
        "recurrent layer: activations: got mish, want one of ONNX's",
    ),
    "RNN: of one direction for two": (
        ([(2, 1, 2), (2, 3, 2), (2, 3, 3)],
         {"direction": "bidirectional", "activations": ["Tanh"]}, 2),
        UserError, "recurrent layer: activations: got 1, want 2",
    ),
    "ScatterND: other reductions": (
        ([(3,), torch.tensor([[1]]), (1,)], {"reduction": "mean"}), UserError,
        "ScatterND: reduction: got mean, want none or one of ONNX's",
    ),
    "Hardmax: of old opsets": (
        ([(2, 3, 4)], {}, 1, 12), Unsupported,
        "Hardmax: opset: got 12, which flattens, want 13 or newer",
    ),
    "BitCast: other sizes": (
        ([(2,)], {"to": 7}), UserError, "BitCast: to: got torch.int64, want a dtype of 4 bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, error, words = REFUSED[name]
    case = Case(*given)
    with pytest.raises(error, match=re.escape(words)):
        torch_ort.load_onnx(file_of(name.partition(":")[0], case, case.made()))
