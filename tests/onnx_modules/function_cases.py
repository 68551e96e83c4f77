"""Calls of the functions that compute ONNX's operators, and files with one node, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

import torch
from onnx import helper, numpy_helper

from torch_ort.onnx.functions import TABLE
from torch_ort.onnx.functions.types import named_arguments

# The opset of tests that ask for no other one.
OPSET = 22


def call_function(
    op: str, inputs: Sequence[Any], attributes: dict[str, Any], num_outputs: int = 1,
    opset: int = OPSET,
) -> tuple[Any, ...]:  # fmt: skip
    """Call the function of a standard operator; gives the outputs that are wanted."""
    row = TABLE["", op]
    facts = {**attributes, "torch_ort.opset": opset}
    result = row.function(*inputs, **named_arguments(op, row, facts, (True,) * num_outputs))
    return (result if isinstance(result, tuple) else (result,))[:num_outputs]


def distinct(*sizes: int) -> torch.Tensor:
    """Numbers in random order, no two nearer to each other, or to 0, than 0.1."""
    count = torch.Size(sizes).numel()
    return ((torch.randperm(count) - count // 2).double() / 5 + 0.1).view(sizes)


def file_of(
    op: str, inputs: Sequence[Any], attributes: dict[str, Any], num_outputs: int = 1,
    opset: int = OPSET, sizes: dict[int, list[Any]] | None = None, constant: Sequence[int] = (),
) -> onnx.ModelProto:  # fmt: skip
    """Write a file with one node. What its function takes as numbers is a constant of the file.

    `sizes` are those that the file declares for an input, where they are not those of the tensor,
    and `constant` are positions of further constants.
    """
    row = TABLE.get(("", op))
    constant = (*constant, *(row.numbers if row else ()))
    names, values, initializers = [], [], []
    for slot, given in enumerate(inputs):
        name = "" if given is None else f"x{slot}"
        names.append(name)
        if given is None:
            continue
        if slot in constant:
            initializers.append(numpy_helper.from_array(given.numpy(), name))
            continue
        declared = (sizes or {}).get(slot, list(given.shape))
        values.append(helper.make_tensor_value_info(name, number_of(given.dtype), declared))
    outputs = [f"y{i}" for i in range(num_outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, **attributes)], "net", values,
        [onnx.ValueInfoProto(name=name) for name in outputs], initializers,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def number_of(dtype: torch.dtype) -> int:
    """Give the number of a dtype in ONNX."""
    return helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
