"""Operators of classical machine learning (`ai.onnx.ml`), as exporters of scikit-learn write them.

Their coefficients are attributes in the file, and so constants here: buffers that are no part of
`state_dict`. Gradients flow through to their inputs where the operator has any. Classes and
categories that are strings are refused, as strings are everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import ML, of_onnx


class _Constants(nn.Module):
    """A module with numbers of the file, which move with it and are not saved."""

    def _keep(self, **numbers: Sequence[float]) -> None:
        for name, given in numbers.items():
            values = torch.tensor(given, dtype=torch.float32)
            self.register_buffer(name, values, persistent=False)


@of_onnx("Scaler", domain=ML)
class Scaler(_Constants):
    """(x - offset) * scale, with a number for each feature or one for all."""

    offset: Tensor
    scale: Tensor

    def __init__(
        self, numbers: object, *, offset: Sequence[float] = (0.0,), scale: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__()
        self._keep(offset=offset, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the features, which are the last dim."""
        return (x.to(self.scale.dtype) - self.offset) * self.scale


@of_onnx("Normalizer", domain=ML)
def normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    """Divide each row by its greatest element, or by one of its norms; rows of 0 stay."""
    x = x if x.is_floating_point() else x.float()
    if norm == "MAX":
        by = x.amax(-1, keepdim=True)
    elif norm in ("L1", "L2"):
        by = torch.linalg.vector_norm(x, 1 if norm == "L1" else 2, -1, keepdim=True)
    else:
        raise _C.UserError(f"Normalizer: norm: got '{norm}', want MAX, L1 or L2")
    return x / torch.where(by == 0, torch.ones_like(by), by)


def _softmax_of_others(scores: Tensor) -> Tensor:
    """Give the softmax over the scores that are not 0; those that are stay 0."""
    is_zero = scores.abs() <= 1e-7
    result = scores.masked_fill(is_zero, -math.inf).softmax(-1)
    return result.masked_fill(is_zero, 0.0)


_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "NONE": lambda scores: scores,
    "LOGISTIC": torch.sigmoid,
    "SOFTMAX": lambda scores: scores.softmax(-1),
    "SOFTMAX_ZERO": _softmax_of_others,
}


def _transform(op: str, name: str) -> Callable[[Tensor], Tensor]:
    if name not in _TRANSFORMS:
        raise _C.Unsupported(f"{op}: post_transform: got '{name}', want {', '.join(_TRANSFORMS)}")
    return _TRANSFORMS[name]


def _as_rows(x: Tensor) -> Tensor:
    """Give (rows, features) of floating point; a vector is one row."""
    x = x if x.is_floating_point() else x.float()
    return x.reshape(-1, x.shape[-1])


@of_onnx("LinearRegressor", domain=ML)
class LinearRegressor(_Constants):
    """x C^T + b: (rows, targets)."""

    coefficients: Tensor
    intercepts: Tensor

    def __init__(
        self, numbers: object, *, coefficients: Sequence[float],
        intercepts: Sequence[float] = (0.0,), targets: int = 1, post_transform: str = "NONE",
    ) -> None:  # fmt: skip
        super().__init__()
        if targets == 1 and post_transform != "NONE":
            # Runtimes differ in what they compute.
            raise _C.Unsupported(
                f"LinearRegressor: post_transform: got '{post_transform}' for one target, want NONE"
            )
        self.targets, self.post_transform = targets, post_transform
        _transform("LinearRegressor", post_transform)
        self._keep(coefficients=coefficients, intercepts=intercepts)

    def forward(self, x: Tensor) -> Tensor:
        """Give the targets of each row."""
        rows = _as_rows(x).to(self.coefficients.dtype)
        scores = F.linear(rows, self.coefficients.view(self.targets, -1)) + self.intercepts
        return _TRANSFORMS[self.post_transform](scores)


@of_onnx("LinearClassifier", domain=ML)
class LinearClassifier(_Constants):
    """The likeliest class of each row, and the scores x C^T + b (rows, classes).

    Two classes may have one score, that of the second class: the first has 1 less it, or with
    "LOGISTIC" its negative.
    """

    coefficients: Tensor
    intercepts: Tensor
    classes: Tensor

    def __init__(
        self, numbers: object, *, coefficients: Sequence[float], classlabels_ints: Sequence[int],
        intercepts: Sequence[float] = (0.0,), multi_class: int = 0, post_transform: str = "NONE",
    ) -> None:  # fmt: skip
        super().__init__()
        self.post_transform = post_transform
        _transform("LinearClassifier", post_transform)
        self._keep(coefficients=coefficients, intercepts=intercepts)
        self.register_buffer("classes", torch.tensor(classlabels_ints), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give classes and scores."""
        rows = _as_rows(x).to(self.coefficients.dtype)
        scores = F.linear(rows, self.coefficients.view(-1, rows.shape[1])) + self.intercepts
        if scores.shape[1] == 1 and self.classes.shape[0] == 2:
            best = (scores[:, 0] > 0).long()
            if self.post_transform == "LOGISTIC":
                scores = torch.sigmoid(torch.cat([-scores, scores], 1))
            else:
                scores = torch.cat([1 - scores, scores], 1)
        elif scores.shape[1] == self.classes.shape[0]:
            best = scores.argmax(1)
            scores = _TRANSFORMS[self.post_transform](scores)
        else:
            raise _C.UserError(
                f"LinearClassifier: classes: got {self.classes.shape[0]} for scores of "
                f"{scores.shape[1]}, want one for each"
            )
        return self.classes[best], scores


@of_onnx("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(x: Tensor, places: Tensor) -> Tensor:
    """Pick elements of the last dim; a vector is one row."""
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    return rows.index_select(-1, places.reshape(-1))


@of_onnx("Binarizer", domain=ML)
def binarizer(x: Tensor, *, threshold: float = 0.0) -> Tensor:
    """Give 1 for what is above the threshold and 0 for the rest."""
    return (x > threshold).to(x.dtype)


@of_onnx("Imputer", domain=ML)
def imputer(
    x: Tensor, *, imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (), replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Tensor:  # fmt: skip
    """Put a number for each feature, or one for all, in the place of a number that says "none"."""
    if x.is_floating_point():
        given: Sequence[float] = imputed_value_floats
        missing = x.isnan() if math.isnan(replaced_value_float) else x == replaced_value_float
    else:
        given = imputed_value_int64s
        missing = x == replaced_value_int64
    if not given:
        raise _C.UserError(f"Imputer: imputed values: got none for {x.dtype}, want at least one")
    return torch.where(missing, torch.tensor(given, dtype=x.dtype, device=x.device), x)


@of_onnx("LabelEncoder", domain=ML)
def label_encoder(
    x: Tensor, *, keys_int64s: Sequence[int] = (), keys_floats: Sequence[float] = (),
    values_int64s: Sequence[int] = (), values_floats: Sequence[float] = (),
    default_int64: int = -1, default_float: float = -0.0,
) -> Tensor:  # fmt: skip
    """Replace keys by values, and all else by the default."""
    keys = torch.tensor(keys_int64s or keys_floats, dtype=x.dtype, device=x.device)
    is_integer = bool(values_int64s)
    values = torch.tensor(
        values_int64s or values_floats, dtype=torch.int64 if is_integer else torch.float32,
        device=x.device,
    )  # fmt: skip
    if keys.shape != values.shape or not keys.numel():
        raise _C.UserError(
            f"LabelEncoder: got {keys.numel()} keys and {values.numel()} values, want as many"
        )
    given = x.unsqueeze(-1)
    is_key = given == keys
    if x.is_floating_point():
        is_key = is_key | (given.isnan() & keys.isnan())
    found = values[is_key.int().argmax(-1)]
    default = default_int64 if is_integer else default_float
    return torch.where(is_key.any(-1), found, torch.full_like(found, default))


@of_onnx("OneHotEncoder", domain=ML)
def one_hot_encoder(x: Tensor, *, cats_int64s: Sequence[int], zeros: int = 1) -> Tensor:
    """Give a dim of flags, one for each category, where an unknown one has none."""
    if not zeros:
        raise _C.Unsupported("OneHotEncoder: zeros: got 0, which checks what it reads, want 1")
    categories = torch.tensor(cats_int64s, dtype=torch.int64, device=x.device)
    return (x.long().unsqueeze(-1) == categories).float()


@of_onnx("FeatureVectorizer", domain=ML)
def feature_vectorizer(*inputs: Tensor, inputdimensions: Sequence[int]) -> Tensor:
    """Join the first features of the inputs, as many of each as it says."""
    parts = [_as_rows(x) for x in inputs]
    kept = [x[:, :size] for x, size in zip(parts, inputdimensions, strict=True)]
    return torch.cat(kept, 1)
