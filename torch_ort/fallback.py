"""Who runs a graph when the engine does not: the one place that catches the engine's errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_ort import counting
from torch_ort._C import Error, InternalError, Unsupported, UserError
from torch_ort.capture import aot_compat
from torch_ort.generators import TorchGenerators

FORWARD_MODE = "forward-mode AD: an input has a tangent, which a captured graph would lose"

# What the engine raises where eager PyTorch may take over.
ENGINE_ERRORS = (Unsupported, InternalError)


class FallbackWarning(UserWarning):
    """A graph runs in eager PyTorch; the message says why."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name the stage that an engine error comes from; the innermost name stays."""
    try:
        yield
    except Error as error:
        if not hasattr(error, "stage"):
            error.stage = name
        raise


# Compiles a graph again, another way, after an error of its first run with some arguments.
CompileAgain = Callable[[Exception, tuple], Callable[..., Any]]


def compile_or_eager(
    compile_graph: Callable[[], tuple[Callable, CompileAgain | None]], eager: Callable,
    strict: bool, state: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph; on an error of the engine give a callable that runs it in eager PyTorch.

    Where `compile_graph` tells how to compile again, that is done instead if the first run fails.
    UserError and, when `strict`, every error is raised. A failure leaves the random state as it
    was. `state.failed` tells later that a backward failed, after which eager is right as well;
    what the graph writes into stands in `state.written` while its first run may fail.
    """
    random = TorchGenerators()
    try:
        compiled, again = compile_graph()
    except UserError:
        raise
    except ENGINE_ERRORS as error:
        if strict:
            raise
        random.restore()
        warn(getattr(error, "stage", "capture"), error)
        return eager
    return FirstRun(compiled, eager, strict, state, again)


def reason_of(error: BaseException) -> str:
    """Give the first line of an error's words, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def comes_from_function(error: BaseException) -> bool:
    """Tell whether an error is one of a torch.autograd.Function that a graph calls.

    It is raised as it is: nothing of the engine has failed, and running again does twice what the
    Function does.
    """
    return hasattr(error, "torch_ort_function")


def may_come_from_a_rule(error: Exception) -> bool:
    """Tell whether a tensor may not be what a rule of the recorder said.

    The engine checks types and raises UserError, a kernel raises RuntimeError; one of its own comes
    again.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, ENGINE_ERRORS)


def warn(stage_name: str, error: BaseException) -> None:
    """Count a fallback and say so once."""
    counting.count(f"fallbacks_{stage_name}")
    warnings.warn(
        f"torch_ort: {stage_name}: {reason_of(error)}; this graph runs in eager PyTorch "
        "(TORCH_ORT_STRICT=1 raises instead)",
        FallbackWarning,
        stacklevel=3,
    )


_frames: dict[int, tuple[aot_compat.Frame, bool]] = {}


def remember_frame(strict: bool) -> None:
    """Remember that what Dynamo compiles right now is ours, and whether it may run in eager."""
    frame = aot_compat.frame_in_capture()
    if frame is not None:
        _frames[frame.id] = frame, strict


def forget_frames() -> None:
    """Forget all frames; called when compiled code is reset."""
    _frames.clear()


def recompile_limit_reached(frame_id: int, limit: str) -> None:
    """Count, and say, that torch compiles a function of ours no more.

    Raises Unsupported where nothing may run in eager. Under `fullgraph=True` torch raises.
    """
    if frame_id not in _frames:
        return
    frame, strict = _frames[frame_id]
    counting.count("captures_refused")
    if frame.raises_at_limit:
        return
    message = f"capture: {frame.where}: compiled too often: got {limit}"
    if strict:
        raise Unsupported(message)
    warnings.warn(
        f"torch_ort: {message}; calls that need a new graph run in eager PyTorch "
        "(TORCH_LOGS=recompiles says what differs, TORCH_ORT_STRICT=1 raises instead)",
        FallbackWarning,
        stacklevel=2,
    )


aot_compat.watch_recompile_limit(recompile_limit_reached)


class FirstRun:
    """Calls a compiled graph; runs it in eager PyTorch from then on if the engine fails.

    A kernel's own error is raised as it is once the graph has run: eager would raise it too.
    """

    def __init__(
        self, compiled: Callable, eager: Callable, strict: bool, graph: Any,
        again: CompileAgain | None,
    ) -> None:  # fmt: skip
        self._graph = graph
        self._again = again
        self._run = compiled
        self._eager = eager
        self._strict = strict
        self._refuses_tangents = strict
        self._has_met_tangents = False  # and has said so
        self._proven = False
        # What Dynamo asks of a compiled function.
        self.__name__ = "torch_ort_graph"

    def __call__(self, *args: Any) -> Any:
        """Run the graph, or eager PyTorch if it has failed."""
        if self._graph.failed:
            return self._eager(*args)
        if aot_compat.in_forward_mode() and aot_compat.has_tangents(args):
            return self._run_forward_mode(args)
        if self._proven:
            try:
                return self._run(*args)
            except ENGINE_ERRORS as error:
                # A plan for new sizes: nothing has run yet.
                if self._strict or getattr(error, "stage", None) is not None:
                    raise
                return self._give_up("plan", error, args)
        return self._first_call(args)

    def _run_forward_mode(self, args: tuple) -> Any:
        """Run a call in eager PyTorch that brings tangents; others go on running in the engine."""
        error = Unsupported(FORWARD_MODE)
        if self._refuses_tangents:
            raise error
        if not self._has_met_tangents:
            self._has_met_tangents = True
            warn("forward", error)
        return self._eager(*args)

    def _first_call(self, args: tuple) -> Any:
        is_guarded = self._again is not None or not self._strict
        result = self._guarded_run(args) if is_guarded else self._run(*args)
        if not self._proven:  # nor given up
            self._proven = True
            self._again = None
            self._graph.note_first_run()
        return result

    def _guarded_run(self, args: tuple) -> Any:
        """Run the graph, or after a failure undo what it did and run another, or eager PyTorch."""
        try:
            with undone_on_error(self._graph):
                return self._run(*args)
        except Exception as error:
            if comes_from_function(error):
                raise
            if self._again is not None and may_come_from_a_rule(error):
                return self._run_again(error, args)
            if self._strict:
                raise
            result = self._eager(*args)  # an error of the user's program comes again from here
            self._give_up_with(error)
            return result

    def _run_again(self, error: Exception, args: tuple) -> Any:
        again, self._again = self._again, None
        try:
            self._run = again(error, args)
        except ENGINE_ERRORS as failure:
            if self._strict:
                raise
            return self._give_up(getattr(failure, "stage", "capture"), failure, args)
        return self._first_call(args)

    def _give_up(self, stage_name: str, error: Exception, args: tuple) -> Any:
        warn(stage_name, error)
        self._run, self._proven, self._strict = self._eager, True, True
        return self._eager(*args)

    def _give_up_with(self, error: Exception) -> None:
        warn(stage_of_first_run(error), error)
        self._run, self._proven, self._strict = self._eager, True, True


def stage_of_first_run(error: Exception) -> str:
    """Name the stage that an error of a graph's first run comes from."""
    is_plan = isinstance(error, ENGINE_ERRORS) and str(error).startswith("plan")
    return getattr(error, "stage", "plan" if is_plan else "forward")


@contextmanager
def undone_on_error(graph: Any) -> Iterator[None]:
    """Undo what a failing run of a graph wrote and drew; `graph.written` collects copies for it."""
    random = TorchGenerators()
    graph.written = []
    try:
        yield
    except Exception:
        random.restore()
        put_back(graph.written)
        raise
    finally:
        graph.written = None


def put_back(written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Undo what a run wrote; what it did not reach is left alone, for autograd watches edits."""
    with torch.no_grad():
        for tensor, copy in written:
            if not torch.equal(tensor, copy):
                tensor.copy_(copy)
