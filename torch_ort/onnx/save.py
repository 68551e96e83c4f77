"""Writes a trained model as an ONNX file."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
from torch import nn

from torch_ort.onnx.load import OnnxModule
from torch_ort.onnx.weights import with_weights


def export_onnx(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module that `load_onnx` gave as the file that it was, with the weights of now.

    Nodes, names, opsets and metadata are those of the file that was read, and so are the dtypes of
    the weights. If that file had external data, its large tensors stand in `<path>.data` beside the
    new one. Both are overwritten.

    Args:
        module: What `load_onnx` returned, or a copy of it: not what `torch.compile` or `ORTModule`
            made of it, which share its weights.
        path: Where to write.

    Raises:
        TypeError: The module is another one.
        UserError: A weight has other sizes than in the file.
        OSError: The file cannot be written.
    """
    if not isinstance(module, OnnxModule):
        raise TypeError(
            f"export_onnx: module: got {type(module).__name__}, want what load_onnx gave"
        )
    state = module.state_dict()
    model = with_weights(
        module.onnx_file, {name: state[key] for key, name in module.onnx_names.items()}
    )
    has_external = any(
        tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer
    )
    for tensor in model.graph.initializer:
        tensor.ClearField("data_location")
    path = Path(path)
    data = path.with_name(path.name + ".data")
    if has_external:
        data.unlink(missing_ok=True)  # onnx would append to it
    onnx.save_model(model, path, save_as_external_data=has_external, location=data.name)
