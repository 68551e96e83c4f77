"""What of torch's private names the capture stands on, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "aot_autograd",
    "default_partition",
    "fake_token",
    "forward_and_backward_nodes",
    "passes_through",
    "saved_tensor_hooks_copy",
]

# Exceptions that Dynamo itself acts upon.
_DYNAMO_SIGNALS = (
    "TensorifyScalarRestartAnalysis",
    "SkipFrame",
    "ShortenTraceback",
    "RestartAnalysis",
)


def passes_through(error: BaseException) -> bool:
    """Tell whether an exception is a message to Dynamo and no failure."""
    if isinstance(error, UnsupportedFakeTensorException | GuardOnDataDependentSymNode):
        return True
    return any(kind.__name__ in _DYNAMO_SIGNALS for kind in type(error).__mro__)


def fake_token(placeholders: Sequence[fx.Node]) -> torch.Tensor:
    """Describe the token to AOTAutograd.

    Its storage is that of an input: AOTAutograd then does not count it among the buffers that a
    backward
    may overwrite, which would forbid retain_graph=True. Its size is static, whatever is dynamic.
    """
    fakes = [
        node.meta["val"] for node in placeholders if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    mode = detect_fake_mode(fakes)
    with mode, torch.no_grad():
        return fakes[0].detach().as_strided((0,), (1,))


def forward_and_backward_nodes(
    joint: fx.GraphModule, forward_outputs: Sequence[object]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split the nodes of a joint graph (placeholders and output left out) at the border.

    Everything up to the last node that AOTAutograd traced in forward is forward. A node after it is
    forward if it writes into an input and was not traced in backward. Dependence on a tangent
    tells nothing:
    random numbers of a custom backward have none.
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


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def needs_no_version_check(node: fx.Node) -> bool:
    """Tell whether a value was stashed on a ctx of an autograd.Function: autograd does not watch it."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


def saved_tensor_hooks_copy() -> bool:
    """Tell whether hooks are active that may copy or move what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    # torch.utils.checkpoint keeps nothing of what it packs: it runs the forward again.
    name = getattr(hooks[0], "__qualname__", "")
    return not name.startswith(("_checkpoint_hook", "_recomputation_hook"))
