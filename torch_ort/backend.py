"""The torch.compile backend "ort": it captures a Dynamo graph with its backward and compiles it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_ort._C import Unsupported
from torch_ort.capture import logs
from torch_ort.capture.graphs import GraphCompiler
from torch_ort.capture.recorded import hand_over, record_or_hand_over
from torch_ort.capture.traced import trace_and_compile
from torch_ort.core.user_code import blaming
from torch_ort.dynamo import first_run, recompile_limit, uncaptured
from torch_ort.dynamo.graph import record_dynamo_graph
from torch_ort.engine import agreement, compiler, watchers
from torch_ort.engine.onnx_files import sources_of
from torch_ort.fallback import counted_in_eager
from torch_ort.functions.recurrent import recurrent_layers_in_graphs
from torch_ort.options import resolve_compiled
from torch_ort.pytorch import dynamo_compat, ranks, size_compat, versions
from torch_ort.read import higher_order
from torch_ort.read.descriptions import line_of, name_of
from torch_ort.steps.state import GraphState
from torch_ort.steps.stubs import release_fakes


def ort(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: the function that `torch.compile(backend="ort")` calls.

    `module` is the graph and `inputs` its example inputs; the result is called with inputs of the
    same kind. Raises UserError on an unknown option or mode. If the engine cannot run the graph, it
    runs in eager PyTorch after one FallbackWarning; with TORCH_ORT_STRICT=1, or if the fallback
    policy forbids that, an error is raised.
    """
    chosen, settings = resolve_compiled(options, mode)
    logger = logs.make_logger(settings.log_level)
    logs.say_mode(logger, mode)
    logs.say_ignored(logger, settings, by_torch_compile=True)
    if versions.missing:
        return first_run.compile_or_eager(
            versions.check, counted_in_eager(module.forward), chosen.strict, None
        )
    recompile_limit.remember_frame(chosen.strict)
    uncaptured.note_graph()
    size_compat.remember_dynamo_sizes()
    state = GraphState(
        chosen,
        say_run=functools.partial(logs.say_run, logger),
        names_inputs=logs.says_captured(logger),
    )

    def sources() -> Sequence[Any]:
        return sources_of(module.graph.find_nodes(op="placeholder"))

    def compile_graph() -> tuple[Callable[..., Any], first_run.CompileAgain | None]:
        if not ranks.are_there():
            return compile_alone()
        groups, inside = ranks.groups_in(module, inputs), ranks.collectives_inside(module)
        return agreement.agree(groups, compile_alone, state, inside)

    def compile_alone() -> tuple[Callable[..., Any], first_run.CompileAgain | None]:
        refuse_nested(module.graph, inputs)
        refuse_own_backward(module.graph)
        start = time.perf_counter()
        compiled = record_or_hand_over(
            lambda: record_dynamo_graph(module, inputs, sources, state), state
        )
        if compiled is None:
            return trace(inputs), None
        note_programs(start)
        # While a graph runs, Dynamo takes no more guards. So a trace that is made then needs known
        # sizes.
        has_symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        return compiled, None if has_symbols or state.communicates else trace_again

    def trace(inputs: Sequence[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        compiled = trace_and_compile(GraphCompiler(state), module, inputs, sources)
        note_programs(start)
        return compiled

    def note_programs(start: float) -> None:
        watchers.note(state.programs)
        logs.introduce(logger, settings, chosen, state.programs, entry="torch.compile")
        logs.say_captured(logger, state.programs, time.perf_counter() - start, chosen)

    def trace_again(error: Exception, inputs: tuple) -> Callable[..., Any]:
        hand_over(error)
        state.programs.clear()
        return trace(inputs)

    return first_run.compile_or_eager(
        compile_graph,
        counted_in_eager(module.forward),
        chosen.strict,
        state,
        settings.fallback_retry,
    )


def refuse_nested(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Raise Unsupported for an input that is a nested tensor."""
    nodes = graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(nodes, inputs, strict=True)):
        if isinstance(value, torch.Tensor) and value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            reader = next(iter(node.users), node)
            with blaming(name_of(reader), line_of(reader)):
                raise Unsupported(
                    f"input {i}: got a nested tensor of layout {layout}, whose row lengths are "
                    "data, want a plain, strided tensor; pad the rows to one length"
                )


def refuse_own_backward(graph: fx.Graph) -> None:
    """Raise Unsupported for a graph of compiled autograd that calls a backward of the engine's."""
    own = (torch.ops.torch_ort.run_backward, torch.ops.torch_ort.run_backward.default)
    if any(node.target in own for node in graph.nodes if node.op == "call_function"):
        raise Unsupported(
            "compiled autograd: the graph calls a backward that the engine has compiled already, "
            "which runs in the engine; what is around it does not"
        )


def reset() -> None:
    """Free all sessions and memory of the engine; `torch.compiler.reset()` calls this."""
    compiler.release_sessions()
    agreement.forget()
    higher_order.release_callables()
    release_fakes()
    size_compat.forget_dynamo_sizes()
    recompile_limit.forget_frames()
    uncaptured.forget()
    compiler._C.empty_cache()


ort.reset = reset


def _is_ours(backend: Any) -> bool:
    return backend.func is ort


# This is done here because only programs that use the backend import this module.
if dynamo_compat.can_be_watched():
    dynamo_compat.never_compile(
        ["torch_ort.steps.runners", "torch_ort.steps.first_backward", "torch_ort.functions.call"]
    )
    dynamo_compat.register_once(ort)
    dynamo_compat.watch_assigned_forwards(_is_ours, uncaptured.watched_forward)
    dynamo_compat.watch_recompile_limit(recompile_limit.recompile_limit_reached)
    dynamo_compat.watch_frames(_is_ours, uncaptured.looked_at, recurrent_layers_in_graphs)
    dynamo_compat.watch_contexts(
        _is_ours, lambda backend, compiled: uncaptured.Watched(backend, compiled).begin
    )
