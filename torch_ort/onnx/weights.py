"""The data of initializers, taken out of a file and put back, and files with much of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import torch

from torch_ort import _C
from torch_ort.core.dtypes import dtype_of_number

# Above this number of bytes the tensors go into a separate file, because a file is limited to 2
# GiB.
_EXTERNAL_LIMIT = 2**30

# The fields of a TensorProto that are data; a file may have it in any of them.
_DATA = (
    "raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data",
    "uint64_data", "external_data",
)  # fmt: skip


def without_weights(file: onnx.ModelProto, names: Collection[str]) -> bytes:
    """Take the data of some initializers out of the file, and write it.

    It stays said which were external.
    """
    for tensor in file.graph.initializer:
        if tensor.name in names:
            for field in _DATA:
                tensor.ClearField(field)
    return file.SerializeToString()


def with_weights(file: bytes, tensors: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """Read a file of `without_weights`, with the data of tensors in the dtypes of the file.

    Raises UserError if a tensor is missing, or has other sizes than in the file.
    """
    model = onnx.load_model_from_string(file)
    for initializer in model.graph.initializer:
        if any(getattr(initializer, field) for field in _DATA):
            continue
        sizes = list(initializer.dims)
        given = tensors.get(initializer.name)
        if given is None and 0 in sizes:
            continue
        if given is None or list(given.shape) != sizes:
            got = "none" if given is None else list(given.shape)
            raise _C.UserError(
                f"export_onnx: sizes of '{initializer.name}': got {got}, want {sizes}"
            )
        initializer.raw_data = _bytes(given, initializer.data_type)
    return model


def _bytes(tensor: torch.Tensor, data_type: int) -> bytes:
    row_major = tensor.detach().to("cpu", dtype_of_number(data_type)).contiguous()
    return row_major.reshape(-1).view(torch.uint8).numpy().tobytes()


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; tensors of more than a GiB go into `<path>.data`."""
    is_large = model.ByteSize() > _EXTERNAL_LIMIT
    data = path.with_name(f"{path.name}.data")
    if is_large:
        data.unlink(missing_ok=True)  # onnx would append to it
    onnx.save_model(
        model, path, save_as_external_data=is_large, location=data.name if is_large else None
    )
