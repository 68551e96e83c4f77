"""Quantizing and dequantizing as one node, through which gradients pass.

A QuantizeLinear gives integers, which have no gradients. Where a DequantizeLinear reads them with
the same scale and zero point, the two are the function `fake_quantize`.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from torch_ort.onnx.graphs import Names

# What the pair is called, in the domain torch_ort.
JOINED = "FakeQuantize"
_USUAL = TensorProto.UINT8  # without a zero point
_INTEGERS = (
    TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32,
)  # fmt: skip


def join_quantization(graph: onnx.GraphProto, names: Names) -> None:
    """Let nodes of the graph that dequantize what another quantizes read what that one reads.

    `names` are those of the graph.
    """
    quantized = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "QuantizeLinear" and not node.domain
        and len(node.input) > 1 and node.output
    }  # fmt: skip
    zeros: dict[str, str] = {}
    dtypes = {each.name: each.data_type for each in graph.initializer}
    for node in graph.node:
        is_other = node.op_type != "DequantizeLinear" or node.domain or len(node.input) < 2
        if is_other or node.input[0] not in quantized:
            continue
        first = quantized[node.input[0]]
        given = {each.name: each.i for each in first.attribute}
        zero_point = _zero_point(first)
        dtype = dtypes.get(zero_point) if zero_point else given.get("output_dtype") or _USUAL
        is_same = list(first.input[1:]) == list(node.input[1:]) and _form(first) == _form(node)
        if not is_same or given.get("precision") or dtype not in _INTEGERS:
            continue
        if not zero_point:
            key = f"{first.output[0]}: {dtype}"
            if key not in zeros:
                zeros[key] = names.new(f"{first.output[0]}_zero_point")
                graph.initializer.append(helper.make_tensor(zeros[key], dtype, [], [0]))
            zero_point = zeros[key]
        node.input[:] = [first.input[0], first.input[1], zero_point]
        node.op_type, node.domain = JOINED, "torch_ort"


def _zero_point(node: onnx.NodeProto) -> str:
    return node.input[2] if len(node.input) > 2 else ""


def _form(node: onnx.NodeProto) -> tuple[int, int]:
    """Give axis and size of a block."""
    given = {each.name: each.i for each in node.attribute}
    return given.get("axis", 1), given.get("block_size", 0)
