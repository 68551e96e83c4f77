"""What of torch's private names the package stands on, in one place.

Each has a test in tests/torch_ort/test_aot_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, MethodType
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import (
    eval_frame,
    exc,
    external_utils,
    symbolic_convert,
    trace_rules,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.source import LocalSource
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import get_metrics_context, graph_break_reasons
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops import auto_functionalize
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as real_tensors
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.printers import PythonPrinter

from torch_ort import _C
from torch_ort.capture.dispatch_compat import Leaf, dropout_passes_through, is_functionalized
from torch_ort.pytorch import patches
from torch_ort.user_code import Line, innermost

__all__ = [
    "GLOBAL_HOOKS",
    "OPERATORS",
    "FakeInputs",
    "FakeTensor",
    "HigherOrderOperator",
    "LeftOut",
    "OpOverload",
    "ScriptMethod",
    "TorchDispatchMode",
    "addressed_inputs",
    "after_backward",
    "aot_autograd",
    "auto_functionalize",
    "calls_transforms",
    "data_is_asked",
    "default_partition",
    "differentiated",
    "draws",
    "dynamo_seconds",
    "dynamo_symbols",
    "fake_token",
    "fixes_a_size",
    "forget_dynamo_sizes",
    "forget_sizes",
    "forward_and_backward_nodes",
    "frame_in_capture",
    "has_higher_order",
    "has_tangents",
    "in_forward_mode",
    "in_function_transform",
    "input_description",
    "input_position",
    "inputs_that_order_draws",
    "is_jit_tracing",
    "is_known",
    "is_refused_by_dynamo",
    "is_repeatable",
    "kept_inputs",
    "meta_errors_unsaid",
    "needs_no_version_check",
    "never_compile",
    "node_of_graph",
    "node_that_raised",
    "output_descriptions",
    "passes_through",
    "python_text",
    "pytree",
    "real_tensors",
    "recompute_policy",
    "remember_dynamo_sizes",
    "said_to_be_compiling",
    "saved_tensor_hooks_copy",
    "schema",
    "script_forward",
    "script_pointer",
    "split_placeholders",
    "symbolic_inputs",
    "sympy_functions",
    "version",
    "watch_contexts",
    "watch_frames",
    "watch_recompile_limit",
    "written_placeholders",
]

# Exceptions that Dynamo itself acts upon.
_DYNAMO_SIGNALS = (
    exc.RestartAnalysis,
    exc.ShortenTraceback,
    exc.SkipFrame,
    UnsupportedFakeTensorException,
)


def passes_through(error: BaseException) -> bool:
    """Tell whether an exception is a message to Dynamo and no failure."""
    return isinstance(error, _DYNAMO_SIGNALS)


def node_that_raised(error: BaseException) -> tuple[str, Line | None]:
    """Give the operator of the graph that AOTAutograd traced, and the user's line of it.

    They stand in an error's words.
    """
    words = str(error)
    operator = re.search(r"While executing %.*?target=([\w.]+)", words)
    _, _, trace = words.partition("Original traceback:")
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return operator[1] if operator else "", innermost((path, int(n)) for path, n in lines)


def is_refused_by_dynamo(error: BaseException | None) -> bool:
    """Tell whether Dynamo, which operators with graphs as arguments call, has refused a graph."""
    while error is not None:
        if isinstance(error, exc.UncapturedHigherOrderOpError):
            return True
        error = error.__cause__
    return False


def data_is_asked(error: BaseException) -> bool:
    """Tell whether code asked for what only the numbers in a tensor can tell."""
    return isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException)


OPERATORS = torch._C._VariableFunctions  # as functions of `torch`

# Of hooks that all modules call.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)

ScriptMethod = torch._C.ScriptMethod


def script_pointer(module: torch.nn.Module) -> Any:
    """Give what stands behind a scripted or traced module; None for one that is not made yet."""
    return getattr(module, "_c", None)


def script_forward(module: torch.nn.Module) -> ScriptMethod:
    """Give the compiled forward of a scripted module, whatever stands in its place."""
    return script_pointer(module)._get_method("forward")


def after_backward(call: Callable[[], None]) -> None:
    """Call something at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def node_of_graph(results: Sequence[Any]) -> torch.autograd.graph.Node | None:
    """Give autograd's node of a graph of AOTAutograd's, of which there are results and views."""
    node = next((x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn), None)
    while node is not None and type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def fake_token(placeholders: Sequence[fx.Node]) -> torch.Tensor:
    """Describe the token to AOTAutograd.

    Its storage is that of an input: AOTAutograd then does not count it among the buffers that a
    backward may overwrite, which would forbid retain_graph=True. Its size is static, whatever is
    dynamic.
    """
    fakes = [
        node.meta["val"] for node in placeholders if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    mode = detect_fake_mode(fakes)
    with mode, torch.no_grad():
        return fakes[0].detach().as_strided((0,), (1,))


def input_position(placeholder: fx.Node) -> int | None:
    """Tell which of Dynamo's inputs a placeholder of AOTAutograd is; None for a part of one."""
    desc = placeholder.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def input_description(position: int) -> PlainAOTInput:
    """Describe a graph's input as AOTAutograd does."""
    return PlainAOTInput(position)


def output_descriptions(num_outputs: int, gradients_of: Sequence[int | None]) -> list[Any]:
    """Describe a joint graph's outputs as AOTAutograd does; None for what is no gradient."""
    outputs: list[Any] = [PlainAOTOutput(i) for i in range(num_outputs)]
    return outputs + [None if i is None else GradAOTOutput(PlainAOTInput(i)) for i in gradients_of]


def forward_and_backward_nodes(
    joint: fx.GraphModule, forward_outputs: Sequence[object]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split the nodes of a joint graph (placeholders and output left out) at the border.

    Everything up to the last node that AOTAutograd traced in forward is forward. A node after it is
    forward if it writes into an input and was not traced in backward. Dependence on a tangent
    tells nothing: random numbers of a custom backward have none.
    """
    nodes = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    tags = [node.meta.get("partitioner_tag") for node in nodes]
    depends: set[fx.Node] = {node for node in joint.graph.nodes if _is_tangent(node)}
    for node in nodes:
        if any(arg in depends for arg in node.all_input_nodes):
            depends.add(node)
    needed = _ancestors(forward_outputs)  # a rewrite of AOTAutograd's may leave nodes without a tag
    last = max(
        (i for i, node in enumerate(nodes) if tags[i] == "is_forward" or node in needed), default=-1
    )
    if last < 0:  # a torch without tags: dataflow is all there is
        last = max((i for i, node in enumerate(nodes) if node not in depends), default=-1)
    forward, backward = [], []
    for i, node in enumerate(nodes):
        late_mutation = i > last and tags[i] != "is_backward" and _mutates(node)
        belongs = (i <= last and node not in depends) or (late_mutation and node not in depends)
        (forward if belongs else backward).append(node)
    # A constant that only backward reads is read again there; one that both read stays in forward.
    return forward, backward


def _ancestors(outputs: Sequence[object]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [output for output in outputs if isinstance(output, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def split_placeholders(joint: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """Give primals and tangents, each in order."""
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if _is_tangent(node)]
    return [node for node in placeholders if node not in tangents], tangents


def differentiated(joint: fx.GraphModule, num_forward_outputs: int) -> list[fx.Node | None]:
    """Give, by gradient of a joint graph, the primal it belongs to; None where there is none."""
    primals = {node.meta["desc"]: node for node in split_placeholders(joint)[0]}
    descs = joint.graph.output_node().meta["desc"][num_forward_outputs:]
    return [primals[desc.grad_of] if isinstance(desc, GradAOTOutput) else None for desc in descs]


def schema(operator: OpOverload) -> torch.FunctionSchema:
    """Give the schema of an operator."""
    return operator._schema


def version(tensor: torch.Tensor) -> int:
    """Give how often a tensor was written into; 0 for one of inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def is_repeatable(graph: fx.Graph) -> bool:
    """Tell whether running a graph again changes nothing: it neither writes nor draws."""
    return all(
        isinstance(node.target, OpOverload)
        and node.target.namespace in ("aten", "prims")
        and not schema(node.target).is_mutable
        and not draws(node)
        for node in graph.nodes
        if node.op == "call_function" and node.target not in _PURE_FUNCTIONS
    )


_PURE_FUNCTIONS = (operator.getitem, torch.sym_int)


def kept_inputs(graph: fx.Graph) -> frozenset[int]:
    """Give the positions of the inputs of Dynamo's graph that a module keeps between calls."""
    nodes = graph.find_nodes(op="placeholder")
    return frozenset(
        i
        for i, node in enumerate(nodes)
        if "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    )


def calls_transforms(graph: fx.Graph) -> bool:
    """Tell whether a graph of Dynamo's enters transforms of torch.func, or calls other graphs."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return any(
        isinstance(target, HigherOrderOperator)
        or "functorch" in (getattr(target, "__module__", None) or "")
        for target in targets
    )


def has_higher_order(graph: fx.Graph) -> bool:
    """Tell whether a graph calls operators that take graphs."""
    return any(isinstance(node.target, HigherOrderOperator) for node in graph.nodes)


def written_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """Give the inputs that a graph writes into."""
    written = []
    for node in graph.nodes:
        arguments = schema(node.target).arguments if _mutates(node) else []
        for i, argument in enumerate(arguments):
            if argument.is_write:
                written.append(node.args[i] if i < len(node.args) else node.kwargs[argument.name])
    leaves = pytree.tree_leaves(written)
    return {leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf.op == "placeholder"}


def addressed_inputs(graph: fx.Graph) -> set[int]:
    """Give the positions of inputs whose order in memory decides what `as_strided` reads."""
    nodes = [node for node in graph.nodes if node.target in _NAMING_STRIDES]
    return _inputs_in_order_of([node.args[0] for node in nodes])


def inputs_that_order_draws(graph: fx.Graph) -> set[int]:
    """Give the positions of inputs that a graph draws numbers for in the order of their memory."""
    drawn = [source for node in graph.nodes if draws(node) for source in node.all_input_nodes]
    return _inputs_in_order_of(drawn)


def writes_into_windows(graph: fx.Graph) -> bool:
    """Tell whether the forward half of a graph writes into what `unfold` gave.

    Functionalization takes the gradient of `unfold` for that, in which elements of no window are 0.
    """
    return any(
        node.target is torch.ops.aten.unfold_backward.default
        and "backward" not in node.meta.get("partitioner_tag", "")
        for node in graph.nodes
    )


def draws(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _keeps_order(target: OpOverload) -> bool:
    return target.is_view or torch.Tag.pointwise in target.tags or target in _COPIES


_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.native_dropout.default,
)
_NAMING_STRIDES = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


def _inputs_in_order_of(nodes: list[fx.Node]) -> set[int]:
    """Give the positions of inputs from which some values have the order of their memory."""
    nodes, seen, found = list(nodes), set(nodes), set()
    while nodes:
        node = nodes.pop()
        if node.op == "placeholder":
            found.add(input_position(node))
        elif node.target is operator.getitem or (
            isinstance(node.target, OpOverload) and _keeps_order(node.target)
        ):
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            nodes += new
    return found - {None}


def recompute_policy(node: fx.Node) -> tuple[str, int]:
    """Give what torch.utils.checkpoint says of a node: its policy, and which region it is in."""
    policy, region = node.meta.get("recompute"), node.meta.get("ac_graph_id")
    name = policy.name.lower() if policy is not None else ""
    return name, region if isinstance(region, int) else -1


def needs_no_version_check(node: fx.Node) -> bool:
    """Tell whether a value was stashed on the ctx of an autograd.Function, which is not watched."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


def saved_tensor_hooks_copy() -> bool:
    """Tell whether hooks are active that may copy or move what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    # torch.utils.checkpoint keeps nothing of what it packs: it runs the forward again.
    name = getattr(hooks[0], "__qualname__", "")
    return not name.startswith(("_checkpoint_hook", "_recomputation_hook"))


class Frame(NamedTuple):
    """A function that Dynamo compiles. It is compiled again where its guards fail."""

    id: int
    where: str
    raises_at_limit: bool  # instead of running in eager PyTorch


def frame_in_capture() -> Frame | None:
    """Tell what Dynamo is compiling right now; None outside of it."""
    compile_id = CompileContext.current_compile_id()
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if compile_id is None or compile_id.frame_id is None or translator is None:
        return None
    code = translator.f_code
    return Frame(
        compile_id.frame_id,
        f"'{code.co_name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})",
        translator.one_graph or dynamo_config.fail_on_recompile_limit_hit,
    )


def watch_recompile_limit(told: Callable[[int, str], None]) -> None:
    """Call `told(frame id, limit)` whenever Dynamo gives up compiling a frame again.

    Dynamo's check is wrapped: what it says itself is a line of its log and the text of a counter.
    """

    def watched(check: Callable, cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        is_exceeded, limit = check(cache_size, compile_id)
        if is_exceeded:
            value = getattr(dynamo_config, limit)
            told(compile_id.frame_id, f"torch._dynamo.config.{limit} = {value}")
        return is_exceeded, limit

    patches.RECOMPILE_LIMIT.stay(watched)


class LeftOut(NamedTuple):
    """Code that Dynamo leaves to eager PyTorch: a whole function, or what stands between graphs."""

    code: CodeType  # of the function
    is_whole: bool
    reason: str  # Dynamo's words
    lines: list[tuple[str, int]]  # from the function's own to where it happens: file, line


def watch_frames(
    is_ours: Callable[[Any], bool], told: Callable[[Any, list[LeftOut]], None]
) -> None:
    """Call `told(backend, what is left out)` when Dynamo has looked at a function for a backend.

    Only for backends that are ours, and not where a graph break is an error.
    """

    def watched(convert: Callable, self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        backend = _innermost_backend(self)
        if self._one_graph or not is_ours(backend):
            return convert(self, frame, *args, **kwargs)
        code, first = frame.f_code, len(graph_break_reasons)
        try:
            result = convert(self, frame, *args, **kwargs)
        except Exception as error:
            if _is_swallowed(self, error):
                told(backend, [_left_out(code, error)])
            raise
        breaks = [
            LeftOut(code, False, why.reason, [(s.filename, s.lineno) for s in why.user_stack])
            for why in graph_break_reasons[first:]
        ]
        told(backend, breaks)
        return result

    patches.FRAMES.stay(watched)


def _is_swallowed(converter: Any, error: Exception) -> bool:
    """Tell whether Dynamo goes on in eager PyTorch after an error.

    One with a strategy is that of the recompile limit, which is told by itself.
    """
    if converter._box.error_on_graph_break or getattr(error, "frame_exec_strategy", None):
        return False
    return isinstance(error, exc.Unsupported | exc.UserError) or dynamo_config.suppress_errors


def _left_out(code: CodeType, error: Exception) -> LeftOut:
    while isinstance(error.__cause__, exc.Unsupported):
        error = error.__cause__
    stack = getattr(error, "real_stack", None) or []
    lines = [(code.co_filename, code.co_firstlineno)] + [(s.filename, s.lineno) for s in stack]
    return LeftOut(code, True, str(getattr(error, "msg", error)), lines)


def _innermost_backend(callback: Any) -> Any:
    """Give the function and the options behind a callback of Dynamo's, as functools.partial has."""
    keywords: dict[str, Any] = {}
    while True:
        callback = eval_frame.innermost_backend(callback)
        if isinstance(callback, functools.partial):
            keywords = callback.keywords | keywords
            callback = callback.func
        elif isinstance(callback, torch._TorchCompileWrapper):
            keywords = callback.kwargs | keywords
            callback = callback.compiler_fn
        elif isinstance(getattr(callback, "__self__", None), DDPOptimizer):
            callback = callback.__self__.backend_compile_fn
        else:
            return functools.partial(callback, **keywords)


def watch_contexts(
    is_ours: Callable[[Any], bool], begin: Callable[[Any, list], Callable[[], bool]]
) -> None:
    """Watch calls of functions compiled for backends that are ours.

    `begin(backend, kept)` is called before a call, what it gives after it; once that gives True,
    calls are watched no more. `kept` is one list for all calls of a function. What Dynamo would not
    look at, as it is torch's own code, gets a frame that it looks at.
    """

    def watched(compile_function: Callable, self: Any, function: Any) -> Any:
        backend = _innermost_backend(self.callback)
        if not is_ours(backend):
            return compile_function(self, function)
        function = _with_a_frame(function)
        _ask_again(function)
        if not (self.fullgraph or isinstance(function, torch.nn.Module | type)):
            _watch_calls(self.enter_exit_hooks, functools.partial(begin, backend, []))
        return compile_function(self, function)

    patches.COMPILED_CALLS.stay(watched)


def never_compile(modules: Sequence[str]) -> None:
    """Let Dynamo leave the functions of some modules alone, which autograd and kernels call."""
    patches.LEFT_ALONE.add(modules)


def _watch_calls(hooks: list[Callable[[], Any]], begin: Callable[[], Callable[[], bool]]) -> None:
    def enter() -> Callable[[], None]:
        end = begin()

        def leave() -> None:
            # Other threads may be going through the list: the last one leaves without a trace.
            if end() and hooks[-1] is enter:
                hooks.pop()

        return leave

    hooks.append(enter)


def _with_a_frame(function: Any) -> Any:
    """Give a function that Dynamo captures where the given one is a module's of torch.nn."""
    module = function if isinstance(function, torch.nn.Module) else _module_called(function)
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        inner = module.module
        if inner._compiled_call_impl is None and _is_torchs_own(inner):
            # As Module.compile does; no copy and no file of the module holds it.
            inner._compiled_call_impl = _framed(inner._call_impl)
    elif module is not function and module is not None and _is_torchs_own(module):
        return _framed(function)
    return function


def _module_called(function: Any) -> torch.nn.Module | None:
    module = getattr(function, "__self__", None)
    is_call = getattr(function, "__name__", "") in ("_call_impl", "_wrapped_call_impl")
    return module if is_call and isinstance(module, torch.nn.Module) else None


def _is_torchs_own(module: torch.nn.Module) -> bool:
    is_method = isinstance(module.forward, MethodType)
    return is_method and trace_rules.check(module.forward)


def _framed(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = external_utils.wrap_inline(function)
    # Graphs are kept, and counted, by code: it is not shared with others.
    inner.__code__ = inner.__code__.replace(co_name="forward")
    return inner


def _ask_again(function: Any) -> None:
    """Let Dynamo look at a function that it has left to eager PyTorch before."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    code = getattr(eval_frame.innermost_fn(forward), "__code__", None)
    if code is not None:
        default = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
        torch._C._dynamo.eval_frame.set_code_exec_strategy(code, default)


def dynamo_seconds() -> float | None:
    """Tell how long Dynamo has been compiling the frame it is at; None outside of it."""
    metrics = get_metrics_context()
    if not metrics.in_progress():
        return None
    return (time.time_ns() - metrics._start_time_ns) / 1e9


def said_to_be_compiling() -> AbstractContextManager[None]:
    """Let `torch.compiler.is_compiling()` be true in here, for this thread."""
    return patches.IS_COMPILING.by(lambda theirs: True)


def symbolic_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Give the inputs of Dynamo's graph with its symbols in place of the sizes of one call.

    Raises Unsupported where nothing tells them.
    """
    nodes = graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("example_value") for node in nodes]
    if any(isinstance(value, torch.SymInt) for value in inputs):
        for i, fake in enumerate(fakes):
            if fake is None:
                raise _C.Unsupported(f"input {i}: the graph does not tell its sizes")
    return [
        fake if isinstance(fake, torch.Tensor) and _has_symbols(fake) else value
        for fake, value in zip(fakes, inputs, strict=True)
    ]


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))


class DynamoSymbol(NamedTuple):
    """A symbol of Dynamo's. It guards the bounds; None: there is none."""

    integer: torch.SymInt
    value: int | None  # in the call that is compiled; None if data tells
    low: int | None
    high: int | None


def _values_in(env: Any) -> dict[sympy.Symbol, Any]:
    """Give the values that symbols have in the call that is traced; torch has renamed them."""
    return getattr(env, "backed_var_to_val", None) or env.var_to_val


def dynamo_symbols(size: torch.SymInt) -> dict[str, DynamoSymbol]:
    """Give the symbols in a size, by name."""
    env = size.node.shape_env
    values = _values_in(env)
    found = {}
    for symbol in size.node.expr.free_symbols:
        value = int(values[symbol]) if symbol in values else None
        bounds = env.var_to_range[symbol]
        low, high = (
            int(bound) if isinstance(bound, sympy.Integer) else None
            for bound in (bounds.lower, bounds.upper)
        )
        integer = env.create_symintnode(symbol, hint=value)
        found[symbol.name] = DynamoSymbol(integer, value, low, high)
    return found


def is_known(condition: bool | torch.SymBool) -> bool:
    """Tell whether a condition of Dynamo's sizes holds for all that it lets pass."""
    return bool(symbolic_shapes.statically_known_true(condition))


def fixes_a_size(condition: torch.SymBool) -> bool:
    """Tell whether a condition of Dynamo's sizes leaves one value to what it is about."""
    expr = condition.node.expr
    if not isinstance(expr, sympy.Eq) or expr.has(*_REMAINDERS):
        return False
    return any(side.is_number for side in expr.args)


_REMAINDERS = (sympy_functions.Mod, sympy_functions.PythonMod)


class FakeInputs:
    """Tensors without numbers to trace a function with.

    Sizes and integers of a call are symbols, but for sizes of 0 and 1, or all are fixed. What is
    decided of sizes on the way stands in `guards`.
    """

    def __init__(self, are_fixed: bool = False) -> None:
        self._are_fixed = are_fixed
        self._sizes = _ShapeEnv(duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._sizes, allow_non_fake_inputs=True)
        self._context = TracingContext(self._mode)
        self._symbols: list[sympy.Basic] = []  # as made: one found equal to another is read as that

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Make fakes and trace in here.

        `torch.compiler.is_compiling()` is true meanwhile: modules that ask leave out what looks at
        numbers.
        """
        with (
            said_to_be_compiling(),
            dropout_passes_through(),
            patches.UNSEEN_SIZES.by(False),
            tracing(self._context),
        ):
            try:
                yield
            finally:
                forget_sizes()

    def held(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Give a fake of a tensor whose sizes never change."""
        return self._mode.from_tensor(tensor, static_shapes=True, source=LocalSource(name))

    def tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Give a fake of a tensor that every call brings anew."""
        if self._are_fixed:
            return self.held(tensor, name)
        if tensor.is_leaf and tensor.grad is not None:
            # A gradient would get symbols of its own, which no call brings.
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim(),
            constraint_sizes=[None] * tensor.dim(),
        )
        fake = self._mode.from_tensor(tensor, symbolic_context=context, source=LocalSource(name))
        fake.item_memo = None  # what a number on the CPU happens to be is no condition
        self._symbols += [n.node.expr for n in fake.shape if isinstance(n, torch.SymInt)]
        return fake

    def integer(self, value: int, name: str) -> int | torch.SymInt:
        """Give a symbol for an integer that every call brings anew."""
        if self._are_fixed:
            return value
        source = LocalSource(name)
        symbol = self._sizes.create_symbol(
            value, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
        )
        self._symbols.append(symbol)
        return self._sizes.create_symintnode(symbol, hint=value, source=source)

    def written(self) -> dict[int, bool]:
        """Tell of each input that the traced function writes into whether autograd watches it."""
        infos = self._context.fw_metadata.input_info
        return {
            i: not info.mutations_under_no_grad_or_inference_mode
            for i, info in enumerate(infos)
            if info.mutates_data or info.mutates_metadata
        }

    def given_back(self) -> set[int]:
        """Give the inputs that the traced function's results are, or are views of."""
        kinds = (OutputType.is_input, OutputType.alias_of_input)
        infos = self._context.fw_metadata.output_info
        return {info.base_idx for info in infos if info.output_type in kinds}

    def guards(self) -> list[str]:
        """Give the conditions on symbols, as Python, under which the same would be traced."""
        conditions = [guard.expr for guard in self._sizes.guards]
        for symbol in self._symbols:
            lower = self._sizes.var_to_range[symbol].lower
            if lower.is_finite and lower > 0:
                conditions.append(sympy.Ge(symbol, lower, evaluate=False))
        return [f"({python_text(condition)})" for condition in conditions]  # one may have an `or`


_dynamo_sizes: weakref.WeakSet[ShapeEnv] = weakref.WeakSet()


def remember_dynamo_sizes() -> None:
    """Note the symbols of the graph that Dynamo compiles in this thread."""
    context = TracingContext.try_get()
    if context and context.fake_mode and context.fake_mode.shape_env:
        _dynamo_sizes.add(context.fake_mode.shape_env)


def forget_dynamo_sizes() -> None:
    """Let go of the symbols of graphs whose code Dynamo has dropped.

    A ShapeEnv lists the fakes of its capture. These hold its symbols, and so the ShapeEnv, from
    C++, where the garbage collector does not see it.
    """
    for sizes in _dynamo_sizes:
        sizes.tracked_fakes = None
    _dynamo_sizes.clear()
    forget_sizes()


def forget_sizes() -> None:
    """Let go of symbols that PyTorch has looked at.

    Caches of the methods of ShapeEnv hold it, and all fakes of its capture, for good.
    """
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


class _ShapeEnv(ShapeEnv):
    """Takes equal products of sizes for what they nearly always are: products of equal sizes."""

    def _evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        for pair in self._equal_factors(orig_expr):
            super()._evaluate_expr(pair)
        return super()._evaluate_expr(orig_expr, *args, **kwargs)

    def _equal_factors(self, expr: sympy.Basic) -> list[sympy.Eq]:
        """Give equations of sizes from one of products: rows of tokens and rows of their labels.

        What the products' numbers alone do not tell, the engine needs to fuse across them; a call
        where only the products are equal is captured anew.
        """
        if not (isinstance(expr, sympy.Eq) and all(side.is_Mul for side in expr.args)):
            return []
        values = _values_in(self)
        made = list(values)  # in the order of the inputs
        left, right = ([f for f in side.args if f in values] for side in expr.args)
        if len(left) < 2 or [len(side.args) for side in expr.args] != [len(left), len(right)]:
            return []
        left, right = (
            sorted(side, key=lambda f: (values[f], made.index(f))) for side in (left, right)
        )
        if [values[f] for f in left] != [values[f] for f in right]:
            return []
        return [sympy.Eq(a, b) for a, b in zip(left, right, strict=True) if a != b]


def in_function_transform() -> bool:
    """Tell whether a transform of torch.func is at work, which wraps tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


is_jit_tracing = torch._C._is_tracing  # whether torch.jit.trace is at work in this thread


def in_forward_mode() -> bool:
    """Tell whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0


def has_tangents(values: Sequence[Any]) -> bool:
    """Tell whether one of some values is a tensor with a tangent of forward-mode AD."""
    return any(
        isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and forward_ad.unpack_dual(value).tangent is not None
        for value in values
    )


def meta_errors_unsaid() -> AbstractContextManager[None]:
    """Keep this thread's failing operators on tensors without numbers out of torch's log."""
    return patches.FAKE_TENSOR_LOG.by(_hear_no_errors)


def _hear_no_errors(theirs: Callable, record: logging.LogRecord) -> Any:
    return record.exc_info is None and theirs(record)


# Calls of torch.autograd.Function.


def functions_replaced(
    replace: Callable[[type, tuple, Callable], Any],
) -> AbstractContextManager[None]:
    """Call `replace(class, arguments, apply)` in place of Functions' own `apply` in this thread."""

    def apply(theirs: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(patches.FUNCTION_APPLY.theirs, cls)
        return own(*args, **kwargs) if kwargs else replace(cls, args, own)

    return patches.FUNCTION_APPLY.by(apply)


def functions_as_they_are() -> AbstractContextManager[None]:
    """Let Functions run in this thread whatever replaces them."""
    return patches.FUNCTION_APPLY.as_torch_has_it()


def below_autograd() -> Any:
    """Give a context in which operators are called without their autograd rules."""
    return torch._C._AutoDispatchBelowAutograd()


RECURRENT_LAYERS: dict[str, Callable[..., Any]] = {
    kind: getattr(torch._VF, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
pack_padded_sequence = torch._VF._pack_padded_sequence


def is_cache(module: torch.nn.Module, name: str) -> bool:
    """Tell whether an attribute is what a module of torch's makes anew from its parameters."""
    is_recurrent = isinstance(module, torch.nn.RNNBase)
    return is_recurrent and name in ("_flat_weights", "_flat_weight_refs")


def is_traced(value: Any) -> bool:
    """Tell whether something is a tensor of a trace."""
    return isinstance(value, FakeTensor | FunctionalTensor | Leaf) or is_functionalized(value)


def form_key(values: Sequence[Any]) -> tuple:
    """Give a value that is equal for tensors and sizes of equal form in one trace."""
    return tuple(map(_form_key, values))


def _form_key(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
    symbols = [size for size in value.shape if isinstance(size, torch.SymInt)]
    env = id(getattr(symbols[0].node, "shape_env", None)) if symbols else 0
    # Tensors with numbers are themselves: what is learnt of a Function may depend on them.
    return *sizes, value.dtype, str(value.device), env, is_traced(value)


@contextmanager
def fakes_apart() -> Iterator[None]:
    """Make and use tensors without numbers that no trace knows of."""
    with real_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def without_numbers(tensors: Sequence[Any]) -> Iterator[None]:
    """Run code on fake tensors whose numbers it may want: then it fails, and leaves no trace."""
    mode = detect_fake_mode([tensor for tensor in tensors if isinstance(tensor, FakeTensor)])
    if mode is None:
        raise UnsupportedFakeTensorException("the tensors are not fake ones")
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            # Compiled code would read at address 0 otherwise.
            torch._C._set_throw_on_mutable_data_ptr(tensor)
    before, mode._allow_unsafe_data_ptr_access = mode._allow_unsafe_data_ptr_access, False
    env = mode.shape_env
    try:
        with env.ignore_fresh_unbacked_symbols() if env is not None else nullcontext():
            yield
    finally:
        mode._allow_unsafe_data_ptr_access = before


def sizes_of_data(tensors: Sequence[torch.Tensor]) -> set[sympy.Symbol]:
    """Give the symbols of sizes that are only known from data."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    return symbolic_shapes.free_unbacked_symbols(sizes)


class Settings:
    """Numbers for symbolic sizes: those of the example, then others."""

    count = 4

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.open_sizes = [size for size in sizes if isinstance(size, torch.SymInt)]
        symbols = {s: number for size in self.open_sizes for s, number in _symbols_in(size).items()}
        if not symbols:
            self.count = 1
        self._numbers: list[dict[Any, int]] = [{} for _ in range(self.count)]
        for i, symbol in enumerate(sorted(symbols, key=str)):
            number = symbols[symbol]
            for numbers, other in zip(
                self._numbers, (number, number + 1 + i, 2 * number, number + 1), strict=False
            ):
                numbers[symbol] = other

    def at(self, size: Any, number: int) -> int:
        """Give a size in one of the settings."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if _C.size_text(size) is not None:
            return _C.evaluate_size(size, self._numbers[number])
        return int(size.node.expr.subs(self._numbers[number]))


def _symbols_in(size: torch.SymInt) -> dict[Any, int]:
    """Give the symbols of a size, each with its value in the call that is traced."""
    recorded = _C.symbols_in_size(size)
    if recorded is not None:
        return recorded
    env = size.node.shape_env
    values = _values_in(env)
    return {s: int(values.get(s, 4)) for s in size.node.expr.free_symbols}  # 4: data alone tells


def python_text(expr: sympy.Basic) -> str:
    """Print an expression over symbols as Python."""
    return PythonPrinter().doprint(expr)
