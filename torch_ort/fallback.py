"""Who runs a graph when the engine does not: the one place that catches the engine's errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_ort import counting
from torch_ort._C import Error, InternalError, Unsupported, UserError


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


def compile_or_eager(
    compile_graph: Callable[[], Callable], eager: Callable, strict: bool, state: Any
) -> Callable[..., Any]:
    """Compile a graph; on an error of the engine give a callable that runs it in eager PyTorch.

    UserError and, when `strict`, every error is raised. A failure leaves the random state as it was.
    `state.failed` tells later that a backward failed, after which eager is right as well.
    """
    random = RandomState()
    try:
        compiled = compile_graph()
    except UserError:
        raise
    except (Unsupported, InternalError) as error:
        if strict:
            raise
        random.restore()
        warn(getattr(error, "stage", "capture"), error)
        return eager
    return FirstRun(compiled, eager, strict, state)


def warn(stage_name: str, error: BaseException) -> None:
    """Count a fallback and say so once."""
    counting.count(f"fallbacks_{stage_name}")
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(
        f"torch_ort: {stage_name}: {reason}; this graph runs in eager PyTorch "
        "(TORCH_ORT_STRICT=1 raises instead)",
        FallbackWarning,
        stacklevel=3,
    )


class RandomState:
    """Remembers the generators' states, to run something again with the same numbers."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put the remembered states back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class FirstRun:
    """Calls a compiled graph; runs it in eager PyTorch from then on if the engine fails.

    A kernel's own error is raised as it is once the graph has run: eager would raise it too.
    """

    def __init__(self, compiled: Callable, eager: Callable, strict: bool, graph: Any) -> None:
        self._graph = graph
        self._run = compiled
        self._eager = eager
        self._strict = strict
        self._proven = False
        # What Dynamo asks of a compiled function.
        self.__name__ = "torch_ort_graph"

    def __call__(self, *args: Any) -> Any:
        """Run the graph, or eager PyTorch if it has failed."""
        if self._graph.failed:
            return self._eager(*args)
        if self._proven:
            try:
                return self._run(*args)
            except (Unsupported, InternalError) as error:
                # A plan for new sizes: nothing has run yet.
                if self._strict or getattr(error, "stage", None) is not None:
                    raise
                return self._give_up("plan", error, args)
        return self._first_call(args)

    def _first_call(self, args: tuple) -> Any:
        if self._strict:
            result = self._run(*args)
            self._proven = True
            return result
        state = RandomState()
        before = _Snapshot(args)
        try:
            result = self._run(*args)
        except Exception as error:
            state.restore()
            before.restore()
            result = self._eager(*args)  # an error of the user's program comes again from here
            self._give_up_with(error)
            return result
        self._proven = True
        return result

    def _give_up(self, stage_name: str, error: Exception, args: tuple) -> Any:
        warn(stage_name, error)
        self._run, self._proven, self._strict = self._eager, True, True
        return self._eager(*args)

    def _give_up_with(self, error: Exception) -> None:
        is_plan = isinstance(error, (Unsupported, InternalError)) and str(error).startswith("plan")
        warn(getattr(error, "stage", "plan" if is_plan else "forward"), error)
        self._run, self._proven, self._strict = self._eager, True, True


class _Snapshot:
    """Copies of the buffers that a failing first run may have written into: their version tells."""

    def __init__(self, args: tuple) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        # Parameters are written by optimizers only, between runs.
        self.buffers = [t for t in tensors if not t.requires_grad and not t.is_inference()]
        self.versions = [t._version for t in self.buffers]
        self.copies = [t.detach().clone() for t in self.buffers]

    def restore(self) -> None:
        """Put back what was written."""
        for tensor, version, copy in zip(self.buffers, self.versions, self.copies, strict=True):
            if tensor._version != version or not torch.equal(tensor.detach(), copy):
                with torch.no_grad():
                    tensor.copy_(copy)
