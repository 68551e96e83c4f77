"""Private names of torch for Dynamo: what it compiles, skips, and leaves to eager PyTorch.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, MethodType
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_ort import _C
from torch_ort.pytorch import patches, versions
from torch_ort.pytorch.private import (
    AttrSource,
    CompileContext,
    ConstantVariable,
    ConvertFrameReturn,
    DDPOptimizer,
    ExactWeakKeyDictionary,
    FrameAction,
    FrameExecStrategy,
    GuardOnDataDependentSymNode,
    HigherOrderOperator,
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    TorchRuntimeError,
    UncapturedHigherOrderOpError,
    UnsupportedFakeTensorException,
    convert_frame,
    eval_frame,
    exc,
    external_utils,
    get_metrics_context,
    graph_break_reasons,
    symbolic_convert,
    trace_rules,
)
from torch_ort.pytorch.private import config as dynamo_config
from torch_ort.pytorch.versions import is_within

# Exceptions by which Dynamo controls itself.
_DYNAMO_SIGNALS = (
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    UnsupportedFakeTensorException,
)

# An argument of torch.compile: what is compiled of a function counts for no other call of it.
COMPILED_APART = {"isolate_recompiles": True} if is_within("2.13", "") else {}


def passes_through(error: BaseException) -> bool:
    """Tell whether an exception is a message to Dynamo and no failure."""
    return isinstance(error, _DYNAMO_SIGNALS)


def is_refused_by_dynamo(error: BaseException | None) -> bool:
    """Tell whether Dynamo, which operators with graphs as arguments call, has refused a graph."""
    while error is not None:
        if isinstance(error, UncapturedHigherOrderOpError):
            return True
        error = error.__cause__
    return False


def kept_inputs(graph: fx.Graph) -> frozenset[int]:
    """Give the positions of the inputs of Dynamo's graph that a module keeps between calls."""
    nodes = graph.find_nodes(op="placeholder")
    return frozenset(
        i
        for i, node in enumerate(nodes)
        if "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    )


def float_reads(graph: fx.Graph) -> dict[fx.Node, torch.SymFloat]:
    """Give the nodes that read a float of the user's program, with Dynamo's symbol for it.

    Dynamo passes a float that differs from call to call as a 0-d tensor.
    """
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None or argument.is_tensor or not argument.pass_arg_as_tensor:
            continue
        for user in node.users:
            symbol = user.meta.get("example_value")
            if user.target == "item" and isinstance(symbol, torch.SymFloat) and _has_value(symbol):
                found[user] = symbol
    return found


def integers_as_numbers(graph: fx.Graph) -> dict[fx.Node, torch.SymInt]:
    """Give the integers that a graph takes and that are no sizes, with Dynamo's symbols.

    Those are attributes of modules, and others of which the graph computes fractions.
    """
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        symbol = node.meta.get("example_value")
        if not isinstance(symbol, torch.SymInt) or not _has_value(symbol):
            continue
        if _is_of_module(node) or _is_of_fractions(node):
            found[node] = symbol
    return found


def _is_of_module(node: fx.Node) -> bool:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    while source is not None and not isinstance(source, AttrSource):
        source = getattr(source, "base", None)
    return source is not None and "NN_MODULE" in _where(source)


def _where(source: AttrSource) -> str:
    where = source.guard_source
    return (where() if callable(where) else where).name


def _has_value(symbol: torch.SymInt | torch.SymFloat) -> bool:
    return symbol.node.hint is not None


def _is_of_fractions(node: fx.Node) -> bool:
    values = [(user, user.meta.get("example_value")) for user in node.users]
    return any(
        isinstance(value, torch.SymFloat)
        or (isinstance(value, torch.SymInt) and _is_of_fractions(user))
        for user, value in values
    )


def calls_transforms(graph: fx.Graph) -> bool:
    """Tell whether a graph of Dynamo's enters transforms of torch.func, or calls other graphs."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return any(
        isinstance(target, HigherOrderOperator)
        or "functorch" in (getattr(target, "__module__", None) or "")
        for target in targets
    )


class Frame(NamedTuple):
    """A function that Dynamo compiles. It is compiled again where its guards fail."""

    id: int
    where: str
    raises_at_limit: bool  # instead of running in eager PyTorch


def frame_in_capture() -> Frame | None:
    """Tell what Dynamo is compiling right now; None outside of it, and where it cannot be told."""
    if versions.missing:
        return None
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


def can_be_watched() -> bool:
    """Tell whether all that is watched of Dynamo can be; if not, all captures are refused."""
    patches.note_missing()
    return not versions.missing


def watch_recompile_limit(told: Callable[[int, str], None]) -> None:
    """Call `told(frame id, limit)` whenever Dynamo gives up compiling a frame again.

    Dynamo's check is wrapped, since Dynamo itself only writes a line of its log and a counter.
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
    lines: list[tuple[str, int]]  # file and line, from the function to where it happens


# Of Dynamo's reason for passing over a function that it has traced to its end.
NO_OPERATIONS = "No ops traced for the FX graph"


class Looked(NamedTuple):
    """What Dynamo did with a function when it was to compile it."""

    code: CodeType  # of the function
    is_captured: bool  # what Dynamo made of it runs, or it has no tensor operations
    left: list[LeftOut]
    is_at_limit: bool = False  # it has been compiled too often
    skipped: str = ""  # Dynamo's reason for passing it over


def watch_frames(
    is_ours: Callable[[Any], bool], told: Callable[[Any, Looked], None],
    around: Callable[[], AbstractContextManager[None]],
) -> None:  # fmt: skip
    """Call `told(backend, what Dynamo did)` when Dynamo has looked at a function for a backend.

    Only for backends that are ours. Nothing is left out where a graph break is an error. Loggers'
    messages that are said once break no graph of theirs, and their guards are timed without
    emptying the caches. Dynamo looks at the function in the context that `around()` gives.
    """

    def watched(convert: Callable, self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        backend = _innermost_backend(self)
        if not is_ours(backend):
            return convert(self, frame, *args, **kwargs)
        with (
            around(),
            patches.LOGGER_CALLS.by(_say_once),
            # With dynamic=True every integer of a module would be a symbol from the first.
            patches.INTEGERS_OF_MODULES.by(dynamo_config.assume_static_by_default),
            patches.INNER_GRADIENTS.by(True),
            patches.BACKWARD_IN_GRAPHS.by(_break_at_backward),
            patches.UNGUARDED_TENSORS.by(_sees_switched_gradients()),
            patches.GUARD_LATENCY.by(_latency_of_guards),
        ):
            return told_of(backend, self, frame, lambda: convert(self, frame, *args, **kwargs))

    def told_of(backend: Any, self: Any, frame: Any, convert: Callable[[], Any]) -> Any:
        code = frame.f_code
        try:
            with _reasons_to_pass_over(frame) as reason:
                result, first = _with_fewer_symbols(convert)
        except Exception as error:
            is_at_limit = getattr(error, "frame_exec_strategy", None) is not None
            left = [_left_out(code, error)] if _is_swallowed(self, error) else []
            if left or is_at_limit:
                told(backend, Looked(code, False, left, is_at_limit))
            if left and _TANGENT in left[0].reason:
                return ConvertFrameReturn(apply_to_code=False, skip_reason=left[0].reason)
            raise
        reasons = [] if self._one_graph else graph_break_reasons[first:]
        breaks = [
            LeftOut(code, False, why.reason, [(s.filename, s.lineno) for s in why.user_stack])
            for why in reasons
        ]
        is_compiled = result.guarded_code is not None
        skipped = "" if is_compiled else reason(result)
        is_captured = is_compiled or NO_OPERATIONS in skipped
        told(backend, Looked(code, is_captured, breaks, skipped=skipped))
        return result

    patches.FRAMES.stay(watched)


def _latency_of_guards(
    theirs: Callable, guards: Any, scope: dict[str, Any], runs: int = 1
) -> float:
    """Give the microseconds that guards take with what the caches hold, over some runs."""
    began = time.perf_counter()
    for _ in range(runs):
        guards.check(scope)
    return (time.perf_counter() - began) * 1e6 / max(runs, 1)


def _break_at_backward(theirs: Callable, *args: Any, **kwargs: Any) -> Any:
    with patches.INNER_GRADIENTS.by(False):
        return theirs(*args, **kwargs)


def _with_fewer_symbols(convert: Callable[[], Any]) -> tuple[Any, int]:
    """Let Dynamo capture; where it fails on symbols, again without those that it can do without.

    Gives what it made, and the number of graph breaks before.

    It raises where it takes `if y.numel()` for a question of data, in place of a graph break, and
    where Python raises an error for the number that a symbol stands for.
    """
    first = len(graph_break_reasons)
    try:
        with patches.SIZES_OF_DATA.by(True):
            return convert(), first
    except (TorchRuntimeError, GuardOnDataDependentSymNode, exc.Unsupported) as error:
        if isinstance(error, exc.Unsupported) and _FAILED_NODE not in str(error):
            raise
        first = len(graph_break_reasons)
        is_batch = _BATCH_OF_GRADIENTS in str(error)
    with (
        patches.SPECIALIZED_FLOATS.by(True),
        patches.SPECIALIZED_INTEGERS.by(True),
        patches.INTEGERS_OF_MODULES.by(False),
        patches.SIZES_THAT_CHANGE.by(False) if is_batch else nullcontext(),
        patches.INNER_GRADIENTS.by(is_batch),
    ):
        return convert(), first


# Since torch 2.14, Dynamo refuses a call with a tangent of forward-mode AD, and with it all later
# calls of the function, which may have none. These are its words.
_TANGENT = "Attempted to wrap a dual tensor input"


# Since torch 2.14, Dynamo takes what Python raises for a symbol's number for an error of the
# program's, which it refuses to compile; these are its words for what the program has not raised.
_FAILED_NODE = "Dynamo failed to run FX node with fake tensors"
# Of a node that it failed to run.
_BATCH_OF_GRADIENTS = "'is_grads_batched': True"


def _sees_switched_gradients() -> bool:
    """Tell whether Dynamo may take tensors of a module for unchanged that it has not looked at."""
    is_asked_for = dynamo_config.skip_tensor_guards_with_matching_dict_tags
    return is_asked_for and is_within("2.13", "")


@contextmanager
def _reasons_to_pass_over(frame: Any) -> Iterator[Callable[[ConvertFrameReturn], str]]:
    """Watch Dynamo compile a function; gives what tells why a result has no code."""
    if _RESULTS_TELL_WHY:
        yield lambda result: result.skip_reason or ""
        return
    reasons = []

    def compile_frame(theirs: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        except SkipFrame as error:
            reasons.append(f"Dynamo decided to skip the frame while tracing: {error}")
            raise

    def reason(result: ConvertFrameReturn) -> str:
        if not reasons and not convert_frame.has_tensor_in_frame(frame):
            return "no tensor-related objects found in frame"
        return reasons[-1] if reasons else "Dynamo passes over it"

    with patches.PASSED_OVER.by(compile_frame):
        yield reason


_RESULTS_TELL_WHY = is_within("2.13", "")


def _say_once(
    call: Callable, self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a method of a logger while its caller is captured, where a second call does nothing.

    Such methods are cached, as the `warning_once` that transformers gives all loggers; messages
    that are made of tensors break the graph still.
    """
    method = getattr(self.value, name, None)
    is_cached = isinstance(getattr(method, "__func__", None), functools._lru_cache_wrapper)
    if not is_cached or not all(each.is_python_constant() for each in [*args, *kwargs.values()]):
        return call(self, tx, name, args, kwargs)
    given = [each.as_python_constant() for each in args]
    named = {key: each.as_python_constant() for key, each in kwargs.items()}
    return ConstantVariable.create(method(*given, **named))


def _is_swallowed(converter: Any, error: Exception) -> bool:
    """Tell whether Dynamo goes on in eager PyTorch after an error.

    One with a strategy is that of the recompile limit, of which `recompile_limit.py` warns.
    """
    is_an_error = converter._one_graph or converter._box.error_on_graph_break
    if is_an_error or getattr(error, "frame_exec_strategy", None):
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


class Compiled(NamedTuple):
    """A function, or the call of a module, that is compiled."""

    words: str  # in messages
    codes: list[CodeType]  # of the functions that Dynamo may look at first
    module: Callable[[], torch.nn.Module | None]  # whose call it is


def watch_contexts(
    is_ours: Callable[[Any], bool],
    watch: Callable[[Any, Compiled], Callable[[], Callable[[], None]]],
) -> None:
    """Watch calls of functions compiled for backends that are ours.

    `watch(backend, compiled)` gives what is called before each call, which gives what is called
    after it. What Dynamo would not look at, as it is torch's own code, gets a frame that it looks
    at.
    """

    def watched(compile_function: Callable, self: Any, function: Any) -> Any:
        backend = _innermost_backend(self.callback)
        if not is_ours(backend):
            return compile_function(self, function)
        # The hooks of a context are called for all functions that it has compiled, so each gets
        # one of its own.
        context = object.__new__(type(self))
        vars(context).update(vars(self))
        context.enter_exit_hooks = [*self.enter_exit_hooks]
        if isinstance(function, torch.nn.Module):
            _with_a_frame(function, context.enter_exit_hooks)
            _ask_again(function)
            return compile_function(self, function)  # which comes here again with its call
        # Of a module of torch.nn, torch has put a frame around the call.
        module = _module_called(function) or getattr(function, "__wrapped__", None)
        function = _with_a_frame(function, context.enter_exit_hooks)
        _ask_again(function)
        if not isinstance(function, type):
            compiled = _compiled(function, module)
            context.enter_exit_hooks.append(watch(backend, compiled))
        return compile_function(context, function)

    patches.COMPILED_CALLS.stay(watched)


def _compiled(function: Any, module: Any) -> Compiled:
    called = [eval_frame.innermost_fn(function)]
    reference: Callable[[], torch.nn.Module | None] = _nothing
    if isinstance(module, torch.nn.Module):
        words = f"the compiled {type(module).__name__}"
        called.append(eval_frame.innermost_fn(module.forward))
        reference = weakref.ref(module)
    else:
        words = f"the compiled {getattr(function, '__name__', type(function).__name__)}"
    codes = [getattr(each, "__code__", None) for each in called]
    return Compiled(words, [code for code in codes if code is not None], reference)


def eager_asked_for(compiled: Compiled) -> bool:
    """Tell whether the program has asked that a compiled function runs in eager PyTorch now.

    It may do so by a stance, by a setting of Dynamo's, by a transform of torch.func, by a mode that
    is to see each operator, or by torch.compiler.disable of a module's forward.
    """
    return bool(
        getattr(getattr(compiled.module(), "forward", None), "_torchdynamo_disable", False)
        or eval_frame._stance.stance != "default"
        or dynamo_config.disable
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
    )


def why_not_looked_at(codes: Sequence[CodeType]) -> str:
    """Say why Dynamo has looked at none of some functions."""
    skipped = next((code for code in codes if trace_rules.check(code)), None)
    if skipped is None:
        return "Dynamo was not asked to look at it"
    name = os.path.basename(skipped.co_filename)
    return f"Dynamo looks at no code of {name}"


class ByCode:
    """Values for code objects, of which two that are equal are not the same one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @functools.cached_property
    def _values(self) -> ExactWeakKeyDictionary:
        return ExactWeakKeyDictionary()

    def __getitem__(self, code: CodeType) -> Any:
        """Give the value for a code object, a new one if there was none."""
        if code not in self._values:
            self._values[code] = self._make()
        return self._values[code]

    def clear(self) -> None:
        """Forget all values."""
        vars(self).pop("_values", None)


def watch_assigned_forwards(
    is_ours: Callable[[Any], bool], watched: Callable[[Any, str, Any], Any]
) -> None:
    """Watch functions that are assigned to `forward` of modules compiled for backends of ours.

    `watched(backend, words, function)` gives what is assigned instead.
    """

    def assign(assign_theirs: Callable, self: Any, name: str, value: Any) -> None:
        if name == "forward" and _is_assigned_from_outside(self, value):
            backend = _innermost_backend(self.dynamo_ctx.callback)
            if is_ours(backend):
                words = f"the compiled {type(self._orig_mod).__name__}"
                value = watched(backend, words, value)
        assign_theirs(self, name, value)

    patches.ASSIGNED_FORWARD.stay(assign)


def _is_assigned_from_outside(module: Any, forward: Any) -> bool:
    """Tell whether torch itself does not assign it, as it makes a compiled module."""
    is_made = "forward" in vars(module) and callable(forward)
    is_lazy = getattr(forward, "__func__", None) is eval_frame.OptimizedModule._call_lazy_check
    return is_made and not is_lazy and not hasattr(forward, "_is_torch_compile")


def register_once(backend: Callable[..., Any]) -> None:
    """Let threads that compile for the first time at once register a backend of ours."""
    patches.BACKENDS.take(backend)


def never_compile(modules: Sequence[str]) -> None:
    """Let Dynamo leave the functions of some modules alone, which autograd and kernels call."""
    patches.LEFT_ALONE.add(modules)


def _with_a_frame(function: Any, hooks: list[Callable[[], Any]]) -> Any:
    """Give a function that Dynamo captures where the given one is a module's of torch.nn.

    `hooks` are called before each call.
    """
    module = function if isinstance(function, torch.nn.Module) else _module_called(function)
    if module is not None:
        _frame_forward_of_shards(module)
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        inner = module.module
        if inner._compiled_call_impl is None and _is_torchs_own(inner):
            # As Module.compile does. Copies and pickles of the module do not contain it.
            inner._compiled_call_impl = _framed(inner._call_impl)
    elif module is not function and module is not None and _is_torchs_own(module):
        hooks.insert(0, functools.partial(_before_call, weakref.ref(module)))
        return _framed(function)
    return function


def _before_call(module: weakref.ref[torch.nn.Module]) -> Callable[[], None]:
    _frame_forward_of_shards(module())  # fully_shard may have come after Module.compile
    return _nothing


def _nothing() -> None:
    pass


def _frame_forward_of_shards(module: torch.nn.Module) -> None:
    """Give a module of torch.nn that `fully_shard` has taken a forward that Dynamo captures.

    Dynamo leaves what gathers the parameters to eager PyTorch, and with it the call around. Such a
    module is neither copied nor pickled, so that its own attribute may call it.
    """
    if _is_sharded(module) and _is_torchs_own(module):
        module.__dict__["forward"] = _framed(module.forward)


def _is_sharded(module: torch.nn.Module) -> bool:
    """Tell whether `fully_shard` has taken a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by every program that shards
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _module_called(function: Any) -> torch.nn.Module | None:
    module = getattr(function, "__self__", None)
    is_call = getattr(function, "__name__", "") in ("_call_impl", "_wrapped_call_impl")
    return module if is_call and isinstance(module, torch.nn.Module) else None


def _is_torchs_own(module: torch.nn.Module) -> bool:
    is_method = isinstance(module.forward, MethodType)
    return is_method and trace_rules.check(module.forward)


def _framed(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = external_utils.wrap_inline(function)
    # Dynamo caches and counts graphs by code object, so this one must not be shared.
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


def symbolic_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Give the inputs of Dynamo's graph with its symbols in place of the sizes of one call.

    Raises Unsupported where they are unknown.
    """
    nodes = graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("example_value") for node in nodes]
    if any(isinstance(value, torch.SymInt) for value in inputs):
        for i, fake in enumerate(fakes):
            if fake is None:
                raise _C.Unsupported(f"input {i}: the graph has no record of its sizes")
    return [
        fake if isinstance(fake, torch.Tensor) and _has_symbols(fake) else value
        for fake, value in zip(fakes, inputs, strict=True)
    ]


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))
