"""Gives the engine kernels of Triton for the regions of a graph, where options ask for them."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_ort import _C
from torch_ort.triton import config, kernels
from torch_ort.triton.printer import TILE, Printer

_log = logging.getLogger("torch_ort.triton")
# What an interpreter does for a tile takes long, and how much is in it matters little.
_INTERPRETED_TILE = 1 << 16
_DEBUG_FOLDER = "triton_debug"

_said: set[str] = set()
_lock = threading.Lock()


def _say_once(line: str) -> None:
    with _lock:
        if line in _said:
            return
        _said.add(line)
    _log.warning("%s", line)


def of_options(
    device: str, config_file: str, debug: bool
) -> Callable[[Mapping[str, Any]], kernels.Kernel | None] | None:
    """Give what SessionOptions.region_writer wants; None if Triton cannot run on the device.

    `debug` writes each region and its text under `triton_debug` in the working directory. Raises
    UserError for a file that cannot be read.
    """
    asked = config.read(config_file)
    why = kernels.why_not(device)
    if why:
        _say_once(f"ORTMODULE_USE_TRITON: {why}; the engine's own kernels run")
        return None
    return _Writer(asked, debug)


class _Writer:
    def __init__(self, asked: config.Config, debug: bool) -> None:
        self._asked = asked
        self._debug = debug

    def __call__(self, body: Mapping[str, Any]) -> kernels.Kernel | None:
        if not self._asked.takes(body["graph"]):
            return None
        try:
            text = Printer(body, _INTERPRETED_TILE if kernels.is_interpreted() else TILE).write()
            kernel = kernels.Kernel(body, text)
        # Whatever Triton raises where it does not know what a text says, or this version of it does
        # not have what a text imports.
        except Exception as error:
            _say_once(
                f"ORTMODULE_USE_TRITON: {type(error).__name__}: {error}; the engine's own kernel "
                "runs for this region and others of its kind"
            )
            return None
        if self._debug:
            _write_debug(body, text.source)
        return kernel


def _write_debug(body: Mapping[str, Any], source: str) -> None:
    """Write the sub-graph of a region, what is computed in each pass, and the text."""
    folder = Path(_DEBUG_FOLDER)
    folder.mkdir(exist_ok=True)
    name = f"region_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    graph: _C.Graph = body["graph"]
    (folder / f"{name}_original.onnx").write_bytes(graph.to_onnx(_C.required_opset(graph)))
    lines = [f"{body['rows']} rows, {body['columns']} columns, {body['groups']} groups"]
    for number, needed in enumerate(body["needed"]):
        lines.append(f"pass {number}:")
        lines += [f"  v{i} = {_line(body['values'][i])}" for i in needed]
    (folder / f"{name}_processed.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.py").write_text(source)


def _line(value: Mapping[str, Any]) -> str:
    what = value["op"] or value["kind"]
    of = ", ".join(f"v{i}" for i in value["operands"])
    if value["input"] >= 0:
        of = f"input {value['input']}"
    return f"{what}({of})" + (f"  # {value['origin']}" if value["origin"] else "")
