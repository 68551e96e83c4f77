"""Settings of an ORTModule from a JSON file, with the keys of ONNX Runtime Training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_ort import options
from torch_ort._C import UserError
from torch_ort.capture import logs
from torch_ort.ortmodule.debug_options import DebugOptions
from torch_ort.ortmodule.module import ORTModule

# Keys that set an option of docs/options.md, with the name of the option.
_OPTIONS = {
    "EnableCustomAutogradFunction": "enable_custom_autograd",
    "FallbackPolicy": "fallback_policy",
    "OnnxOpsetVersion": "opset",
    "SkipCheck": "skipcheck_policy",
}
# Keys of settings that cannot be switched off, with the reason.
_ALWAYS_ON = {
    "UseExternalGPUAllocator": "PyTorch's allocator gives all memory",
    "RunSymbolicShapeInference": "a capture knows all sizes as symbols",
}
# Keys of what ONNX Runtime Training has to be told, with the reason why it is not needed here.
_NEVER_NEEDED = {
    "PropagateCastOps": "casts are parts of fused kernels, which read and write each dtype",
    "EnableGradAccOptimization": "all weights are cast in one launch per call",
    "UseStaticShape": "each set of sizes has a memory plan of its own",
    "UseMemoryEfficientGradient": "what backward reads of forward is chosen by its bytes",
}
_BOOLS = {
    "EnableCustomAutogradFunction", "UseExternalGPUAllocator", "RunSymbolicShapeInference",
    "EnableGradAccOptimization", "UseStaticShape", "UseMemoryEfficientGradient",
}  # fmt: skip
_KEYS = ("DebugOptions", *_OPTIONS, *_ALWAYS_ON, *_NEVER_NEEDED)


def load_from_json(ortmodule: ORTModule, path: str | Path | None = None) -> None:
    """Set an ORTModule's options from a file; without a path, from ORTMODULE_JSON_CONFIG_PATH.

    What was captured is captured again. Raises UserError on an unknown key or a wrong value, and
    on a missing path.
    """
    path = path or options.resolve_ortmodule().json_config_path
    if not path:
        raise UserError(
            "load_from_json: got no path, want one as argument or in ORTMODULE_JSON_CONFIG_PATH"
        )
    data = Path(path).read_bytes()
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"load_from_json: {path}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"load_from_json: {path}: got {type(config).__name__}, want an object")
    for key, value in config.items():
        if key not in _KEYS:
            raise UserError(
                f"load_from_json: unknown key {key!r}, want one of {', '.join(_KEYS)}"
                f"{options.near(key, _KEYS)}"
            )
        if key in _BOOLS and not isinstance(value, bool):
            raise UserError(f"load_from_json: {key}: got {value!r}, want true or false")
    current = ortmodule._debug_options
    asked = {_OPTIONS[key]: value for key, value in config.items() if key in _OPTIONS}
    ortmodule._configure(
        _debug_options(config.get("DebugOptions", {}), current, current.config | asked)
    )
    debug = ortmodule._debug_options
    logger = logs.make_logger(debug.log_level)
    switched_off = {key: why for key, why in _ALWAYS_ON.items() if not config.get(key, True)}
    switched_on = {key: why for key, why in _NEVER_NEEDED.items() if config.get(key)}
    for key, why in (switched_off | switched_on).items():
        logs.say_once(logger, f"{key}: never needed, ignored: {why}")


def _debug_options(config: Any, current: DebugOptions, options_asked: dict) -> DebugOptions:
    if not isinstance(config, dict):
        raise UserError(f"load_from_json: DebugOptions: got {config!r}, want an object")
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "LogLevel": ("log_level", options.log_level),
        "SaveONNX": ("save_onnx", _reader_of("SaveONNX", bool, "true or false")),
        "ONNXPrefix": ("onnx_prefix", _reader_of("ONNXPrefix", str, "a string")),
        "SaveONNXPath": ("save_path", _reader_of("SaveONNXPath", str, "a string")),
    }
    values = {
        "log_level": current.log_level,
        "save_onnx": current.save_onnx,
        "onnx_prefix": current.onnx_prefix,
        "save_path": current.save_path,
    }
    for key, value in config.items():
        if key not in readers:
            raise UserError(
                f"load_from_json: unknown key {key!r} of DebugOptions, want one of "
                f"{', '.join(readers)}{options.near(key, list(readers))}"
            )
        name, read = readers[key]
        values[name] = read(value)
    return DebugOptions(**values, config=options_asked)


def _reader_of(key: str, kind: type, want: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        raise UserError(f"load_from_json: {key}: got {value!r}, want {want}")

    return read
