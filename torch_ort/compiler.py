"""From a captured graph to a session: passes, plan, dumps; equal graphs share one session."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ort import _C
from torch_ort._C import UserError
from torch_ort.fallback import stage
from torch_ort.options import Options

_sessions: dict[str, _C.Session] = {}
_numbers = itertools.count()


@dataclass
class Program:
    """A captured graph on its way: what reports and dumps show of it."""

    graph: _C.Graph
    constants: dict[str, torch.Tensor]
    is_training: bool
    tensor_inputs: list[int] = field(default_factory=list)
    symbol_inputs: list[int] = field(default_factory=list)
    captured: _C.Graph | None = None  # as it was before the passes; kept where something shows it
    session: _C.Session | None = None
    number: int = 0
    passes: list[tuple[str, int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def compile_program(program: Program, options: Options) -> _C.Session:
    """Compile a captured graph, or give the session of an equal one.

    Raises Unsupported or InternalError with the stage it comes from (`pass`, `plan`).
    """
    program.number = next(_numbers)
    program.captured = program.graph.clone()
    key = _key(program, options)
    start = time.perf_counter()
    with stage("pass"):
        disabled = [name for name in options.disable if name not in ("reorder", "in_place")]
        program.passes = _C.run_pipeline(program.graph, disabled, options.bisect, options.check)
    program.seconds["passes"] = time.perf_counter() - start
    _write_dumps(program, options)
    if key in _sessions:
        _C.count_sharing()
        program.session = _sessions[key]
        return program.session
    start = time.perf_counter()
    with stage("plan"):
        program.session = _compile_session(program, options)
    program.seconds["plan"] = time.perf_counter() - start
    if "steps" in options.dump:
        _write_text(options, f"{program.number:02}_steps.txt", _steps_text(program.session))
    _sessions[key] = program.session
    return program.session


def _compile_session(program: Program, options: Options) -> _C.Session:
    return _C.Session.compile(
        program.graph,
        program.constants,
        reorder="reorder" not in options.disable,
        in_place="in_place" not in options.disable,
        verify=options.check > 0,
    )


def release_sessions() -> None:
    """Forget all sessions; those that a compiled function still holds live on with it."""
    _sessions.clear()


def _key(program: Program, options: Options) -> str:
    """Equal text means equal work: the graph, what it holds, and how it is compiled."""
    digest = hashlib.sha256(program.captured.to_onnx(_C.required_opset(program.captured)))
    digest.update(repr((options, torch.are_deterministic_algorithms_enabled())).encode())
    for name, tensor in program.constants.items():
        digest.update(f"{name}:{id(tensor)}:{tensor._version}".encode())
    return digest.hexdigest()


def _write_dumps(program: Program, options: Options) -> None:
    if options.save_onnx:
        _write_onnx(program.captured, f"{options.onnx_prefix}_{program.number}_captured.onnx")
        _write_onnx(program.graph, f"{options.onnx_prefix}_{program.number}_optimized.onnx")
    if options.dump:
        os.makedirs(options.dump_dir, exist_ok=True)
    if "ir" in options.dump:
        _write_text(options, f"{program.number:02}_captured.onnxtxt", onnx_text(program.captured))
    if "passes" in options.dump:
        _write_text(options, f"{program.number:02}_optimized.onnxtxt", onnx_text(program.graph))


def onnx_text(graph: _C.Graph) -> str:
    """Give a graph in ONNX's textual syntax."""
    import onnx

    return onnx.printer.to_text(onnx.load_from_string(graph.to_onnx(_C.required_opset(graph))))


def _steps_text(session: _C.Session) -> str:
    """One line per kernel call, in the order of the graph."""
    lines = [
        f"{'backward' if backward else 'forward ':8} {form:10} {op:44} {name:32} {origin}".rstrip()
        for name, op, form, backward, origin in session.steps()
    ]
    return "\n".join(lines) + "\n"


def _write_onnx(graph: _C.Graph, path: str) -> None:
    try:
        with open(path, "wb") as file:
            file.write(graph.to_onnx(_C.required_opset(graph)))
    except OSError as error:
        raise UserError(f"save_onnx: cannot write {path!r}: {error.strerror}") from None


def _write_text(options: Options, name: str, text: Any) -> None:
    with open(os.path.join(options.dump_dir, name), "w", encoding="utf-8") as file:
        file.write(text)
