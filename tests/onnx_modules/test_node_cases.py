"""The node tests of the onnx package, as modules: each is right, or is refused by name.

Cases are those with a float32 tensor among inputs and outputs, without those that spell out an
operator whose own case stands beside them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only

# Inputs that files give as constants, by operator.
CONSTANTS = {
    "AffineGrid": [1], "BlackmanWindow": [0], "CenterCropPad": [1], "Col2Im": [1, 2],
    "ConstantOfShape": [0], "CumProd": [1], "CumSum": [1], "DFT": [1, 2], "Dropout": [1, 2],
    "Expand": [1], "HammingWindow": [0], "HannWindow": [0], "Loop": [0], "MaxUnpool": [2],
    "MelWeightMatrix": [0, 1, 2, 3, 4], "NonMaxSuppression": [2, 3, 4], "OneHot": [1],
    "Pad": [1, 2, 3], "Range": [0, 1, 2], "Reshape": [1], "Resize": [1, 2, 3],
    "Slice": [1, 2, 3, 4], "Split": [1], "Squeeze": [1], "STFT": [1, 3], "Tile": [1], "TopK": [1],
    "Trilu": [1], "Unsqueeze": [1], "Upsample": [1],
}  # fmt: skip

# Why a case is not loaded, by words of its error and of its name.
REFUSED = {
    "OptionalGetElement: the engine has no such op": ["optional_get_element_tensor"],
    "element type 2": ["INT4", "INT2", "FLOAT4", "int4", "int2", "float4", "E8M0"],
    "got no tensor, want a tensor": ["split_to_sequence", "sequence_map", "optional_get_element"],
    "FlexAttention: no kernel has this name": ["flexattention"],
    "TfIdfVectorizer: the engine has no such op": ["tfidfvectorizer"],
    "preview.training": ["adagrad", "adam", "momentum"],
    "ai.onnx.ml.TreeEnsemble": ["tree_ensemble"],
    "Scan: opset: got 8": ["scan_sum"],
}
# PyTorch reduces no elements to a maximum.
RAISES = {"test_reduce_max_empty_set", "test_reduce_min_empty_set"}
# They draw numbers, which no two generators do alike.
DRAWS = ("test_training_dropout", "test_bernoulli")


@functools.cache
def cases() -> dict[str, Any]:
    from onnx.backend.test.case.node import collect_testcases

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return {each.name: each for each in found if "_expanded" not in each.name and has_floats(each)}


def has_floats(case: Any) -> bool:
    values = (*case.model.graph.input, *case.model.graph.output)
    return any(each.type.tensor_type.elem_type == TensorProto.FLOAT for each in values)


def with_constants(case: Any) -> tuple[onnx.ModelProto, list[Any], list[Any]]:
    """Give the model with its constants as initializers, the other inputs, and the results."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    inputs, results = case.data_sets[0]
    constant = {
        node.input[slot]
        for node in model.graph.node
        for slot in ([1] if node.op_type.startswith("Reduce") else CONSTANTS.get(node.op_type, []))
        if slot < len(node.input) and node.input[slot]
    }
    rest = []
    declared = list(model.graph.input)
    del model.graph.input[:]
    for value, given in zip(declared, inputs, strict=True):
        if value.name in constant:
            array = numpy_helper.from_array(np.asarray(given), value.name)
            model.graph.initializer.append(array)
        else:
            model.graph.input.append(value)
            rest.append(given)
    return model, rest, results


def tensor(given: Any) -> torch.Tensor:
    """Read an array, or a TensorProto, also of dtypes that numpy has not."""
    array = np.array(numpy_helper.to_array(given) if hasattr(given, "raw_data") else given)
    if array.dtype.name.startswith(("bfloat16", "float8")):
        bits = np.uint8 if array.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def names() -> list[str]:
    return [name for name in sorted(cases()) if not name.startswith(DRAWS)]


def refused_words(name: str) -> str | None:
    return next(
        (words for words, parts in REFUSED.items() if any(part in name for part in parts)), None
    )


@pytest.mark.parametrize("name", names())
def test_case(name: str) -> None:
    model, inputs, results = with_constants(cases()[name])
    words = refused_words(name)
    if words is not None:
        with pytest.raises((Unsupported, UserError), match=re.escape(words)):
            torch_ort.load_onnx(model)
        return
    loaded = torch_ort.load_onnx(model)
    if name in RAISES:
        with pytest.raises(IndexError, match="non-zero size"):
            loaded(*map(tensor, inputs))
        return
    got = loaded(*map(tensor, inputs))
    for mine, want in zip(got if isinstance(got, tuple) else (got,), results, strict=False):
        expected = tensor(want)
        assert mine.dtype == expected.dtype
        is_narrow = mine.is_floating_point() and mine.dtype.itemsize < 4
        torch.testing.assert_close(
            mine.detach().double(), expected.double(), rtol=1e-3, atol=1e-2 if is_narrow else 1e-5,
            equal_nan=True,
        )  # fmt: skip


def test_most_cases_are_loaded() -> None:
    loaded = 0
    for name in cases():
        with contextlib.suppress(Unsupported, UserError):
            torch_ort.load_onnx(with_constants(cases()[name])[0])
            loaded += name not in RAISES
    assert loaded >= 935
    assert loaded >= 0.92 * len(cases())
