"""Changes to model files: of the graph as ONNX says it, and of its bytes as protobuf says them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

NUMBERS = (
    -(2**63), -(2**31), -7, -2, -1, 0, 1, 2, 3, 4, 5, 6, 18, 1000, 2**20, 2**31, 2**40, 2**62,
    2**63 - 1,
)  # fmt: skip
REALS = (0.0, -1.0, 0.5, 1e-30, 3e38, float("nan"), float("inf"), -float("inf"))
DIMS = (
    "N", "M", "K", "N + 1", "2*N", "N // 0", "N - 9", "N*N*99", "max(N, 0)",
    "9223372036854775807*N",
)  # fmt: skip
DEVICES = ("cpu", "cpu:3", "meta", "cuda:0", "elsewhere")
WORDS = (
    "full", "row", "column", "scalar", "ids", "table", "self", "other", "input", "weight:2", "sum",
    "none", "mean", "tanh", "float32", "int64", "true", "NOTSET", "SAME_UPPER", "VALID", "linear",
    "nearest", "", "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
)  # fmt: skip
OPERATORS = (
    "aten::abs", "aten::add.Tensor", "aten::cat", "aten::t", "aten::view", "aten::as_strided",
    "aten::expand", "aten::select.int", "aten::sum.dim_IntList", "aten::native_layer_norm",
    "aten::native_layer_norm_backward", "aten::_softmax", "aten::_softmax_backward_data",
    "aten::embedding", "aten::embedding_dense_backward", "aten::convolution_backward",
    "aten::index.Tensor", "aten::gather", "aten::scatter_add", "aten::max_pool2d_with_indices",
    "aten::max_pool2d_with_indices_backward", "aten::nll_loss_forward", "aten::nll_loss_backward",
    "aten::native_group_norm", "aten::split.Tensor", "aten::_to_copy", "aten::empty_like",
    "aten::zeros", "aten::arange", "aten::topk", "aten::sort", "aten::bmm", "aten::copy_",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::native_batch_norm_backward",
    "aten::_native_batch_norm_legit_functional", "aten::native_dropout", "aten::where.self",
)  # fmt: skip

Mutation = Callable[[onnx.ModelProto, random.Random], None]


# ---- what a graph holds


def all_graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Give the graph and the bodies in it."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph, *(found for body in inner for found in all_graphs(body))]


def all_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for graph in all_graphs(model.graph) for node in graph.node]


def all_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [
        value
        for graph in all_graphs(model.graph)
        for value in (*graph.value_info, *graph.input, *graph.output)
    ]


def all_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    found = [tensor for graph in all_graphs(model.graph) for tensor in graph.initializer]
    return found + [a.t for node in all_nodes(model) for a in node.attribute if a.HasField("t")]


def all_names(graph: onnx.GraphProto) -> list[str]:
    names = [value.name for value in graph.input] + [each.name for each in graph.initializer]
    return names + [name for node in graph.node for name in node.output if name]


def any_dim(rng: random.Random) -> int | str:
    return rng.choice((rng.choice(NUMBERS), rng.randrange(8), rng.choice(DIMS)))


# ---- types


def set_metadata(message: onnx.ValueInfoProto, key: str, text: str) -> None:
    kept = [entry for entry in message.metadata_props if entry.key != key]
    del message.metadata_props[:]
    message.metadata_props.extend(kept)
    message.metadata_props.add(key=key, value=text)


def change_strides(model: onnx.ModelProto, rng: random.Random) -> None:
    value = rng.choice(all_values(model))
    rank = len(value.type.tensor_type.shape.dim) + (rng.random() < 0.1)
    strides = ",".join(str(any_dim(rng)) for _ in range(rank))
    set_metadata(value, "strides", f"[{strides}]")


def change_shape(model: onnx.ModelProto, rng: random.Random) -> None:
    dims = rng.choice(all_values(model)).type.tensor_type.shape.dim
    if not dims or rng.random() < 0.1:
        dims.add(dim_value=rng.randrange(4))
    elif rng.random() < 0.1:
        del dims[rng.randrange(len(dims))]
    else:
        dim, new = rng.choice(dims), any_dim(rng)
        dim.Clear()
        if isinstance(new, int):
            dim.dim_value = new
        else:
            dim.dim_param = new


def change_dtype(model: onnx.ModelProto, rng: random.Random) -> None:
    value = rng.choice(all_values(model))
    value.type.tensor_type.elem_type = rng.randrange(TensorProto.BFLOAT16 + 8)


def change_device(model: onnx.ModelProto, rng: random.Random) -> None:
    set_metadata(rng.choice(all_values(model)), "device", rng.choice(DEVICES))


def forget_type(model: onnx.ModelProto, rng: random.Random) -> None:
    tensor = rng.choice(all_values(model)).type.tensor_type
    tensor.ClearField(rng.choice(("shape", "elem_type")))


def forget_all_types(model: onnx.ModelProto, rng: random.Random) -> None:
    for graph in all_graphs(model.graph):
        del graph.value_info[:]
        for value in graph.output if rng.random() < 0.5 else ():
            value.ClearField("type")


def name_symbol(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.metadata_props.add(key="symbol_inputs", value=rng.choice(("N", "K", "N,M", "N+1")))


# ---- nodes


def change_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    attributes = [a for node in all_nodes(model) for a in node.attribute if a.name != "operator"]
    if not attributes:
        return
    chosen = rng.choice(attributes)
    if rng.random() < 0.2:
        number, name = rng.choice(NUMBERS), chosen.name
        others = (number, 0.5, "x", [number], [0.5, 2.0], ["full"], [1] * 9)
        chosen.CopyFrom(onnx.helper.make_attribute(name, rng.choice(others)))
    elif chosen.ints:
        at = rng.randrange(len(chosen.ints))
        if rng.random() < 0.3:
            del chosen.ints[at]
        elif rng.random() < 0.3:
            chosen.ints.insert(at, rng.choice(NUMBERS))
        else:
            chosen.ints[at] = rng.choice(NUMBERS)
    elif chosen.strings:
        at = rng.randrange(len(chosen.strings))
        if rng.random() < 0.2:
            del chosen.strings[at]
        else:
            chosen.strings[at] = rng.choice((*WORDS, *DIMS)).encode()
    elif chosen.HasField("s"):
        chosen.s = rng.choice((*WORDS, *DIMS)).encode()
    elif chosen.HasField("f"):
        chosen.f = rng.choice(REALS)
    elif chosen.HasField("i"):
        chosen.i = rng.choice(NUMBERS)


def drop_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(all_nodes(model))
    if node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def add_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """Give a node an attribute that another one has, or one that other ops have."""
    node = rng.choice(all_nodes(model))
    known = {a.name for a in node.attribute}
    others = [a for other in all_nodes(model) for a in other.attribute if a.name not in known]
    names = ("axis", "start", "end", "group", "perm", "pads", "to", "keepdims", "value", "seed")
    name = rng.choice(names)
    if others and rng.random() < 0.5:
        copy = onnx.AttributeProto()
        copy.CopyFrom(rng.choice(others))
        node.attribute.append(copy)
    elif name not in known:
        number = rng.choice(NUMBERS)
        node.attribute.append(
            onnx.helper.make_attribute(name, rng.choice((number, [number], [number, 1], 0.5)))
        )


def rewire(model: onnx.ModelProto, rng: random.Random) -> None:
    """Let a node read another value: another root for its views, another order, or none."""
    graph = rng.choice(all_graphs(model.graph))
    nodes = [node for node in graph.node if node.input]
    if not nodes:
        return
    node = rng.choice(nodes)
    if rng.random() < 0.1:
        node.input.pop()
    elif rng.random() < 0.1:
        node.input.append(rng.choice([*all_names(graph), ""]))
    else:
        node.input[rng.randrange(len(node.input))] = rng.choice([*all_names(graph), "", ""])


def change_outputs(model: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(all_nodes(model))
    if node.output and rng.random() < 0.4:
        node.output[rng.randrange(len(node.output))] = ""
    elif node.output and rng.random() < 0.3:
        node.output.pop()
    else:
        node.output.append(f"more_{rng.randrange(100)}")


def swap_op(model: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(all_nodes(model))
    if node.domain == "org.pytorch.aten":
        name, _, overload = rng.choice(OPERATORS).partition(".")
        for attribute in node.attribute:
            if attribute.name in ("operator", "overload_name"):
                attribute.s = (name if attribute.name == "operator" else overload).encode()
        return
    other = rng.choice(all_nodes(model))
    names = [schema.name for schema in onnx.defs.get_all_schemas()]
    node.domain, node.op_type = rng.choice(
        ((other.domain, other.op_type), ("", rng.choice(names)), ("torch_ort", node.op_type))
    )


def swap_nodes(model: onnx.ModelProto, rng: random.Random) -> None:
    nodes = rng.choice(all_graphs(model.graph)).node
    if len(nodes) > 1:
        a, b = rng.sample(range(len(nodes)), 2)
        first = onnx.NodeProto()
        first.CopyFrom(nodes[a])
        nodes[a].CopyFrom(nodes[b])
        nodes[b].CopyFrom(first)


def drop_node(model: onnx.ModelProto, rng: random.Random) -> None:
    nodes = rng.choice(all_graphs(model.graph)).node
    if nodes:
        del nodes[rng.randrange(len(nodes))]


def duplicate_node(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = rng.choice(all_graphs(model.graph))
    if graph.node:
        copy = graph.node.add()
        copy.CopyFrom(rng.choice(graph.node))
        for i, name in enumerate(copy.output):
            copy.output[i] = f"{name}_again" if rng.random() < 0.9 else name
        graph.output.add(name=copy.output[0] if copy.output else "x")


def change_ends(model: onnx.ModelProto, rng: random.Random) -> None:
    """Add or drop an input or an output of a graph."""
    graph = rng.choice(all_graphs(model.graph))
    ends = rng.choice((graph.input, graph.output))
    if ends and rng.random() < 0.5:
        del ends[rng.randrange(len(ends))]
    elif names := all_names(graph):
        ends.add(name=rng.choice(names))


def change_opset(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((0, 1, 7, 11, 13, 18, 23, 28, 1000))


# ---- tensors


def change_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    tensors = all_tensors(model)
    if not tensors:
        return
    tensor = rng.choice(tensors)
    try:
        values = onnx.numpy_helper.to_array(tensor).copy()
    except Exception:  # an earlier change has broken it
        return
    if values.size == 0 or values.dtype.kind not in "iuf" or rng.random() < 0.3:
        shape = [rng.choice((0, 1, 2, 3, 8)) for _ in range(rng.randrange(4))]
        values = np.resize(values, shape) if values.size else np.zeros(shape, values.dtype)
    else:
        number = rng.choice(NUMBERS if values.dtype.kind != "f" else REALS)
        values.flat[rng.randrange(values.size)] = np.array(number).astype(values.dtype)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def change_tensor(model: onnx.ModelProto, rng: random.Random) -> None:
    """Say something else of the bytes of a tensor: other sizes, another dtype, fewer bytes."""
    tensors = all_tensors(model)
    if not tensors:
        return
    tensor = rng.choice(tensors)
    what = rng.randrange(4)
    if what == 0:
        tensor.dims.append(rng.choice(NUMBERS))
    elif what == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif what == 2:
        tensor.data_type = rng.randrange(25)
    else:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]


def move_outside(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put the bytes of a tensor beside the model, where they may be cut off."""
    tensors = [tensor for tensor in model.graph.initializer if tensor.raw_data]
    if not tensors:
        return
    tensor = rng.choice(tensors)
    length = len(tensor.raw_data)
    entries = {
        "location": rng.choice(("data", "data", "data", "../data", "/etc/passwd", "", "data/")),
        "offset": str(rng.choice((0, 0, 0, 1, 4096, *NUMBERS))),
        "length": str(rng.choice((length, length, length, *NUMBERS))),
    }
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


ON_GRAPHS: tuple[Mutation, ...] = (
    change_strides, change_strides, change_shape, change_shape, change_dtype, change_device,
    forget_type, forget_all_types, name_symbol, change_attribute, change_attribute, drop_attribute,
    add_attribute, rewire, rewire, change_outputs, swap_op, swap_nodes, drop_node, duplicate_node,
    change_ends, change_opset, change_initializer, change_initializer, change_tensor, move_outside,
)  # fmt: skip


# ---- bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Give a number and the position behind it. Raises IndexError at the end of the data."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            return number & (2**64 - 1), at


def _to_varint(number: int) -> bytes:
    number &= 2**64 - 1
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


Field = tuple[int, int, int | bytes]  # number, wire type, content


def _fields(data: bytes) -> list[Field] | None:
    """Take a message apart; None if the bytes are none."""
    fields, at = [], 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            if kind == 0:
                content, at = _varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                content, at = data[at : at + size], at + size
            elif kind == 2:
                size, at = _varint(data, at)
                content, at = data[at : at + size], at + size
                if len(content) < size:
                    return None
            else:
                return None
            if number == 0:
                return None
            fields.append((number, kind, content))
    except IndexError:
        return None
    return fields


def _join(fields: list[Field]) -> bytes:
    parts = []
    for number, kind, content in fields:
        parts.append(_to_varint(number << 3 | kind))
        if kind == 0:
            parts.append(_to_varint(content))
        else:
            parts.append((_to_varint(len(content)) if kind == 2 else b"") + content)
    return b"".join(parts)


def _change_fields(data: bytes, rng: random.Random) -> bytes:
    """Change one field of a message, or of a message in it; lengths stay right."""
    fields = _fields(data)
    if not fields:
        return _change_plain(data, rng)
    at = rng.randrange(len(fields))
    number, kind, content = fields[at]
    if kind == 2 and rng.random() < 0.8:
        fields[at] = number, kind, _change_fields(content, rng)
        return _join(fields)
    what = rng.randrange(5)
    if what == 0:
        del fields[at]
    elif what == 1:
        fields.insert(rng.randrange(len(fields) + 1), fields[at])
    elif what == 2:
        fields[at] = rng.randrange(1, 30), kind, content
    elif kind == 0:
        fields[at] = number, kind, rng.choice((content + 1, content - 1, *NUMBERS))
    else:
        fields[at] = number, 2, _change_plain(bytes(content), rng)
    return _join(fields)


def _change_plain(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.choice((b"", b"\0", b"\xff", b"x", rng.randbytes(8)))
    changed = bytearray(data)
    what = rng.randrange(4)
    if what == 0:
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif what == 1:
        del changed[rng.randrange(len(changed)) :]
    elif what == 2:
        at = rng.randrange(len(changed))
        changed[at:at] = changed[at : at + rng.randrange(1, 9)]
    else:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    change = _change_plain if rng.random() < 0.2 else _change_fields
    return change(data, rng)
