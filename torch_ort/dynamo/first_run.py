"""The first run of a graph from Dynamo: if it fails, the graph is captured again or falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_ort._C import Unsupported
from torch_ort.fallback import (
    FORWARD_MODE,
    Failure,
    failure_of_later_run,
    may_come_from_a_rule,
    warn,
    within_boundary,
)
from torch_ort.pytorch import trace_compat

# Compiles a graph again in another way, after an error of its first run with some arguments.
CompileAgain = Callable[[Exception, tuple], Callable[..., Any]]


def compile_or_eager(
    compile_graph: Callable[[], tuple[Callable, CompileAgain | None]], eager: Callable,
    strict: bool, state: Any, retries: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph; where that fails give a callable that runs it in eager PyTorch.

    If `compile_graph` returns a way to compile again, that is tried first when the first run fails.
    When `strict`, every error is raised. If it `retries`, a graph whose run has failed is tried
    again at the next call. `state.failed` tells later that a backward failed, after which eager is
    right as well.
    """

    def instead(failure: Failure) -> Callable[..., Any]:
        if strict:
            raise failure.error
        warn(failure)
        return eager

    def compiled() -> Callable[..., Any]:
        run, again = compile_graph()
        return FirstRun(run, eager, strict, state, again, retries)

    return within_boundary(compiled, instead, "capture")


class FirstRun:
    """Calls a compiled graph; if the engine fails, eager PyTorch runs the call, and later ones.

    A kernel's own error is raised as it is once the graph has run: eager would raise it too. So is
    any error of a run in which other ranks take part: eager would communicate once more.
    """

    def __init__(
        self, compiled: Callable, eager: Callable, strict: bool, graph: Any,
        again: CompileAgain | None, retries: bool = False,
    ) -> None:  # fmt: skip
        self._graph = graph
        self._again = again
        self._run = compiled
        self._eager = eager
        self._strict = strict
        self._retries = retries
        self._refuses_tangents = strict
        self._has_met_tangents = False  # a warning has said so
        self._proven = False
        self._is_to_retry = False  # the current call has failed
        # Attributes that Dynamo reads of a compiled function.
        self.__name__ = "torch_ort_graph"

    def __call__(self, *args: Any) -> Any:
        """Run the graph, or eager PyTorch if it has failed."""
        if self._graph.failed:
            return self._eager(*args)
        if trace_compat.in_forward_mode() and trace_compat.has_tangents(args):
            return self._run_forward_mode(args)
        if not self._proven:
            return self._first_call(args)
        try:
            return self._run(*args)
        except Exception as error:
            if self._strict or self._graph.communicates:
                raise
            failure = failure_of_later_run(error, self._graph.is_repeatable)
        return self._in_eager(failure, args)

    def _run_forward_mode(self, args: tuple) -> Any:
        """Run a call whose inputs have tangents in eager PyTorch, and this call only."""
        error = Unsupported(FORWARD_MODE)
        if self._refuses_tangents:
            raise error
        if not self._has_met_tangents:
            self._has_met_tangents = True
            warn(Failure(error, "forward"))
        return self._eager(*args)

    def _first_call(self, args: tuple) -> Any:
        # Dynamo's guards tell tensors of this kind from others, so this graph is for them alone.
        if any(isinstance(value, trace_compat.FakeTensor) for value in args):
            error = Unsupported(
                "an input is a FakeTensor, which has no data for the engine to read"
            )
            return self._in_eager(Failure(error, "forward"), args)
        if (self._strict and self._again is None) or self._graph.communicates:
            result = self._run(*args)
        else:
            result = within_boundary(
                lambda: self._run(*args), lambda failure: self._instead(failure, args), "forward",
                self._graph,
            )  # fmt: skip
        is_to_retry, self._is_to_retry = self._is_to_retry, False
        if not self._proven and not is_to_retry:  # the run has succeeded
            self._proven = True
            self._again = None
            self._graph.note_first_run()
        return result

    def _instead(self, failure: Failure, args: tuple) -> Any:
        if self._again is not None and may_come_from_a_rule(failure.error):
            failed = self._compile_again(failure.error, args)
            return self._in_eager(failed, args) if failed else self._first_call(args)
        return self._in_eager(failure, args)

    def _compile_again(self, error: Exception, args: tuple) -> Failure | None:
        again, self._again = self._again, None

        def compiled() -> None:
            self._run = again(error, args)

        return within_boundary(compiled, lambda failure: failure, "capture")

    def _in_eager(self, failure: Failure, args: tuple) -> Any:
        if self._strict:
            raise failure.error
        result = self._eager(*args)  # an error of the user's program is raised again here
        warn(failure)
        if self._retries:
            self._is_to_retry = True
        else:
            self._run, self._proven, self._strict = self._eager, True, True
        return result
