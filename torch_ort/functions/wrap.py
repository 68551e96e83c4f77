"""`torch_ort.python_op`: a Function that torch.compile leaves whole, as a PythonOp of its graph."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_ort._C import UserError
from torch_ort.functions.arguments import full_name
from torch_ort.functions.call import Calls, keep_for_traces
from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import is_traced

# Graphs that Dynamo made know them by number, and may run for as long as the process.
_wrapped: dict[int, PythonOp] = {}
_lock = threading.Lock()


class PythonOp:
    """Calls a Function; in code that torch.compile traces, as one operator with no graph break."""

    def __init__(self, function: type, number: int) -> None:
        self.function = function
        self.number = number
        self.calls = Calls(keeps=True)
        keep_for_traces(self.calls)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        """Call the Function, as its `apply` does."""
        if torch.compiler.is_compiling():
            return _call_in_graph(self.number, *args)
        return self.function.apply(*args)

    def apply(self, *args: Any) -> Any:
        """Call the Function."""
        return self(*args)

    def __repr__(self) -> str:
        return f"torch_ort.python_op({full_name(self.function)})"


def python_op(function: type) -> PythonOp:
    """Make a torch.autograd.Function an operator; as a call or as a decorator of the class.

    What Dynamo can trace it may inline, which is faster; wrap what it cannot. Raises UserError for
    anything but a Function.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise UserError(
            f"python_op: got {function!r}, want a class derived from torch.autograd.Function"
        )
    with _lock:
        for op in _wrapped.values():
            if op.function is function:
                return op
        op = _wrapped[len(_wrapped)] = PythonOp(function, len(_wrapped))
        return op


@torch.compiler.allow_in_graph
def _call_in_graph(number: int, *args: Any) -> Any:
    op = _wrapped[number]
    if any(map(is_traced, pytree.tree_leaves(args))):
        return op.calls.put(op.function, args)
    return op.function.apply(*args)  # the graph runs without the engine
