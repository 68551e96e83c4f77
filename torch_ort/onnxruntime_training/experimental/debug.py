"""Log level and saved files of an existing ORTModule."""

from __future__ import annotations

import os
from typing import Any

from torch_ort.core.log_level import LogLevel
from torch_ort.onnxruntime_training.experimental.arguments import check_kind, check_model
from torch_ort.ortmodule import DebugOptions, ORTModule


def save_intermediate_onnx_graphs(model: ORTModule, prefix: str, enable: bool = True) -> bool:
    """Write ONNX files of graphs captured from now on, or write none; gives `enable`.

    `prefix` is a folder and the start of the names in it: `folder/name`. The files are those of
    `DebugOptions(save_onnx=True)`. What was captured is captured again.
    Raises TypeError for what is no ORTModule and for a prefix that is no string, NotADirectoryError
    for a folder that is not there, NameError for a prefix without the start of a name, OSError
    where the folder cannot be written to.
    """
    check_model(model)
    if not isinstance(prefix, str) or not prefix:
        raise TypeError(f"prefix: got {prefix!r}, want a string that is not empty")
    folder, name = os.path.split(prefix)
    if not os.path.isdir(folder or os.curdir):
        raise NotADirectoryError(f"prefix: got {prefix!r}, but there is no folder {folder!r}")
    if not name.strip():
        raise NameError(f"prefix: got {prefix!r}, want the start of a name after the folder")
    _configure(model, save_onnx=bool(enable), onnx_prefix=name, save_path=folder or os.getcwd())
    return bool(enable)


def set_log_level(model: ORTModule, level: LogLevel = LogLevel.WARNING) -> None:
    """Choose how much an ORTModule says; ORTMODULE_LOG_LEVEL wins. It captures again.

    Raises TypeError for what is no ORTModule, and for a level that is no LogLevel.
    """
    check_model(model)
    check_kind("level", level, LogLevel)
    _configure(model, log_level=level)


def _configure(model: ORTModule, **changed: Any) -> None:
    before = model._debug_options
    names = ("log_level", "save_onnx", "onnx_prefix", "save_path")
    values = {name: getattr(before, name) for name in names} | changed
    # The variable would take precedence over the argument.
    hidden = {"save_path": "save_onnx_path"}
    config = {
        name: value
        for name, value in before.config.items()
        if name not in {hidden.get(it, it) for it in changed}
    }
    model._configure(DebugOptions(**values, config=config))
