"""Private names of torch for FX graphs: those that AOTAutograd makes, and their nodes.

Each has a test in tests/pytorch/test_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from torch_ort.core.user_code import Line, innermost
from torch_ort.pytorch import patches
from torch_ort.pytorch.private import (
    FakeScriptObject,
    GradAOTOutput,
    HigherOrderOperator,
    OpOverload,
    PlainAOTInput,
    PlainAOTOutput,
    detect_fake_mode,
)
from torch_ort.pytorch.private import _pytree as pytree
from torch_ort.pytorch.private import aot_autograd as aot_autograd
from torch_ort.pytorch.private import auto_functionalize as auto_functionalize
from torch_ort.pytorch.private import default_partition as default_partition


def node_that_raised(error: BaseException) -> tuple[str, Line | None]:
    """Give the operator of the graph that AOTAutograd traced, and the user's line of it.

    They stand in an error's words.
    """
    words = str(error)
    operator = re.search(r"While executing %.*?target=([\w.]+)", words)
    _, _, trace = words.partition("Original traceback:")
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return operator[1] if operator else "", innermost((path, int(n)) for path, n in lines)


def backward_without_autocast() -> AbstractContextManager[None]:
    """Let AOTAutograd trace backward without autocast, as eager PyTorch runs it outside of that."""
    return patches.BACKWARD_AUTOCAST.by("off")


def may_differ_under_autocast(joint: fx.GraphModule, state: Sequence[tuple]) -> bool:
    """Tell whether the backward of a joint graph may be another one in a state of autocast.

    It may where it calls an operator that autocast has a rule for, other than a product of numbers
    that are of autocast's dtype already, or one whose parts cannot be seen.
    """
    keys = [f"Autocast{device.upper()}" for device, _ in state]
    dtypes = {torch.float64, *(dtype for _, dtype in state)}
    return any(
        node.op == "call_function"
        and "backward" in node.meta.get("partitioner_tag", "")
        and _may_be_cast(node, keys, dtypes)
        for node in joint.graph.nodes
    )


def _may_be_cast(node: fx.Node, keys: Sequence[str], dtypes: set[torch.dtype]) -> bool:
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator)
    if node.target.namespace == "torch_ort":  # a Function of the user's
        return True
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    if not any(has_rule(node.target.name(), key) for key in keys):
        return False
    given = [arg.meta["val"] for arg in node.all_input_nodes]
    floats = {value.dtype for value in given if isinstance(value, torch.Tensor)}
    return node.target not in _PRODUCTS or not floats <= dtypes


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.addbmm.default,
}


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
    """Describe a joint graph's outputs as AOTAutograd does; None for what is not a gradient."""
    outputs: list[Any] = [PlainAOTOutput(i) for i in range(num_outputs)]
    return outputs + [None if i is None else GradAOTOutput(PlainAOTInput(i)) for i in gradients_of]


def forward_and_backward_nodes(
    joint: fx.GraphModule, forward_outputs: Sequence[object]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split the nodes of a joint graph (no placeholders, no output) into forward and backward.

    Everything up to the last node that AOTAutograd traced in forward is forward. A node after it is
    forward if it writes what forward has computed into an input and was not traced in backward.
    Dependence on a tangent tells nothing: random numbers and counters of a custom backward have
    none.
    """
    nodes = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    tags = [node.meta.get("partitioner_tag") for node in nodes]
    depends: set[fx.Node] = {node for node in joint.graph.nodes if _is_tangent(node)}
    for node in nodes:
        if any(arg in depends for arg in node.all_input_nodes):
            depends.add(node)
    needed = _ancestors(forward_outputs)  # rewrites by AOTAutograd may leave nodes without a tag
    last = max(
        (i for i, node in enumerate(nodes) if tags[i] == "is_forward" or node in needed), default=-1
    )
    if last < 0:  # in a torch without tags, only dataflow decides
        last = max((i for i, node in enumerate(nodes) if node not in depends), default=-1)
    forward, backward = [], []
    for i, node in enumerate(nodes):
        late_mutation = i > last and tags[i] != "is_backward" and _mutates(node)
        belongs = (i <= last or late_mutation) and node not in depends
        (forward if belongs else backward).append(node)
        if not belongs:
            depends.update(node.users)
    # A constant that only backward reads is read there; one that both halves read stays in forward.
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
    """Tell whether the forward of a graph writes into what `unfold` gave.

    Functionalization takes the gradient of `unfold` for that, in which elements of no window are 0.
    Functions that add windows, such as istft, call it by themselves.
    """
    return any(
        node.target is torch.ops.aten.unfold_backward.default
        and "backward" not in node.meta.get("partitioner_tag", "")
        and not node.meta.get("adds_windows")
        for node in graph.nodes
    )


def replaces_memory(graph: fx.Graph) -> bool:
    """Tell whether a graph gives an input the memory of a value."""
    return any(
        isinstance(node.target, OpOverload) and schema(node.target).name in _REPLACING_MEMORY
        for node in graph.nodes
    )


# By what Dynamo assigns to the `data` of a tensor: until torch 2.14, and since.
_REPLACING_MEMORY = ("aten::set_", "aten::shallow_copy_data_")


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
            if isinstance(node.meta["val"], torch.Tensor):  # sizes of views are inputs as well
                found.add(input_position(node))
        elif node.target is operator.getitem or (
            isinstance(node.target, OpOverload) and _keeps_order(node.target)
        ):
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            nodes += new
    return found - {None}


def recompute_policy(node: fx.Node) -> tuple[str, int]:
    """Give the policy of torch.utils.checkpoint for a node, and the number of its checkpoint."""
    policy, checkpoint = node.meta.get("recompute"), node.meta.get("ac_graph_id")
    name = policy.name.lower() if policy is not None else ""
    return name, checkpoint if isinstance(checkpoint, int) else -1


def is_object(value: object) -> bool:
    """Tell whether a graph's value is an object of Python's that its operators do not look into."""
    return isinstance(value, FakeScriptObject)


def is_passed_object(node: object) -> bool:
    """Tell whether an output of a graph is such an object, which a caller gives to the graph."""
    is_input = isinstance(node, fx.Node) and node.op == "placeholder"
    return is_input and is_object(node.meta.get("val"))


def needs_no_version_check(node: fx.Node) -> bool:
    """Tell whether a value was stashed on the ctx of an autograd.Function, which is not watched."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))
