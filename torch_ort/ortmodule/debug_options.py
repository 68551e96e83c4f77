"""DebugOptions: the options of one ORTModule, and what it logs and saves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch_ort.core.log_level import LogLevel


class DebugOptions:
    """The options of one ORTModule: its log level, saved ONNX files, and options of the engine.

        model = torch_ort.ORTModule(model, torch_ort.DebugOptions(config={"memory_budget": 0.5}))

    Args:
        log_level: The least severe messages to log. The environment wins over it.
        save_onnx: Write the captured and optimized graphs as ONNX files.
        onnx_prefix: How the names of these files start; needed with `save_onnx`.
        save_path: The folder of the files; the current one if empty. The environment wins over it.
        config: Options of docs/options.md by name, which win over the other arguments.

    Raises TypeError on an argument of a wrong type, ValueError on a missing prefix, UserError on an
    unknown option or a wrong value, and OSError if the folder cannot be written to.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str | os.PathLike[str] = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        from torch_ort import options

        if not isinstance(log_level, LogLevel):
            raise TypeError(f"log_level: got {type(log_level).__name__}, want a LogLevel")
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"onnx_prefix: got {type(onnx_prefix).__name__}, want a string")
        if not isinstance(save_path, str | os.PathLike):
            raise TypeError(f"save_path: got {type(save_path).__name__}, want a path")
        if save_onnx and not onnx_prefix:
            raise ValueError("onnx_prefix: got nothing, want a prefix for the files of save_onnx")
        self.config = dict(config or {})
        _, own_config = options.split(self.config)
        given = {"log_level": log_level, "save_onnx_path": os.fspath(save_path)} | own_config
        settings = options.resolve_ortmodule(given, environment_wins=True)
        folder = settings.save_onnx_path or os.getcwd()
        if save_onnx and not os.access(folder, os.W_OK):
            raise OSError(f"save_path: cannot write to the folder '{folder}'")
        self.log_level = settings.log_level
        self.save_onnx = bool(save_onnx)
        self.onnx_prefix = onnx_prefix
        self.save_path = folder

    @property
    def logging(self) -> DebugOptions:
        """These options themselves, so that `.logging.log_level` gives the level."""
        return self

    @property
    def save_onnx_models(self) -> _SavedModels:
        """Whether, under which names and where files are written."""
        return _SavedModels(self.save_onnx, self.onnx_prefix, self.save_path)

    @property
    def torch_exporter_filter(self) -> list[str] | None:
        """Lines of an exporter to hide: there is no exporter, so nothing is hidden."""
        return None

    @property
    def onnxruntime_log_filter(self) -> list[str] | None:
        """Lines of a runtime to hide: nothing is hidden."""
        return None


class _SavedModels:
    def __init__(self, save: bool, name_prefix: str, path: str) -> None:
        self.save = save
        self.name_prefix = name_prefix
        self.path = path
