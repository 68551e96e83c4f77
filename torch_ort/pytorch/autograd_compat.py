"""Private names of torch for autograd: nodes, hooks, versions, Functions.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_ort.pytorch import patches
from torch_ort.pytorch.patching import not_for_dynamo
from torch_ort.pytorch.versions import is_within


def after_backward(call: Callable[[], None]) -> None:
    """Call something at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def node_of_graph(results: Sequence[Any]) -> torch.autograd.graph.Node | None:
    """Give autograd's node of a graph of AOTAutograd's, of which there are results and views."""
    node = next((x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn), None)
    while node is not None and type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def newest_node() -> int:
    """Give the number of the node that autograd has made last in this thread; -1: none yet."""
    return torch.autograd._get_sequence_nr() - 1


def running_node() -> int | None:
    """Give the number of the node whose backward runs in this thread."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def notes_of_running_node() -> dict[str, Any]:
    """Give what was noted at the node whose backward runs in this thread, as `Node.metadata`."""
    node = torch._C._current_autograd_node()
    return {} if node is None else node.metadata


def version(tensor: torch.Tensor) -> int:
    """Give how often a tensor was written into; 0 for one of inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def saved_tensor_hooks_copy() -> bool:
    """Tell whether hooks are active that may copy or move what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    # torch.utils.checkpoint does not save the tensors that it packs, but runs forward again.
    name = getattr(hooks[0], "__qualname__", "")
    return not name.startswith(("_checkpoint_hook", "_recomputation_hook"))


def saved_tensor_hooks_active() -> bool:
    """Tell whether hooks are called for what autograd saves: those of a checkpoint among others."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def ends_recomputation(error: BaseException) -> bool:
    """Tell whether an exception is that by which a checkpoint leaves the function it runs again."""
    return isinstance(error, torch.utils.checkpoint._StopRecomputationError)


def functions_replaced(
    replace: Callable[[type, tuple, Callable], Any],
) -> AbstractContextManager[None]:
    """Call `replace(class, arguments, apply)` in place of Functions' own `apply` in this thread.

    Not in transforms of torch.func, which make Functions of their own.
    """

    @not_for_dynamo
    def apply(theirs: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(patches.FUNCTION_APPLY.theirs, cls)
        if torch._C._are_functorch_transforms_active():
            return own(*args, **kwargs)
        args, kwargs = _bound(cls, args, kwargs)
        return own(*args, **kwargs) if kwargs else replace(cls, args, own)

    return patches.FUNCTION_APPLY.by(apply)


def _bound(cls: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give the arguments of a Function in the order of its forward, with defaults.

    Those of a Function with `setup_context` may be named. Before torch 2.14 they have been put in
    order before they come here.
    """
    if not _COME_AS_GIVEN or cls.setup_context is torch.autograd.Function.setup_context:
        return args, kwargs
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


_COME_AS_GIVEN = is_within("2.14", "")


def functions_as_they_are() -> AbstractContextManager[None]:
    """Let Functions run in this thread whatever replaces them."""
    return patches.FUNCTION_APPLY.as_torch_has_it()


def below_autograd() -> Any:
    """Give a context in which operators are called without their autograd rules."""
    return torch._C._AutoDispatchBelowAutograd()
