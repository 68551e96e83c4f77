"""`torch_ort.python_op`: a torch.autograd.Function as one node of a graph of torch.compile's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_ort._C import UserError
from torch_ort.functions.arguments import full_name
from torch_ort.functions.call import Calls, keep_for_traces
from torch_ort.pytorch.module_compat import pytree
from torch_ort.pytorch.trace_compat import is_traced

# Dynamo's graphs refer to these by number, and may run until the process ends.
_wrapped: dict[int, PythonOp] = {}
_lock = threading.Lock()


class PythonOp:
    """What `python_op` returns: `op(x)` and `op.apply(x)` call the Function.

    In code that torch.compile traces the call is one node of the graph, without a graph break.
    """

    def __init__(self, function: type, number: int) -> None:
        self.function = function
        self.number = number
        self.calls = Calls(keeps=True)
        keep_for_traces(self.calls)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        """Call the Function; the arguments and results are those of its `apply`."""
        if torch.compiler.is_compiling():
            return _call_in_graph(self.number, *args)
        return self.function.apply(*args)

    def apply(self, *args: Any) -> Any:
        """Call the Function, as its own `apply` does."""
        return self(*args)

    def __repr__(self) -> str:
        return f"torch_ort.python_op({full_name(self.function)})"


def python_op(function: type) -> PythonOp:
    """Wrap a torch.autograd.Function, so that torch.compile calls it as one node of the graph.

    Use it for Functions that Dynamo cannot trace (numpy, C++, other libraries). A Function that it
    can trace is better left unwrapped, as its operators are then fused with others. It is also a
    decorator of the class.

        scale = torch_ort.python_op(Scale)  # class Scale(torch.autograd.Function)
        y = scale(x, 2.0)  # in place of Scale.apply(x, 2.0)

    Raises UserError unless `function` is a class derived from torch.autograd.Function.
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
    return op.function.apply(*args)  # the graph does not run in the engine
