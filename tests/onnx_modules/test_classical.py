"""Operators of classical machine learning, against onnxruntime's kernels."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_cases import by_onnxruntime
from torch.autograd import gradcheck

import torch_ort
from torch_ort import Unsupported, UserError
from torch_ort.onnx.functions import TABLE

pytestmark = pytest.mark.ort_only

ML = "ai.onnx.ml"
ROWS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [-3.0, -1.0, -2.0], [4.0, 2.0, 1.0]])
NUMBERS = torch.tensor([[1, -2, 5], [0, 3, 1], [7, -2, 1]])
ONE = {"coefficients": [0.5, 0.2, -0.3], "intercepts": [0.1]}
THREE = {
    "coefficients": [0.5, 0.2, -0.3, 0.1, 0.7, 0.4, -0.2, 0.3, 0.1], "intercepts": [0.1, 0.0, 0.2],
}  # fmt: skip
INTEGER, FLOAT = TensorProto.INT64, TensorProto.FLOAT

# The operator, its attributes, its inputs and the element types of its outputs.
CASES: dict[str, tuple[str, dict[str, Any], tuple[torch.Tensor, ...], tuple[int, ...]]] = {
    "scaler": ("Scaler", {"offset": [1.0, 2.0, 3.0], "scale": [0.5, 2.0, 1.0]}, (ROWS,), (FLOAT,)),
    "scaler_of_integers": ("Scaler", {"offset": [1.0], "scale": [0.5]}, (NUMBERS,), (FLOAT,)),
    **{
        f"normalizer_{norm}": ("Normalizer", {"norm": norm}, (ROWS,), (FLOAT,))
        for norm in ("MAX", "L1", "L2")
    },
    "regressor": ("LinearRegressor", ONE, (ROWS,), (FLOAT,)),
    **{
        f"regressor_{post}": (
            "LinearRegressor", {**THREE, "targets": 3, "post_transform": post}, (ROWS,), (FLOAT,)
        )
        for post in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    },
    **{
        f"classifier_{post}": (
            "LinearClassifier",
            {**THREE, "classlabels_ints": [3, 7, 9], "multi_class": 1, "post_transform": post},
            (ROWS,), (INTEGER, FLOAT),
        )
        for post in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    },
    **{
        f"classifier_of_one_score_{post}": (
            "LinearClassifier", {**ONE, "classlabels_ints": [3, 7], "post_transform": post},
            (ROWS,), (INTEGER, FLOAT),
        )
        for post in ("NONE", "LOGISTIC")
    },
    "extractor": ("ArrayFeatureExtractor", {}, (ROWS, torch.tensor([2, 0])), (FLOAT,)),
    "extractor_of_a_vector": (
        "ArrayFeatureExtractor", {}, (ROWS[0], torch.tensor([[2], [0]])), (FLOAT,)
    ),
    "extractor_of_integers": (
        "ArrayFeatureExtractor", {}, (NUMBERS[:1], torch.tensor([1, 1, 2])), (INTEGER,)
    ),
    "binarizer": ("Binarizer", {"threshold": 0.5}, (ROWS,), (FLOAT,)),
    "imputer": (
        "Imputer", {"imputed_value_floats": [9.0, 8.0, 7.0], "replaced_value_float": 0.0},
        (ROWS,), (FLOAT,),
    ),
    "imputer_of_nan": (
        "Imputer", {"imputed_value_floats": [9.0], "replaced_value_float": float("nan")},
        (torch.tensor([[1.0, float("nan")]]),), (FLOAT,),
    ),
    "imputer_of_integers": (
        "Imputer", {"imputed_value_int64s": [9], "replaced_value_int64": -2},
        (NUMBERS,), (INTEGER,),
    ),
    "labels_to_numbers": (
        "LabelEncoder",
        {"keys_int64s": [1, -2], "values_floats": [0.5, 0.25], "default_float": -1.0},
        (NUMBERS,), (FLOAT,),
    ),
    "labels_of_numbers": (
        "LabelEncoder", {"keys_floats": [1.0, float("nan")], "values_int64s": [5, 6]},
        (torch.tensor([1.0, float("nan"), 3.0]),), (INTEGER,),
    ),
    "one_hot": ("OneHotEncoder", {"cats_int64s": [1, -2]}, (NUMBERS,), (FLOAT,)),
    "one_hot_of_floats": ("OneHotEncoder", {"cats_int64s": [1, -2, 0]}, (ROWS,), (FLOAT,)),
    "vectorizer": (
        "FeatureVectorizer", {"inputdimensions": [2, 3]}, (ROWS, ROWS * 2), (FLOAT,)
    ),
}  # fmt: skip
DIFFERENTIABLE = [
    name
    for name, (_, _, inputs, _) in CASES.items()
    if inputs[0].is_floating_point()
    and not name.startswith(("binarizer", "labels", "one_hot", "imputer_of_nan"))
]


def file_of(
    op: str, attributes: dict[str, Any], inputs: tuple[torch.Tensor, ...], types: tuple[int, ...]
) -> bytes:
    names = [f"x{i}" for i in range(len(inputs))]
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.numpy().dtype), [None, *x.shape[1:]]
        )
        for name, x in zip(names, inputs, strict=True)
    ]
    made = [helper.make_tensor_value_info(f"y{i}", t, None) for i, t in enumerate(types)]
    node = helper.make_node(op, names, [value.name for value in made], domain=ML, **attributes)
    model = helper.make_model(
        helper.make_graph([node], "net", given, made), ir_version=8,
        opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid(ML, 4)],
    )  # fmt: skip
    return model.SerializeToString()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, compiled: bool) -> None:
    op, attributes, inputs, types = CASES[name]
    data = file_of(op, attributes, inputs, types)
    loaded = torch_ort.load_onnx(data)
    call = torch.compile(loaded, backend="ort", fullgraph=True) if compiled else loaded
    got = call(*inputs)
    want = by_onnxruntime(data, True, **{f"x{i}": x for i, x in enumerate(inputs)})
    for mine, theirs in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert torch_ort.counters()["fallbacks"] == 0
    assert not loaded.state_dict()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    op, attributes, inputs, types = CASES[name]
    loaded = torch_ort.load_onnx(file_of(op, attributes, inputs, types)).double()
    # A norm has no gradient where a row is 0, and a maximum none where two elements are.
    x = (ROWS[[0, 2, 3]] if inputs[0].ndim == 2 else inputs[0]).double().requires_grad_()
    others = [each[[0, 2, 3]].double() if each.is_floating_point() else each for each in inputs[1:]]

    def call(x: torch.Tensor) -> torch.Tensor:
        results = loaded(x, *others)
        return results[-1] if isinstance(results, tuple) else results

    assert gradcheck(call, [x])


def test_rows_of_zeros_have_finite_gradients() -> None:
    for norm in ("L1", "L2"):
        data = file_of("Normalizer", {"norm": norm}, (ROWS,), (FLOAT,))
        x = ROWS.clone().requires_grad_()
        torch_ort.load_onnx(data)(x).square().sum().backward()
        assert x.grad.isfinite().all()


def test_constants_move_with_the_module() -> None:
    loaded = torch_ort.load_onnx(file_of("LinearRegressor", ONE, (ROWS,), (FLOAT,)))
    assert loaded.double()(ROWS).dtype == torch.float64
    assert loaded.to("meta")(ROWS.to("meta")).is_meta


def test_a_regressor_is_written_as_it_was_read(tmp_path) -> None:
    data = file_of("LinearRegressor", ONE, (ROWS,), (FLOAT,))
    torch_ort.export_onnx(torch_ort.load_onnx(data), tmp_path / "net.onnx")
    assert onnx.load(tmp_path / "net.onnx").graph == onnx.load_from_string(data).graph


@pytest.mark.parametrize(
    ("op", "attributes", "error", "words"),
    [
        ("Normalizer", {"norm": "L3"}, UserError, "norm: got 'L3', want MAX, L1 or L2"),
        ("LinearRegressor", {**ONE, "post_transform": "LOGISTIC"}, Unsupported,
         "got 'LOGISTIC' for one target, want NONE"),
        ("LinearRegressor", {**THREE, "targets": 3, "post_transform": "PROBIT"}, Unsupported,
         "post_transform: got 'PROBIT', want NONE, LOGISTIC"),
        ("LinearClassifier", {**ONE, "classlabels_ints": [1, 2, 3]}, UserError,
         "classes: got 3 for scores of 1, want one for each"),
        ("LinearClassifier", {**ONE, "classlabels_strings": ["a", "b"]}, Unsupported,
         "attribute 'classlabels_strings' is not supported"),
        ("Imputer", {"imputed_value_int64s": [1]}, UserError, "got none for torch.float32"),
        ("LabelEncoder", {"keys_floats": [1.0], "values_floats": [1.0, 2.0]}, UserError,
         "got 1 keys and 2 values, want as many"),
        ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, Unsupported, "zeros: got 0"),
        ("TreeEnsembleRegressor", {"n_targets": 1}, Unsupported,
         "ai.onnx.ml.TreeEnsembleRegressor: got an operator of classical machine learning that"),
        ("ZipMap", {"classlabels_int64s": [1]}, Unsupported,
         "ai.onnx.ml.ZipMap: got"),
    ],
)  # fmt: skip
def test_what_is_refused(op: str, attributes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        torch_ort.load_onnx(file_of(op, attributes, (ROWS,), (FLOAT,)))


def test_all_operators_are_here() -> None:
    assert {op for op, *_ in CASES.values()} == {name for domain, name in TABLE if domain == ML}
