"""The torch.compile backend: capture, compile, callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_ort import compiler, fallback, report, uncaptured
from torch_ort._C import Unsupported
from torch_ort.capture import aot_compat, higher_order
from torch_ort.capture.fx_reader import line_of, name_of
from torch_ort.capture.joint import (
    Capture,
    GraphState,
    hand_over,
    record_dynamo_graph,
    record_or_hand_over,
    release_fakes,
)
from torch_ort.onnx_files import sources_of
from torch_ort.options import resolve
from torch_ort.user_code import blaming


def ort(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; found by `torch.compile(backend="ort")` through its entry point.

    Raises UserError on a bad option or mode. Whatever the engine cannot do runs in eager PyTorch
    after one FallbackWarning; with TORCH_ORT_STRICT=1 it is raised.
    """
    chosen = resolve(options, mode)
    fallback.remember_frame(chosen.strict)
    uncaptured.note_graph()
    aot_compat.remember_dynamo_sizes()
    state = GraphState(chosen)

    def sources() -> Sequence[Any]:
        return sources_of(module.graph.find_nodes(op="placeholder"))

    def compile_graph() -> tuple[Callable[..., Any], fallback.CompileAgain | None]:
        refuse_nested(module.graph, inputs)
        compiled = record_or_hand_over(
            lambda: record_dynamo_graph(module, inputs, sources, state), state
        )
        if compiled is None:
            return trace(inputs), None
        report.note(state.programs)
        # Dynamo guards nothing any more when a graph runs: sizes have to be known.
        has_symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        return compiled, None if has_symbols else trace_again

    def trace(inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = Capture(chosen, state).compile(module, inputs, sources)
        report.note(state.programs)
        return compiled

    def trace_again(error: Exception, inputs: tuple) -> Callable[..., Any]:
        hand_over(error)
        state.programs.clear()
        return trace(inputs)

    return fallback.compile_or_eager(compile_graph, module.forward, chosen.strict, state)


def refuse_nested(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Raise Unsupported for an input that is a nested tensor."""
    nodes = graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(nodes, inputs, strict=True)):
        if isinstance(value, torch.Tensor) and value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            reader = next(iter(node.users), node)
            with blaming(name_of(reader), line_of(reader)):
                raise Unsupported(
                    f"input {i}: got a nested tensor of layout {layout}, the lengths of whose rows "
                    "are data, want a plain, strided tensor"
                )


def reset() -> None:
    """Free all sessions and memory; called by `torch.compiler.reset()`."""
    compiler.release_sessions()
    higher_order.release_callables()
    release_fakes()
    aot_compat.forget_dynamo_sizes()
    fallback.forget_frames()
    uncaptured.forget()
    compiler._C.empty_cache()


ort.reset = reset


def _is_ours(backend: Any) -> bool:
    return backend.func is ort


# Here, and not where the package begins: who compiles for other backends alone pays nothing.
aot_compat.never_compile(["torch_ort.capture.joint", "torch_ort.functions.call"])
aot_compat.watch_recompile_limit(fallback.recompile_limit_reached)
aot_compat.watch_frames(_is_ours, uncaptured.left_out)
aot_compat.watch_contexts(_is_ours, uncaptured.begin_call)
