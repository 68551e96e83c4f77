"""Runs graphs whose files say something wrong; a program of its own, because a crash would end it.

python mutate_files.py FIRST COUNT runs COUNT seeds from FIRST on, and prints each before it runs.
"""

from __future__ import annotations

import pathlib
import random
import resource
import sys
from collections.abc import Callable

import onnx
import onnx.parser
import torch
from onnx import TensorProto

from torch_ort import _C

HEAD = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1]>'
VIEWS = """
    views (float[N,6] x, float[6,4] w, int64[N] label) => (float[M,2] y, float[] loss)
    <int64[2] target = {-1, 2}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] one = {1}>
    {
        a = MatMul (x, w)
        b = Transpose <perm = [1, 0]> (a)
        c = Slice (b, zero, two, zero)
        d = Tanh (c)
        e = Reshape (c, target)
        f = Reshape (d, target)
        y = Add (e, f)
        g, h = Split <axis = 1, num_outputs = 2> (a)
        i = Unsqueeze (g, one)
        j = Squeeze (i, one)
        k = Softmax <axis = -1> (j)
        l = Gather <axis = 0> (k, label)
        m = Concat <axis = 1> (l, h)
        n = ReduceMean <keepdims = 0> (m)
        o = org.pytorch.aten.ATen <operator = "aten::erfc", overload_name = "",
                                   tensor_args = ["self"]> (n)
        loss = Identity (o)
    }
"""
TRAINING = """
    training (float[N,6] x, float[6] w) => (float[N,6] dx, float[6] dw)
    <int64[1] zero = {0}, int64[2] back = {-1, 6}, int64[1] flat = {-1}>
    {
        a = Mul (x, w)
        b = Sigmoid (a)
        c = Transpose <perm = [1, 0]> (b)
        s = ReduceSum <keepdims = 1> (b, zero)
        y = Reshape (c, flat)
        dy, ds = com.microsoft.YieldOp (y, s)
        t = Reshape (dy, back)
        u = Add (t, ds)
        v = Mul (u, b)
        z = Mul (c, c)
        q = Transpose <perm = [1, 0]> (z)
        dx = Add (v, q)
        p = Mul (v, x)
        dw = ReduceSum <keepdims = 0> (p, zero)
    }
"""
SIZES = """
    sizes (float[N,8] x, int64 count) => (float[A,B] y, int64[K] z, float[C,8] v)
    <int64[1] zero = {0}, int64[1] two = {2}, int64[1] rest = {-1},
     int64 one = {1}, int64 nil = {0}>
    {
        shape = Shape (x)
        rows = Gather (shape, zero)
        odd = Mod (rows, two)
        even = Sub (rows, odd)
        half = Div (even, two)
        target = Concat <axis = 0> (half, rest)
        a = Tanh (x)
        y = Reshape (a, target)
        numbers = Range (nil, count, one)
        z = Neg (numbers)
        wide = Unsqueeze (count, zero)
        eight = Mul (two, wide)
        b = ReduceSum <keepdims = 1> (a, zero)
        both = Concat <axis = 0> (wide, eight)
        v = Expand (b, both)
    }
"""
BRANCHES = """
    branches (int64 m, float[N,4] x, float[4] w) => (float[N,4] y, float[A,4] v, float[K,N] sums)
    <float half = {0.5}, float zero = {0}, int64[1] last = {1}>
    {
        a = Tanh (x)
        y, v, sums = Loop (m, , a, x) <
            body = body (int64 i, bool go, float[N,4] b, float[B,4] c)
                => (bool on, float[N,4] next, float[C,4] more, float[N] sum) {
                on = Identity (go)
                sum = ReduceSum <keepdims = 0> (b, last)
                total = ReduceSum <keepdims = 0> (sum)
                up = Greater (total, zero)
                next = If (up) <
                    then_branch = t () => (float[N,4] d) { e = Mul (b, half)  d = Sub (e, a) },
                    else_branch = f () => (float[N,4] g) { h = Exp (b)  g = Mul (h, w) }
                >
                more = Concat <axis = 0> (c, next)
            }
        >
    }
"""
INPUTS = {
    "branches": {"m": 3, "x": (2, 4), "w": (4,)},
    "sizes": {"x": (4, 8), "count": 4},
    "views": {"x": (3, 6), "w": (6, 4), "label": [0, 2, 1]},
    "training": {"x": (3, 6), "w": (6,), "dy": (18,), "ds": (1, 6)},
}
NUMBERS = (
    -(2**63),
    -(2**31),
    -7,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    6,
    18,
    1000,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
)
DIMS = (
    "N",
    "M",
    "K",
    "N + 1",
    "2*N",
    "N // 0",
    "N - 9",
    "N*N*99",
    "max(N, 0)",
    "9223372036854775807*N",
)
DEVICES = ("cpu", "cpu:3", "meta", "cuda:0", "elsewhere")

Mutation = Callable[[onnx.ModelProto, random.Random], None]


def base_models() -> list[onnx.ModelProto]:
    """All graphs with the types of all values, as they are and after the passes."""
    models = []
    for text in (VIEWS, TRAINING, SIZES, BRANCHES):
        read = onnx.parser.parse_model(HEAD + text)
        for passes in (
            ("replay_views",),
            ("close_bodies", "replay_views", "expand_composites", "fuse_regions"),
        ):
            graph = _C.Graph.from_onnx(read.SerializeToString())
            _C.infer_types(graph)
            for name in passes:
                _C.run_pass(name, graph)
            models.append(onnx.load_model_from_string(graph.to_onnx()))
    return models


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Give the inputs that the unchanged graph runs with."""
    torch.manual_seed(0)
    return {
        key: torch.randn(sizes) if isinstance(sizes, tuple) else torch.tensor(sizes)
        for key, sizes in INPUTS[name].items()
    }


def any_value(model: onnx.ModelProto, rng: random.Random) -> onnx.ValueInfoProto:
    graphs = all_graphs(model.graph)
    return rng.choice(
        [x for graph in graphs for x in (*graph.value_info, *graph.input, *graph.output)]
    )


def any_dim(rng: random.Random) -> int | str:
    return rng.choice((rng.choice(NUMBERS), rng.randrange(8), rng.choice(DIMS)))


def set_metadata(message: onnx.ValueInfoProto, key: str, text: str) -> None:
    kept = [entry for entry in message.metadata_props if entry.key != key]
    del message.metadata_props[:]
    message.metadata_props.extend(kept)
    message.metadata_props.add(key=key, value=text)


def change_strides(model: onnx.ModelProto, rng: random.Random) -> None:
    value = any_value(model, rng)
    rank = len(value.type.tensor_type.shape.dim) + (rng.random() < 0.1)
    strides = ",".join(str(any_dim(rng)) for _ in range(rank))
    set_metadata(value, "strides", f"[{strides}]")


def change_shape(model: onnx.ModelProto, rng: random.Random) -> None:
    dims = any_value(model, rng).type.tensor_type.shape.dim
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
    any_value(model, rng).type.tensor_type.elem_type = rng.randrange(TensorProto.BFLOAT16 + 2)


def change_device(model: onnx.ModelProto, rng: random.Random) -> None:
    set_metadata(any_value(model, rng), "device", rng.choice(DEVICES))


def forget_type(model: onnx.ModelProto, rng: random.Random) -> None:
    tensor = any_value(model, rng).type.tensor_type
    tensor.ClearField(rng.choice(("shape", "elem_type")))


def all_graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Give the graph and the bodies in it."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph, *(found for body in inner for found in all_graphs(body))]


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Nodes of the graph and of the bodies in it."""
    return [node for found in all_graphs(graph) for node in found.node]


def change_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    attributes = [
        a for node in all_nodes(model.graph) for a in node.attribute if a.name != "operator"
    ]
    if not attributes:
        return
    chosen = rng.choice(attributes)
    if rng.random() < 0.1:
        number, name = rng.choice(NUMBERS), chosen.name
        chosen.CopyFrom(onnx.helper.make_attribute(name, rng.choice((number, 0.5, "x", [number]))))
    elif chosen.ints:
        chosen.ints[rng.randrange(len(chosen.ints))] = rng.choice(NUMBERS)
    elif chosen.strings:
        words = ("full", "row", "column", "scalar", "self", "other", *DIMS)
        chosen.strings[rng.randrange(len(chosen.strings))] = rng.choice(words).encode()
    elif chosen.HasField("s"):
        chosen.s = rng.choice(DIMS).encode()
    elif chosen.HasField("f"):
        chosen.f = rng.choice((0.0, -1.0, float("nan"), float("inf")))
    elif chosen.HasField("i"):
        chosen.i = rng.choice(NUMBERS)


def rewire(model: onnx.ModelProto, rng: random.Random) -> None:
    """Let a node read another value: another root for its views, another order, or none."""
    names = [value.name for value in (*model.graph.value_info, *model.graph.input)]
    names += [tensor.name for tensor in model.graph.initializer] + [""]
    node = rng.choice([node for node in all_nodes(model.graph) if node.input])
    if rng.random() < 0.1:
        node.input.pop()
    else:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def change_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    values = onnx.numpy_helper.to_array(tensor).copy()
    if values.size == 0 or values.dtype.kind != "i":
        return
    values.flat[rng.randrange(values.size)] = rng.choice(NUMBERS)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def name_symbol(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.metadata_props.add(key="symbol_inputs", value=rng.choice(("N", "K", "N,M")))


MUTATIONS: tuple[Mutation, ...] = (
    change_strides,
    change_strides,
    change_shape,
    change_shape,
    change_dtype,
    change_device,
    forget_type,
    change_attribute,
    change_attribute,
    rewire,
    change_initializer,
    name_symbol,
)


def run(seed: int, models: list[onnx.ModelProto]) -> str:
    """Run one changed graph; tell what came of it."""
    rng = random.Random(seed)
    model = onnx.ModelProto()
    model.CopyFrom(rng.choice(models))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(MUTATIONS)(model, rng)
    try:
        graph = _C.Graph.from_onnx(model.SerializeToString())
        given = inputs_of(model.graph.name) | {"N": torch.tensor(3), "M": torch.tensor(3)}
        results = _C.run(graph, given)
        for result in results.values():
            result.sum() if result.is_floating_point() else result.clone()
    except Exception as error:  # which one is for the caller to judge
        return f"{type(error).__name__}: {error}"
    return "works"


def limit_memory(more: int) -> None:
    """Let sizes that are large but possible fail at once."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    first, count = map(int, sys.argv[1:])
    models = base_models()
    for model in models:
        _C.run(_C.Graph.from_onnx(model.SerializeToString()), inputs_of(model.graph.name))
    limit_memory(2**30)
    for seed in range(first, first + count):
        print(seed, flush=True, end=" ")
        print(run(seed, models).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
