"""Operators that ONNX Runtime adds to ONNX's, against its kernels for the CPU.

Where onnxruntime has no kernel for an operator, or for a form of it, a few lines of PyTorch stand
in for it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx_cases import by_onnxruntime
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn import functional as F

import torch_ort
from torch_ort import Unsupported, UserError
from torch_ort.onnx.functions import TABLE

pytestmark = pytest.mark.ort_only

MICROSOFT = "com.microsoft"
# What a file has as initializers.
WEIGHTS = {
    "weights", "bias", "gamma", "beta", "scale", "words", "positions", "of_segments", "cos", "sin",
    "sink", "b", "c", "ignored",
}  # fmt: skip


class Case(NamedTuple):
    """A node. Of inputs, sizes stand for random numbers, and None for one that is left out."""

    op: str
    inputs: dict[str, Any]
    attributes: Mapping[str, Any] = MappingProxyType({})
    outputs: int | Sequence[str] = 1  # how many, or their names, "" for one that is left out
    domain: str = MICROSOFT

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Put random numbers where the inputs have sizes, all of a dtype."""
        return {
            name: (torch.randn(given) * 0.7).to(dtype) if isinstance(given, tuple) else given
            for name, given in self.inputs.items()
            if given is not None
        }

    def file(self, tensors: dict[str, Tensor], sizes: dict[str, list[Any]] | None = None) -> bytes:
        """Write a file with the node. `sizes` are those that it declares for inputs."""
        outputs = self.outputs
        names = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else outputs
        given = [name if name in tensors else "" for name in self.inputs]
        values, initializers = [], []
        for name, tensor in tensors.items():
            if name in WEIGHTS:
                initializers.append(numpy_helper.from_array(tensor.numpy(), name))
                continue
            number = helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype)
            declared = (sizes or {}).get(name, list(tensor.shape))
            values.append(helper.make_tensor_value_info(name, number, declared))
        results = [onnx.ValueInfoProto(name=name) for name in names if name]
        for result in results:
            if result.name == "scores":  # a type that onnxruntime does not infer
                result.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        node = helper.make_node(self.op, given, names, domain=self.domain, **self.attributes)
        graph = helper.make_graph([node], "net", values, results, initializers)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return model.SerializeToString()


def inputs_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in WEIGHTS}


def results_of(loaded: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    results = loaded(**inputs_of(tensors))
    return [x.detach() for x in (results if isinstance(results, tuple) else (results,))]


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for mine, expected in zip(got, want, strict=True):
        is_half = mine.dtype == torch.float16
        rtol, atol = (4e-3, 4e-3) if is_half else (1e-4, 4e-6)
        torch.testing.assert_close(mine, expected, rtol=rtol, atol=atol)


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Compare all outputs with onnxruntime's."""
    tensors = case.tensors(dtype)
    data = case.file(tensors)
    want = by_onnxruntime(data, all_results=True, **inputs_of(tensors))
    assert_equal(results_of(torch_ort.load_onnx(data), tensors), want)


def check_by_hand(case: Case, compute: Callable[..., Any]) -> None:
    """Compare all outputs with those of a function of the inputs and weights, by their names."""
    tensors = case.tensors()
    want = compute(**tensors)
    got = results_of(torch_ort.load_onnx(case.file(tensors)), tensors)
    assert_equal(got, want if isinstance(want, tuple) else [want])


def check_refused(case: Case, words: str, error: type[Exception] = Unsupported) -> None:
    data = case.file(case.tensors())
    with pytest.raises(error, match=re.escape(words)):
        torch_ort.load_onnx(data)


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def ones_and_zeros(*sizes: int) -> Tensor:
    """A mask with a 1 in each row."""
    count = torch.Size(sizes).numel()
    mask = (torch.arange(count).view(sizes) * 7 % 5 > 1).int()
    mask[..., -1] = 1
    return mask


# ---- activations

ACTIVATIONS = {
    "QuickGelu": Case("QuickGelu", {"x": (3, 5)}),
    "QuickGelu, alpha": Case("QuickGelu", {"x": (3, 5)}, {"alpha": 0.5}),
    "QuickGelu, alpha 1": Case("QuickGelu", {"x": (3, 5)}, {"alpha": 1.0}),
    "Gelu": Case("Gelu", {"x": (3, 5)}),
    "BiasGelu": Case("BiasGelu", {"x": (2, 3, 5), "bias": (5,)}),
    "FastGelu": Case("FastGelu", {"x": (2, 3, 5)}),
    "FastGelu, bias": Case("FastGelu", {"x": (2, 3, 5), "bias": (5,)}),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    check(ACTIVATIONS[name])


# ---- products


@pytest.mark.parametrize("flags", itertools.product([0, 1], repeat=4), ids=str)
def test_fused_matmul(flags):
    names = ("transA", "transB", "transBatchA", "transBatchB")
    first, second, moves_first, moves_second = flags

    def sizes(rows: int, columns: int, is_transposed: int, has_moved_batch: int) -> tuple[int, ...]:
        if is_transposed:
            rows, columns = columns, rows
        return (rows, 2, 3, columns) if has_moved_batch else (2, 3, rows, columns)

    inputs = {"a": sizes(4, 5, first, moves_first), "b": sizes(5, 6, second, moves_second)}
    check(Case("FusedMatMul", inputs, {"alpha": 0.5, **dict(zip(names, flags, strict=True))}))


FUSED_MATMUL = {
    "vector": ({"a": (5,), "b": (5, 6)}, {"transA": 1}),
    "vector, transposed": ({"a": (5,), "b": (2, 6, 5)}, {"transA": 1, "transB": 1}),
    "vectors": ({"a": (5,), "b": (5,)}, {"transA": 1, "transB": 1}),
    "times a vector": ({"a": (2, 4, 5), "b": (5,)}, {"transB": 1, "alpha": 2.0}),
    "one matrix for all": ({"a": (5, 4), "b": (2, 5, 6)}, {"transA": 1}),
}


@pytest.mark.parametrize("name", FUSED_MATMUL)
def test_forms_of_fused_matmul(name):
    check(Case("FusedMatMul", *FUSED_MATMUL[name]))


def test_fused_matmul_in_float64():
    check(Case("FusedMatMul", *FUSED_MATMUL["one matrix for all"]), torch.float64)


def test_transpose_matmul():
    check(Case("TransposeMatMul", *FUSED_MATMUL["one matrix for all"]))


def test_transposed_matrices_times_a_vector():
    # onnxruntime takes the numbers of the matrix for those of a matrix that is not transposed.
    case = Case("FusedMatMul", {"a": (2, 5, 4), "b": (5,)}, {"transA": 1})
    check_by_hand(case, lambda a, b: a.transpose(-1, -2) @ b)


GEMM = {"a": (4, 5), "b": (5, 6), "c": (6,)}
ACTIVATIONS_OF_GEMM: dict[str, dict[str, float]] = {
    "Relu": {}, "Tanh": {}, "Sigmoid": {}, "Softplus": {}, "Softsign": {},
    "LeakyRelu": {"activation_alpha": 0.3},
    "Elu": {"activation_alpha": 0.3},
    "Celu": {"activation_alpha": 0.3},
    "ThresholdedRelu": {"activation_alpha": 0.3},
    "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4},
    "ScaledTanh": {"activation_alpha": 0.3, "activation_beta": 0.4},
    "ParametricSoftplus": {"activation_alpha": 0.3, "activation_beta": 0.4},
    "Selu": {"activation_alpha": 1.5, "activation_gamma": 1.2},
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS_OF_GEMM)
def test_activations_of_fused_gemm(activation):
    named = ACTIVATIONS_OF_GEMM[activation]
    check(Case("FusedGemm", GEMM, {"activation": activation, **named}))
    for missing in named:
        rest = {name: number for name, number in named.items() if name != missing}
        case = Case("FusedGemm", GEMM, {"activation": activation, **rest})
        check_refused(case, f"FusedGemm: {activation}: got no {missing}", UserError)


@pytest.mark.parametrize("c", [(4, 6), (4, 1), (1, 6), (), None], ids=str)
def test_forms_of_fused_gemm(c):
    attributes = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 0.3, "activation": "Tanh"}
    check(Case("FusedGemm", {"a": (5, 4), "b": (6, 5), "c": c}, attributes))


def test_fused_gemm_without_an_activation():
    # onnxruntime asks for one.
    check_by_hand(Case("FusedGemm", GEMM, {"beta": 0.3}), lambda a, b, c: a @ b + 0.3 * c)


# ---- norms

SKIP = {"x": (2, 3, 8), "skip": (2, 3, 8), "gamma": (8,)}
SUM = ["y", "", "", "total"]
NORMS = {
    "SkipLayerNormalization": {
        "plain": (SKIP,),
        "beta": ({**SKIP, "beta": (8,)}, {"epsilon": 0.1}),
        "bias": ({**SKIP, "beta": None, "bias": (8,)}, {}, SUM),
        "beta, bias": ({**SKIP, "beta": (8,), "bias": (8,)}, {"epsilon": 1e-5}, SUM),
        "all": ({**SKIP, "beta": (8,), "bias": (8,)}, {"epsilon": 0.1}, 4),
        "skip of one row": ({**SKIP, "skip": (1, 3, 8)}, {}, SUM),
        "skip without rows": ({**SKIP, "skip": (3, 8)}, {}, SUM),
        "tokens": ({**SKIP, "x": (3, 8), "skip": (3, 8)}, {}, 4),
    },
    "SkipSimplifiedLayerNormalization": {
        "plain": (SKIP,),
        "bias": ({**SKIP, "bias": (8,)}, {"epsilon": 0.1}, SUM),
        "factors": (SKIP, {"epsilon": 0.1}, ["y", "", "factors", "total"]),
        "skip of one row": ({**SKIP, "skip": (1, 3, 8)}, {}, SUM),
        "skip without rows": ({**SKIP, "skip": (3, 8)}, {}, SUM),
        "tokens": ({**SKIP, "x": (3, 8), "skip": (3, 8)}, {}, SUM),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, cases in NORMS.items() for name in cases]
)
def test_skips_and_norms(op, name, dtype):
    check(Case(op, *NORMS[op][name]), dtype)


def test_a_norm_without_a_mean():
    # onnxruntime gives zeros.
    case = Case("SkipSimplifiedLayerNormalization", SKIP, {}, 2)
    check_refused(case, "SkipSimplifiedLayerNormalization: mean: got one, want none")


RMS: dict[str, tuple[Any, ...]] = {
    "plain": ((8,), {}),
    "axis 1": ((3, 8), {"axis": 1, "epsilon": 0.1}),
    "axis -2": ((3, 8), {"axis": -2}),
    "axis 0": ((2, 3, 8), {"axis": 0}),
    "one scale": ((1,), {}),
    "a scale of each token": ((2, 3, 1), {}),
    "a scale of each number": ((2, 3, 8), {}),
    "a scale of each number of a row": ((3, 8), {}),
}


@pytest.mark.parametrize("name", RMS)
def test_rms_norms(name):
    scale, attributes = RMS[name]
    inputs = {"x": (2, 3, 8), "scale": scale}
    case = Case("SimplifiedLayerNormalization", inputs, attributes, 2, domain="")
    check(case)
    # onnxruntime has the operator among the standard ones alone.
    tensors = case.tensors()
    want = by_onnxruntime(case.file(tensors), all_results=True, x=tensors["x"])
    loaded = torch_ort.load_onnx(case._replace(domain=MICROSOFT).file(tensors))
    assert_equal(results_of(loaded, tensors), want)


@pytest.mark.parametrize(
    ("dtype", "of_scale"),
    [
        (torch.float64, torch.float64),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_dtypes_of_rms_norms(dtype, of_scale):
    inputs = {"x": torch.randn(2, 3, 8).to(dtype), "scale": torch.randn(8).to(of_scale)}
    check(Case("SimplifiedLayerNormalization", inputs, {}, 2, domain=""))


IDS = ints([3, 1, 9, 0], [2, 2, 7, 5])
SEGMENTS = ints([0, 1, 2, 1], [1, 1, 0, 2])
EMBEDDINGS = {
    "ids": IDS, "segments": SEGMENTS, "words": (10, 8), "positions": (7, 8), "of_segments": (3, 8),
    "gamma": (8,), "beta": (8,),
}  # fmt: skip
PLACES = ints([6, 2, 0, 1], [3, 3, 5, 4])
EMBED: dict[str, tuple[Any, ...]] = {
    "plain": (EMBEDDINGS, {}, 3),
    "two outputs": (EMBEDDINGS, {"epsilon": 0.1}, 2),
    "mask": ({**EMBEDDINGS, "mask": ints([1, 1, 1, 0], [1, 0, 0, 0])}, {"mask_index_type": 1}, 3),
    "mask, zeros first": ({**EMBEDDINGS, "mask": ints([0, 1, 0, 1], [0, 0, 0, 0])}, {}, 3),
    "mask, other numbers": ({**EMBEDDINGS, "mask": ints([2, 1, 0, 1], [3, -1, 1, 0])}, {}, 3),
    "no segments": (
        {**EMBEDDINGS, "segments": None, "of_segments": None, "mask": ints([1] * 4, [1] * 4)}, {}, 3
    ),
    "all in one segment": ({**EMBEDDINGS, "segments": None}, {}, 3),
    "positions": ({**EMBEDDINGS, "mask": None, "places": PLACES}, {}, 3),
    "positions of all rows": ({**EMBEDDINGS, "mask": None, "places": PLACES[:1]}, {}, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", EMBED)
def test_embeddings_and_norm(name):
    check(Case("EmbedLayerNormalization", *EMBED[name]))


# ---- losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sizes", [(4, 5), (4, 5, 3), (2, 5, 3, 2)], ids=str)
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weights"])
@pytest.mark.parametrize("ignored", [None, 2], ids=["all", "ignored"])
def test_losses(reduction, sizes, has_weights, ignored):
    # onnxruntime has the operator in its builds for training alone.
    batch, classes, *rest = sizes
    labels = torch.arange(batch * math.prod(rest)).view(batch, *rest) % classes
    inputs = {
        "x": sizes, "labels": labels, "weights": torch.rand(classes) if has_weights else None,
        "ignored": None if ignored is None else torch.tensor(ignored),
    }  # fmt: skip

    def compute(x: Tensor, labels: Tensor, weights: Tensor | None = None, **rest: Tensor) -> Any:
        index = -100 if ignored is None else ignored
        loss = F.cross_entropy(x, labels, weights, ignore_index=index, reduction=reduction)
        return loss, x.log_softmax(1)

    case = Case("SoftmaxCrossEntropyLossInternal", inputs, {"reduction": reduction}, 2)
    check_by_hand(case, compute)
    check_by_hand(case._replace(outputs=1), lambda **given: compute(**given)[0])


def test_losses_of_another_dtype():
    inputs = {"x": torch.randn(4, 5).half(), "labels": torch.tensor([0, 3, 1, 4])}
    attributes = {"output_type": onnx.TensorProto.FLOAT}
    case = Case("SoftmaxCrossEntropyLossInternal", inputs, attributes, 2)
    check_by_hand(
        case, lambda x, labels: (F.cross_entropy(x.float(), labels), x.float().log_softmax(1))
    )


# ---- rotary position embeddings

TURNS = {"cos": (10, 4), "sin": (10, 4)}
PLACES_OF_TOKENS = torch.tensor([[5, 0, 9, 3], [1, 2, 2, 7]])
ROTARY: dict[str, tuple[Any, ...]] = {
    "flat": ({"x": (2, 4, 24), "places": PLACES_OF_TOKENS, **TURNS},),
    "flat, heads": ({"x": (2, 4, 24), "places": PLACES_OF_TOKENS, **TURNS}, {"num_heads": 3}),
    "heads": ({"x": (2, 3, 4, 8), "places": PLACES_OF_TOKENS, **TURNS},),
    "flat, first place": ({"x": (2, 4, 24), "places": torch.tensor([3]), **TURNS},),
    "heads, first place": ({"x": (2, 3, 4, 8), "places": torch.tensor([3]), **TURNS},),
    "a part of the features": (
        {"x": (2, 4, 24), "places": PLACES_OF_TOKENS, "cos": (10, 2), "sin": (10, 2)},
        {"num_heads": 3, "rotary_embedding_dim": 4},
    ),
    "heads, a part of the features": (
        {"x": (2, 3, 4, 8), "places": torch.tensor([3]), "cos": (10, 2), "sin": (10, 2)},
        {"num_heads": 3, "rotary_embedding_dim": 4},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [0, 1], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embeddings(name, interleaved, dtype):
    inputs, *attributes = ROTARY[name]
    given = attributes[0] if attributes else {}
    check(Case("RotaryEmbedding", inputs, {**given, "interleaved": interleaved}), dtype)


def test_rotary_embeddings_that_are_refused():
    inputs = {"x": (2, 4, 24), "places": PLACES_OF_TOKENS, **TURNS}
    for attribute, words in (
        ({"scale": 2.0}, "RotaryEmbedding: scale: got 2.0, want 1"),
        ({"is_packed_batching": 1}, "RotaryEmbedding: is_packed_batching: got 1, want 0"),
    ):
        check_refused(Case("RotaryEmbedding", inputs, attribute), words)


def test_a_place_before_the_first_one():
    case = Case("RotaryEmbedding", {"x": (1, 2, 24), "places": torch.tensor([[0, -1]]), **TURNS})
    tensors = case.tensors()
    with pytest.raises(IndexError):
        results_of(torch_ort.load_onnx(case.file(tensors)), tensors)


# ---- attention

# A batch of 2 rows of 4 tokens with 10 features, 2 heads of 4 features, and a past of 3.
TOKENS = {"x": (2, 4, 10), "weights": (10, 24), "bias": (24,)}
PAST = (2, 2, 2, 3, 4)


def attention(
    mask: Any = None, past: Any = None, attention_bias: Any = None, outputs: int = 1,
    inputs: dict[str, Any] | None = None, **attributes: Any,
) -> Case:  # fmt: skip
    given = {**(inputs or TOKENS), "mask": mask, "past": past, "attention_bias": attention_bias}
    return Case("Attention", given, {"num_heads": 2, **attributes}, outputs)


def with_past(**given: Any) -> Case:
    return attention(past=PAST, outputs=2, **given)


LOWEST = torch.finfo(torch.float32).min
OTHER_NUMBERS = ints([1, 3, 1, 2], [-1, 0, 1, 1])
VALUES_OF_THEIR_OWN = {"x": (2, 4, 10), "weights": (10, 20), "bias": (20,)}
ATTENTION = {
    "plain": attention(),
    "present": attention(outputs=2),
    "no bias": attention(inputs={**TOKENS, "bias": None}),
    "scale": attention(scale=0.3),
    "unidirectional": attention(unidirectional=1),
    "past": with_past(),
    "past, unidirectional": with_past(unidirectional=1),
    "past of length 0": attention(past=(2, 2, 2, 0, 4), outputs=2, unidirectional=1),
    "past, one token": with_past(inputs={**TOKENS, "x": (2, 1, 10)}, unidirectional=1),
    "attributes with defaults": with_past(
        do_rotary=0,
        rotary_embedding_dim=0,
        past_present_share_buffer=0,
        unidirectional=0,
        scale=0.0,
    ),
    "ends": attention(ints(4, 2)),
    "ends, unidirectional": attention(ints(4, 2), unidirectional=1),
    "ends, past": with_past(mask=ints(7, 5)),
    "ends and starts": attention(ints(4, 3, 1, 0)),
    "ends and starts, unidirectional": attention(ints(4, 3, 1, 0), unidirectional=1),
    "ends and starts, past": with_past(mask=ints(7, 6, 2, 0), unidirectional=1),
    "a start behind the end": attention(ints(4, 3, 9, 0), mask_filter_value=-2.0),
    "ends and places": attention(ints(4, 2, 0, 4, 8, 0, 4, 6)),
    "keys": attention(ones_and_zeros(2, 4)),
    "keys, unidirectional": attention(ones_and_zeros(2, 4), unidirectional=1),
    "keys, past": with_past(mask=ones_and_zeros(2, 7), unidirectional=1),
    "keys, other numbers": attention(OTHER_NUMBERS),
    "keys, filter": attention(ones_and_zeros(2, 4), mask_filter_value=-2.0),
    "keys, filter, unidirectional": attention(
        ones_and_zeros(2, 4), mask_filter_value=-2.0, unidirectional=1
    ),
    "no keys": attention(ints([0] * 4, [1] * 4), mask_filter_value=-2.0, unidirectional=1),
    "no keys, lowest filter": attention(
        ints([0, 0, 1, 1], [1] * 4), mask_filter_value=LOWEST, unidirectional=1
    ),
    "one number of a row": attention(ints([0], [1])),
    "one number of all": attention(ints([1])),
    "pairs": attention(ones_and_zeros(2, 4, 4)),
    "pairs, unidirectional": attention(ones_and_zeros(2, 4, 4), unidirectional=1),
    "pairs, past": with_past(mask=ones_and_zeros(2, 4, 7), unidirectional=1),
    "attention bias": attention(attention_bias=(2, 2, 4, 4)),
    "attention bias of all rows": attention(attention_bias=(1, 2, 4, 4)),
    "attention bias of all heads": attention(attention_bias=(2, 1, 4, 4)),
    "attention bias, keys": attention(
        ones_and_zeros(2, 4), attention_bias=(1, 1, 4, 4), unidirectional=1
    ),
    "attention bias, ends": attention(ints(4, 2), attention_bias=(2, 2, 4, 4)),
    "sizes": attention(outputs=2, qkv_hidden_sizes=[8, 8, 8]),
    "values of their own size": attention(
        inputs=VALUES_OF_THEIR_OWN, qkv_hidden_sizes=[8, 8, 4], unidirectional=1
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    check(ATTENTION[name])


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, added: Any = 0.0,
    past: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend to (batch, length, heads · features); gives the result, and keys and values."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + added
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2), key, value


def test_attention_that_onnxruntime_lacks():
    def compute(
        x: Tensor, weights: Tensor, bias: Tensor, mask: Tensor | None = None,
        past: Tensor | None = None, attention_bias: Any = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if mask is not None:
            first = 0 if past is None else past.shape[3]
            part = mask[:, :, first : first + x.shape[1], : first + x.shape[1]]
            attention_bias = (part == 0) * -10000.0
        parts = (x @ weights + bias).chunk(3, -1)
        kept = None if past is None else (past[0], past[1])
        result, key, value = attend(*parts, 2, attention_bias, kept)
        return result, torch.stack([key, value])

    # Its kernels for the CPU take no mask with four dims, no past beside an attention bias, and no
    # past without the present.
    for case in (
        attention(ones_and_zeros(2, 1, 6, 6), outputs=2),
        with_past(mask=ones_and_zeros(2, 1, 9, 9)),
        with_past(attention_bias=(2, 2, 4, 7)),
    ):
        check_by_hand(case, compute)
    check_by_hand(attention(past=PAST), lambda **given: compute(**given)[0])


def test_attention_that_is_refused():
    for case, words in (
        (attention(do_rotary=1), "Attention: do_rotary: got 1, want 0"),
        (
            with_past(past_present_share_buffer=1),
            "Attention: past_present_share_buffer: got 1, want 0",
        ),
        # onnxruntime gives a present for keys as long as the values, which they are not.
        (
            attention(inputs=VALUES_OF_THEIR_OWN, qkv_hidden_sizes=[8, 8, 4], outputs=2),
            "Attention: present: got 2 features of values, want 4, as keys have",
        ),
        (
            attention(ones_and_zeros(2, 1, 1, 4, 4)),
            "Attention: mask_index: got rank 5, want 1 to 4",
        ),
    ):
        check_refused(case, words)
    case = attention(ints(4, 3, 1, 0, 2, 2))
    tensors = case.tensors()
    loaded = torch_ort.load_onnx(case.file(tensors))
    words = "Attention: mask_index: got 6 numbers for a batch of 2, want 2, 4 or 8"
    with pytest.raises(Unsupported, match=words):
        results_of(loaded, tensors)


# ---- attention of several inputs

# A batch of 2 rows, 3 queries and 5 keys, 2 heads of 4 features, and a past of 2.
QUERY, KEY, PAST_KEY = (2, 3, 8), (2, 5, 8), (2, 2, 2, 4)


def multi_head(
    query: Any = QUERY, key: Any = KEY, value: Any = KEY, bias: Any = None, mask: Any = None,
    attention_bias: Any = None, past_key: Any = None, past_value: Any = None,
    outputs: int | Sequence[str] = 3, others: Iterable[tuple[str, Any]] = (), **attributes: Any,
) -> Case:  # fmt: skip
    inputs = {
        "query": query, "key": key, "value": value, "bias": bias, "mask": mask,
        "attention_bias": attention_bias, "past_key": past_key, "past_value": past_value,
        **dict(others),
    }  # fmt: skip
    return Case("MultiHeadAttention", inputs, {"num_heads": 2, **attributes}, outputs)


def behind_past(**given: Any) -> Case:
    return multi_head(past_key=PAST_KEY, past_value=PAST_KEY, **given)


def square(**given: Any) -> Case:
    return multi_head(key=QUERY, value=QUERY, **given)


SCORES = ["y", "", "", "scores"]
MULTI_HEAD = {
    "plain": multi_head(outputs=1),
    "present": multi_head(),
    "values of their own size": multi_head(value=(2, 5, 6)),
    "bias": multi_head(bias=(24,)),
    "bias, values of their own size": multi_head(value=(2, 5, 6), bias=(22,)),
    "scale": multi_head(scale=0.3),
    "unidirectional": square(unidirectional=1),
    "unidirectional, one output": square(unidirectional=1, outputs=1),
    "unidirectional, more keys": multi_head(unidirectional=1),
    "unidirectional, fewer keys": multi_head(key=(2, 2, 8), value=(2, 2, 8), unidirectional=1),
    "unidirectional, one query": multi_head(query=(2, 1, 8), unidirectional=1),
    "past": behind_past(),
    "past, bias": behind_past(bias=(24,)),
    "past, unidirectional": behind_past(key=QUERY, value=QUERY, unidirectional=1),
    "past, unidirectional, more keys": behind_past(unidirectional=1),
    "past, one query": behind_past(
        query=(2, 1, 8), key=(2, 1, 8), value=(2, 1, 8), unidirectional=1
    ),
    "past of length 0": square(past_key=(2, 2, 0, 4), past_value=(2, 2, 0, 4), unidirectional=1),
    "lengths": multi_head(mask=ints(5, 2)),
    "lengths, past": behind_past(mask=ints(6, 3)),
    "lengths and places": multi_head(mask=ints(5, 2, 0, 3, 6, 0, 5, 7)),
    "keys": multi_head(mask=ones_and_zeros(2, 5)),
    "keys, other numbers": multi_head(mask=ints([1, 3, 1, 2, 0], [-1, 0, 1, 1, -2])),
    "keys, past": behind_past(mask=ones_and_zeros(2, 7)),
    "keys, filter": multi_head(mask=ones_and_zeros(2, 5), mask_filter_value=-2.0),
    "no keys, lowest filter": square(
        mask=ints([0, 0, 1], [1, 1, 1]), mask_filter_value=LOWEST, unidirectional=1
    ),
    "pairs": multi_head(mask=ones_and_zeros(2, 3, 5)),
    "pairs, unidirectional": square(mask=ones_and_zeros(2, 3, 3), unidirectional=1),
    "pairs, past": behind_past(mask=ones_and_zeros(2, 3, 7)),
    "attention bias": multi_head(attention_bias=(2, 2, 3, 5)),
    "attention bias of all rows": multi_head(attention_bias=(1, 2, 3, 5)),
    "attention bias of all heads": multi_head(attention_bias=(2, 1, 3, 5)),
    "attention bias of all": multi_head(attention_bias=(1, 1, 3, 5)),
    "attention bias, past": behind_past(attention_bias=(2, 2, 3, 7)),
    "attention bias, keys, unidirectional": square(
        mask=ones_and_zeros(2, 3), attention_bias=(1, 2, 3, 3), unidirectional=1
    ),
    "heads": multi_head(key=(2, 2, 5, 4), value=(2, 2, 5, 4)),
    "heads, bias": multi_head(key=(2, 2, 5, 4), value=(2, 2, 5, 4), bias=(24,)),
    "heads, keys": multi_head(
        key=(2, 2, 5, 4), value=(2, 2, 5, 4), mask=ones_and_zeros(2, 5), outputs=1
    ),
    "heads, past": behind_past(key=(2, 2, 5, 4), value=(2, 2, 5, 4)),
    "heads, unidirectional": multi_head(key=(2, 2, 5, 4), value=(2, 2, 5, 4), unidirectional=1),
    "scores": multi_head(outputs=SCORES),
    "scores, all": square(
        mask=ones_and_zeros(2, 3), attention_bias=(1, 2, 3, 3), mask_filter_value=-2.0,
        unidirectional=1, scale=0.3, outputs=["y", "key_and_past", "value_and_past", "scores"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head_attention(name):
    check(MULTI_HEAD[name])


PACKED = {
    "all": multi_head(query=(2, 3, 2, 3, 4), key=None, value=None),
    "all, bias": multi_head(query=(2, 3, 2, 3, 4), key=None, value=None, bias=(24,)),
    "keys and values": multi_head(key=(2, 5, 2, 2, 4), value=None),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_multi_head_attention(name):
    # onnxruntime's kernel for the CPU takes nothing that is packed.
    def compute(query: Tensor, key: Tensor | None = None, bias: Tensor | None = None) -> Any:
        packed = [*query.unbind(3)] if key is None else [query, *key.unbind(3)]
        parts = [x.flatten(2) for x in packed]
        if bias is not None:
            parts = [x + b for x, b in zip(parts, bias.chunk(3), strict=True)]
        return attend(*parts, 2)

    check_by_hand(PACKED[name], compute)


def test_a_past_without_the_present():
    # onnxruntime's kernel for the CPU looks at the past through the present alone.
    check_by_hand(
        behind_past(outputs=1),
        lambda query, key, value, past_key, past_value: attend(
            query, key, value, 2, past=(past_key, past_value)
        )[0],
    )


def test_multi_head_attention_that_is_refused():
    name = "MultiHeadAttention"
    for case, words in (
        (
            behind_past(others=[("past_sequence_length", ints(2))]),
            f"{name}: past_sequence_length: got one, want none",
        ),
        (
            behind_past(
                others=[("unused", None), ("cache_indirection", torch.zeros(2, 1, 2).int())]
            ),
            f"{name}: cache_indirection: got one, want none",
        ),
        (
            multi_head(mask=ones_and_zeros(2, 1, 3, 5)),
            f"{name}: key_padding_mask: got rank 4, want 1 to 3",
        ),
    ):
        check_refused(case, words)
    for case, words in (
        (multi_head(value=None), f"{name}: key and value: got one or none, want both"),
        (
            multi_head(past_key=PAST_KEY),
            f"{name}: past_key and past_value: got no past_value, want both",
        ),
    ):
        check_refused(case, words, UserError)


# ---- attention of groups


def groups(
    batch: int = 2, length: int = 3, past: int | None = None, last: Sequence[int] | None = None,
    total: int | None = None, is_packed: bool = False, turns: int = 0, places: Any = None,
    attention_bias: Any = None, sink: Any = None, width: int = 16, outputs: int = 3,
    others: Iterable[tuple[str, Any]] = (), **attributes: Any,
) -> Case:  # fmt: skip
    """4 heads of queries for 2 of keys, and cosines and sines of `turns` features."""
    total = length + (past or 0) if total is None else total
    flat = (batch, length, 2 * width)
    kept = None if past is None else (batch, 2, past, width)
    inputs = {
        "query": (batch, length, (8 if is_packed else 4) * width),
        "key": None if is_packed else flat, "value": None if is_packed else flat,
        "past_key": kept, "past_value": kept,
        "last": ints(*([total - 1] * batch if last is None else last)), "total": ints(total),
        "cos": (12, turns) if turns else None, "sin": (12, turns) if turns else None,
        "places": places, "attention_bias": attention_bias, "sink": sink, **dict(others),
    }  # fmt: skip
    given = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(turns > 0), **attributes}
    return Case("GroupQueryAttention", inputs, given, outputs)


ROW_OF_PLACES = torch.tensor([[2, 5, 1], [0, 3, 4]])
GROUPS = {
    "prompt": groups(),
    "prompt, one output": groups(outputs=1),
    "prompt, packed": groups(is_packed=True),
    "prompt, past of length 0": groups(past=0),
    "prompt, rows of their own length": groups(last=[2, 0]),
    "prompt, space": groups(past=8, total=3),
    "prompt, space, rows of their own length": groups(past=8, total=3, last=[2, 1]),
    "one token": groups(length=1, past=4),
    "one token, packed": groups(length=1, past=4, is_packed=True),
    "one token, rows of their own length": groups(length=1, past=4, last=[4, 2]),
    "one token, space": groups(length=1, past=8, total=5),
    "one token, space, rows of their own length": groups(length=1, past=8, total=5, last=[4, 0]),
    "several tokens": groups(batch=1, past=4),
    "several tokens, space": groups(batch=1, past=8, total=6),
    "attributes with defaults": groups(
        smooth_softmax=-1,
        softcap=0.0,
        local_window_size=-1,
        causal=1,
        qk_output=0,
        k_quant_type="NONE",
        v_quant_type="NONE",
        sliding_window_cache=0,
        scale=0.0,
        qk_norm_epsilon=1e-6,
    ),
    "scale": groups(scale=0.1),
    "softcap": groups(softcap=0.5),
    "softcap, one token": groups(length=1, past=4, softcap=0.5),
    "window of 1": groups(length=5, local_window_size=1),
    "window of 3": groups(length=5, local_window_size=3),
    "window, one token": groups(length=1, past=6, local_window_size=3),
    "window, one token, rows of their own length": groups(
        length=1, past=6, local_window_size=3, last=[6, 1]
    ),
    "window, rows of their own length": groups(length=5, local_window_size=2, last=[4, 1]),
    "window, softcap": groups(length=5, local_window_size=2, softcap=0.5),
    "not causal": groups(causal=0),
    "not causal, past": groups(batch=1, past=4, causal=0),
    "not causal, rows of their own length": groups(causal=0, last=[2, 1]),
    "rotary": groups(turns=8),
    "rotary, packed": groups(turns=8, is_packed=True),
    "rotary, a part of the features": groups(turns=8, width=32),
    "rotary, interleaved": groups(turns=8, rotary_interleaved=1),
    "rotary, interleaved, a part": groups(turns=8, width=32, rotary_interleaved=1),
    "rotary, one token": groups(turns=8, length=1, past=4),
    "rotary, one token, packed": groups(turns=8, length=1, past=4, is_packed=True),
    "rotary, one token, rows of their own length": groups(
        turns=8, length=1, past=4, last=[4, 2], rotary_interleaved=1
    ),
    "rotary, several tokens": groups(turns=8, batch=1, past=4),
    "rotary, several tokens, space": groups(turns=8, batch=1, past=9, total=7),
    "rotary, places of a prompt": groups(turns=8, places=ROW_OF_PLACES),
    "rotary, places of one token": groups(
        turns=8, length=1, past=4, places=torch.tensor([[7], [2]])
    ),
    "rotary, places of several tokens": groups(turns=8, batch=1, past=4, places=ROW_OF_PLACES[:1]),
    "attention bias": groups(attention_bias=(2, 4, 3, 3)),
    "attention bias of all rows": groups(attention_bias=(1, 4, 3, 3)),
    "attention bias of all heads": groups(attention_bias=(2, 1, 3, 3)),
    "attention bias, one token": groups(length=1, past=4, attention_bias=(2, 4, 1, 5)),
    "attention bias, space": groups(length=1, past=8, total=5, attention_bias=(1, 1, 1, 5)),
    "attention bias, softcap, window": groups(
        length=5, attention_bias=(2, 4, 5, 5), softcap=0.5, local_window_size=2
    ),
    "smooth softmax": groups(smooth_softmax=1),
    "smooth softmax, one token": groups(smooth_softmax=1, length=1, past=4, last=[4, 2]),
    "sink": groups(sink=(4,)),
    "sink, smooth softmax": groups(sink=(4,), smooth_softmax=0, scale=0.1),
    "sink, attention bias": groups(sink=(4,), attention_bias=(2, 1, 3, 3)),
    "sink, softcap, window": groups(sink=(4,), length=5, softcap=0.5, local_window_size=2),
}


def counted(case: Case, results: Sequence[Tensor]) -> list[Tensor]:
    """Put zeros where the operator says nothing: behind the end of a row."""
    length = results[0].shape[1]
    last = case.inputs["last"].view(-1, 1)
    before = (last + 1 - length).clamp(min=0)
    kept = [results[0].masked_fill((torch.arange(length) > last - before).unsqueeze(-1), 0)]
    for x in results[1:]:
        is_behind = torch.arange(x.shape[2]) > last
        kept.append(x.masked_fill(is_behind[:, None, :, None], 0))
    return kept


@pytest.mark.parametrize("name", GROUPS)
def test_group_query_attention(name):
    case = GROUPS[name]
    tensors = case.tensors()
    data = case.file(tensors)
    want = by_onnxruntime(data, all_results=True, **inputs_of(tensors))
    got = results_of(torch_ort.load_onnx(data), tensors)
    assert_equal(counted(case, got), counted(case, want))


@pytest.mark.parametrize("given", [{}, {"local_window_size": 2}, {"causal": 0}], ids=str)
def test_what_is_behind_the_end_of_a_row(given):
    case = groups(length=5, last=[4, 1], **given)
    tensors = case.tensors()
    loaded = torch_ort.load_onnx(case.file(tensors))
    others = {name: tensors[name].clone() for name in ("key", "value")}
    for x in others.values():
        x[1, 2:] = 1e4
    want = results_of(loaded, tensors)[0]
    torch.testing.assert_close(results_of(loaded, {**tensors, **others})[0], want, rtol=0, atol=0)


def test_group_query_attention_in_float16():
    check(groups(turns=8, attention_bias=(2, 4, 3, 3)), torch.float16)
    check(groups(turns=8, length=1, past=4), torch.float16)


def test_group_query_attention_that_is_refused():
    name = "GroupQueryAttention"
    norms = [(f"{part}_scale", None) for part in "kv"]
    for case, words in (
        (groups(qk_output=1, outputs=4), "qk_output: got 1, want 0"),
        (groups(outputs=4), "outputs: got 4, want 3"),
        (
            groups(length=1, past=4, sliding_window_cache=1, local_window_size=4),
            "sliding_window_cache: got 1, want 0",
        ),
        (groups(k_quant_type="PER_TENSOR"), "k_quant_type: got PER_TENSOR, want NONE"),
        (groups(v_quant_type="PER_CHANNEL"), "v_quant_type: got PER_CHANNEL, want NONE"),
        (groups(kv_cache_bit_width=8), "kv_cache_bit_width: got 8, want 0"),
        (groups(others=[("k_scale", (1,))]), "k_scale: got one, want none"),
        (groups(others=[("unused", None), ("v_scale", (1,))]), "v_scale: got one, want none"),
        (groups(others=[*norms, ("q_norm", (16,))]), "q_norm_weight: got one, want none"),
        (
            groups(others=[*norms, ("q_norm", None), ("k_norm", (16,))]),
            "k_norm_weight: got one, want none",
        ),
        (
            groups(others=[*norms, ("q_norm", None), ("k_norm", None), ("lengths", ints(3, 2))]),
            "query_seqlens: got one, want none",
        ),
        (groups(local_window_size=0), "local_window_size: got 0 and causal 1, want -1, or more"),
        (
            groups(local_window_size=2, causal=0),
            "local_window_size: got 2 and causal 0, want -1, or more",
        ),
    ):
        check_refused(case, f"{name}: {words}")
    plain = groups(past=4)
    for missing in ("key", "value", "past_key", "past_value"):
        case = plain._replace(inputs={**plain.inputs, missing: None})
        check_refused(case, f"got no {missing}, want both", UserError)
    check_refused(groups(do_rotary=1), f"{name}: do_rotary: got no cosines and sines", UserError)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"total": 5}, "got 5, want 3, or from 3 to 0 where the past has space"),
        ({"length": 1, "past": 2, "total": 5}, "got 5, want 3, or from 1 to 2 where"),
        ({"past": 8, "total": 2}, "got 2, want 11, or from 3 to 8 where"),
    ],
    ids=["no past", "short past", "short total"],
)
def test_a_total_that_cannot_be(given, words):
    case = groups(**given)
    tensors = case.tensors()
    loaded = torch_ort.load_onnx(case.file(tensors))
    with pytest.raises(UserError, match=f"GroupQueryAttention: total_sequence_length: {words}"):
        results_of(loaded, tensors)


# ---- sizes of each call

SIZES = {
    "x": ["batch", "length", 10], "query": ["batch", "length", 8], "key": ["batch", "keys", 8],
    "value": ["batch", "keys", 8], "past": [2, "batch", 2, "past", 4],
    "past_key": ["batch", 2, "past", 4], "past_value": ["batch", 2, "past", 4],
}  # fmt: skip
SIZES_OF_GROUPS = {
    "query": ["batch", "length", 64], "key": ["batch", "length", 32],
    "value": ["batch", "length", 32], "past_key": ["batch", 2, "past", 16],
    "past_value": ["batch", 2, "past", 16], "last": ["batch"], "total": [1],
    "places": ["batch", "length"],
}  # fmt: skip


def attention_of(batch: int, length: int, past: int, mask: Any) -> Case:
    inputs, kept = {**TOKENS, "x": (batch, length, 10)}, (2, batch, 2, past, 4)
    return attention(mask, kept, outputs=2, inputs=inputs, unidirectional=1)


def multi_head_of(batch: int, length: int, keys: int, past: int, mask: Any) -> Case:
    kept = (batch, 2, past, 4)
    flat = (batch, keys, 8)
    return multi_head((batch, length, 8), flat, flat, (24,), mask, None, kept, kept)


SEVERAL_SIZES: dict[str, tuple[list[Case], dict[str, list[Any]]]] = {
    "Attention": (
        [attention_of(2, 4, 3, None), attention_of(3, 2, 0, None), attention_of(1, 1, 5, None)],
        SIZES,
    ),
    "Attention, keys": (
        [attention_of(2, 4, 3, ones_and_zeros(2, 7)), attention_of(3, 2, 0, ones_and_zeros(3, 2))],
        {**SIZES, "mask": ["batch", "total"]},
    ),
    "Attention, ends and starts": (
        [attention_of(2, 4, 3, ints(7, 6, 2, 0)), attention_of(1, 2, 0, ints(2, 0))],
        {**SIZES, "mask": ["rows"]},
    ),
    "MultiHeadAttention": (
        [multi_head_of(2, 3, 5, 2, None), multi_head_of(1, 4, 2, 0, None)],
        SIZES,
    ),
    "MultiHeadAttention, lengths": (
        [multi_head_of(2, 3, 5, 2, ints(7, 3)), multi_head_of(3, 4, 2, 1, ints(2, 3, 1))],
        {**SIZES, "mask": ["batch"]},
    ),
    "MultiHeadAttention, keys": (
        [
            multi_head_of(2, 3, 5, 2, ones_and_zeros(2, 7)),
            multi_head_of(3, 4, 2, 1, ones_and_zeros(3, 3)),
        ],
        {**SIZES, "mask": ["batch", "total"]},
    ),
    "GroupQueryAttention": (
        [
            groups(turns=8, past=0, last=[2, 1]),
            groups(turns=8, length=1, past=4, last=[4, 2]),
            groups(turns=8, length=1, past=8, total=5, batch=3, last=[4, 2, 0]),
            groups(turns=8, length=2, past=8, total=6, batch=1),
            groups(turns=8, length=2, past=4, batch=1),
        ],
        SIZES_OF_GROUPS,
    ),
    "GroupQueryAttention, places": (
        [
            groups(turns=8, past=0, places=ROW_OF_PLACES),
            groups(turns=8, length=1, past=4, places=torch.tensor([[7], [2]])),
        ],
        SIZES_OF_GROUPS,
    ),
}


@pytest.mark.parametrize("name", SEVERAL_SIZES)
def test_sizes_of_each_call(name):
    cases, sizes = SEVERAL_SIZES[name]
    first = cases[0].tensors()
    data = cases[0].file(first, sizes)
    loaded = torch_ort.load_onnx(data)
    weights = {weight: first[weight] for weight in WEIGHTS & first.keys()}
    for case in cases:
        tensors = {**case.tensors(), **weights}
        want = by_onnxruntime(data, all_results=True, **inputs_of(tensors))
        got = results_of(loaded, tensors)
        if case.op == "GroupQueryAttention":
            got, want = counted(case, got), counted(case, want)
        assert_equal(got, want)


@pytest.mark.parametrize("name", ["SkipLayerNormalization", "EmbedLayerNormalization"])
def test_sizes_of_norms(name):
    if name == "SkipLayerNormalization":
        case = Case(name, SKIP, {}, SUM)
        others = [{"x": torch.randn(1, 5, 8), "skip": torch.randn(1, 5, 8)}]
    else:
        case = Case(name, EMBEDDINGS, {}, 3)
        others = [{"ids": ints([1, 2]), "segments": ints([0, 2])}]
    sizes = {each: ["batch", "length", 8] for each in ("x", "skip")}
    sizes |= {each: ["batch", "length"] for each in ("ids", "segments")}
    tensors = case.tensors()
    data = case.file(tensors, sizes)
    loaded = torch_ort.load_onnx(data)
    for inputs in ({}, *others):
        given = {**tensors, **inputs}
        want = by_onnxruntime(data, all_results=True, **inputs_of(given))
        assert_equal(results_of(loaded, given), want)


def masked_groups() -> bytes:
    """A file as others write it: a mask has ones for tokens of a row, and its size is the total.

    A further output has as many zeros as the present has numbers.
    """
    case = groups(past=0)
    model = onnx.load_from_string(case.file(case.tensors(), SIZES_OF_GROUPS))
    graph = model.graph
    for value in [each for each in graph.input if each.name in ("last", "total")]:
        graph.input.remove(value)
    graph.input.append(
        helper.make_tensor_value_info("mask", onnx.TensorProto.INT64, ["batch", "t"])
    )
    graph.output.append(onnx.ValueInfoProto(name="zeros"))
    for name, number in (("one", torch.tensor(1)), ("axis", torch.tensor([1]))):
        graph.initializer.append(numpy_helper.from_array(number.numpy(), name))
    nodes = [
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"]),
        helper.make_node("Cast", ["size"], ["total"], to=onnx.TensorProto.INT32),
        helper.make_node("ReduceSum", ["mask", "axis"], ["counts"], keepdims=0),
        helper.make_node("Sub", ["counts", "one"], ["ends"]),
        helper.make_node("Cast", ["ends"], ["last"], to=onnx.TensorProto.INT32),
        *graph.node,
        helper.make_node("Shape", ["y1"], ["shape_of_present"]),
        helper.make_node("ConstantOfShape", ["shape_of_present"], ["zeros"]),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    return model.SerializeToString()


@pytest.mark.parametrize("road", ["eager", "ort"])
def test_a_total_of_the_sizes_of_a_mask(road):
    data = masked_groups()
    call = torch_ort.load_onnx(data)
    if road == "ort":
        call = torch.compile(call, backend="ort", dynamic=True)
    for case in (
        groups(past=0, last=[2, 1]),
        groups(length=1, past=4, last=[4, 2]),
        groups(length=1, past=8, total=5, last=[4, 2]),
    ):
        tensors = inputs_of(case.tensors())
        inputs = {name: x for name, x in tensors.items() if name not in ("last", "total")}
        mask = torch.arange(tensors["total"].item()) <= tensors["last"].unsqueeze(1)
        inputs["mask"] = mask.long()
        *want, zeros = by_onnxruntime(data, all_results=True, **inputs)
        *got, found = call(**inputs)
        assert_equal([*counted(case, got), found], [*counted(case, want), zeros])


# ---- gradients

SMALL_GROUPS = {"batch": 2, "width": 4}
GRADIENTS = {
    "Attention": with_past(
        mask=ones_and_zeros(2, 7), attention_bias=(1, 2, 4, 7), unidirectional=1, scale=0.3
    ),
    "Attention, ends and starts": attention(ints(4, 3, 1, 0), outputs=2),
    "Attention, no keys": attention(ints([0, 0, 1, 1], [0] * 4), unidirectional=1),
    "Attention, values of their own size": attention(
        inputs=VALUES_OF_THEIR_OWN, qkv_hidden_sizes=[8, 8, 4]
    ),
    "MultiHeadAttention": behind_past(
        bias=(24,), mask=ones_and_zeros(2, 3, 7), attention_bias=(2, 1, 3, 7), unidirectional=1
    ),
    "MultiHeadAttention, heads": multi_head(
        key=(2, 2, 5, 4), value=(2, 2, 5, 4), mask=ints(5, 0), outputs=1
    ),
    "MultiHeadAttention, packed": multi_head(query=(2, 3, 2, 3, 4), key=None, value=None),
    "MultiHeadAttention, scores": multi_head(attention_bias=(1, 1, 3, 5), outputs=SCORES),
    "GroupQueryAttention": groups(last=[2, 0], turns=2, **SMALL_GROUPS),
    "GroupQueryAttention, past": groups(
        length=1, past=4, last=[4, 2], turns=1, rotary_interleaved=1, **SMALL_GROUPS
    ),
    "GroupQueryAttention, packed, space": groups(
        length=2, past=5, total=4, is_packed=True, attention_bias=(1, 4, 2, 4), **SMALL_GROUPS
    ),
    "GroupQueryAttention, softcap, sink, window": groups(
        length=4, last=[3, 1], softcap=0.5, sink=(4,), local_window_size=2, **SMALL_GROUPS
    ),
    "GroupQueryAttention, smooth softmax": groups(smooth_softmax=1, **SMALL_GROUPS),
    "RotaryEmbedding": Case("RotaryEmbedding", *ROTARY["a part of the features"]),
    "RotaryEmbedding, heads": Case("RotaryEmbedding", *ROTARY["heads, first place"]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    case = GRADIENTS[name]
    tensors = case.tensors()
    loaded = torch_ort.load_onnx(case.file(tensors)).double()
    weights = {name: x.detach().requires_grad_() for name, x in loaded.named_parameters()}
    assert weights.keys() == WEIGHTS & tensors.keys()
    given = inputs_of(tensors)
    floats = {
        name: x.double().requires_grad_() for name, x in given.items() if x.is_floating_point()
    }
    names = [*floats, *weights]

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, leaves, strict=True))
        parameters = {name: named[name] for name in weights}
        inputs = {name: named.get(name, x) for name, x in given.items()}
        results = functional_call(loaded, parameters, (), inputs)
        return results if isinstance(results, tuple) else (results,)

    leaves = (*floats.values(), *weights.values())
    assert gradcheck(call, leaves)
    total = sum(x.square().sum() for x in call(*leaves))
    for leaf in torch.autograd.grad(total, leaves):
        assert leaf.isfinite().all()
        assert leaf.any()


def test_all_operators_are_here():
    cases = [
        *ACTIVATIONS.values(), *ATTENTION.values(), *MULTI_HEAD.values(), *GROUPS.values(),
    ]  # fmt: skip
    here = {case.op for case in cases} | NORMS.keys()
    here |= {
        "FusedMatMul", "TransposeMatMul", "FusedGemm", "SimplifiedLayerNormalization",
        "EmbedLayerNormalization", "SoftmaxCrossEntropyLossInternal", "RotaryEmbedding",
    }  # fmt: skip
    assert here == {name for domain, name in TABLE if domain == MICROSOFT}
