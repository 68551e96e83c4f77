"""Graphs of a few nodes, run as they are and as one fused region.

Nodes are written in ONNX's text; the sizes of a region are in its inputs.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx.parser
import pytest
import torch

from torch_ort import _C
from torch_ort.engine import cuda

# What regions are compiled for: instruction sets of the CPU, or the GPU alone (conftest.py).
ISAS = _C.isa_names()
# What there are kernels for, on such a processor.
BUILT_ISAS = ["portable", *(["neon"] if platform.machine() == "aarch64" else ["avx2", "avx512"])]
CUDA = "cuda"
# Bytes of the first-level and second-level caches, which the ways to divide products depend on.
CACHES = {"narrow": (32 << 10, 1 << 20), "wide": (48 << 10, 2 << 20)}
# A test of all that ISAS names, which -m cuda runs on a GPU.
also_on_cuda = pytest.mark.also_on_cuda
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Relative to the numbers that eager PyTorch gives in float64: a few units in the last place.
# Of short floats a unit in the last place: of a number that lies half-way between two, the last bit
# of the float32 in which it was computed decides which of them it is rounded to.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.float64: 1e-14,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}
NAMES = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16",
    torch.float16: "float16", torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8",
    torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
}  # fmt: skip
HEAD = (
    '<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1, "org.pytorch.aten" : 1, '
    '"torch_ort" : 1]>'
)


def crossed(**values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize by all combinations that have the last value of the first name, and by pairs.

    The first is the instruction set, or whatever decides least of what the others do: with each of
    its other values, each value of each name meets each value of each other name.
    """
    lists = [list(each) for each in values.values()]
    cases = [case for case in itertools.product(*lists) if case[0] == lists[0][-1]]
    cases += pairs([lists[0][:-1], *lists[1:]])
    params = [pytest.param(*case, id="-".join(map(str, case))) for case in cases]
    return pytest.mark.parametrize(tuple(values), params)


def pairs(lists: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Choose few combinations in which all values of two lists meet, for any two lists."""
    whole = list(itertools.product(*map(enumerate, lists)))
    meetings = [
        set(itertools.combinations(list(enumerate(i for i, _ in case)), 2)) for case in whole
    ]
    left, chosen = set().union(*meetings), []
    while left:
        best = max(range(len(whole)), key=lambda at: len(meetings[at] & left))
        left -= meetings[best]
        chosen.append(tuple(value for _, value in whole[best]))
    return chosen


def type_text(dtype: torch.dtype, shape: Sequence[int | str]) -> str:
    return f"{NAMES[dtype]}[{','.join(str(dim) for dim in shape)}]" if shape else NAMES[dtype]


def aten(operator: str, *operands: str, names: Sequence[str], attrs: str = "") -> str:
    """Write an ATen node; `names` are those of its tensor arguments."""
    tensor_args = ", ".join(f'"{name}"' for name in names)
    more = f", {attrs}" if attrs else ""
    return (
        f'org.pytorch.aten.ATen <operator = "{operator}", overload_name = "", '
        f"tensor_args = [{tensor_args}]{more}> ({', '.join(operands)})"
    )


def read(
    inputs: Mapping[str, str],
    nodes: Sequence[str],
    outputs: Sequence[str],
    constants: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
    strides: Mapping[str, str] | None = None,
) -> _C.Graph:
    """Read a graph: types of inputs by name, nodes, outputs, initializers.

    `types`: of values whose node has no rule. `strides`: that results promise, by name; rules know
    of none, so `types` must then tell all types.
    """
    signature = ", ".join(f"{text} {name}" for name, text in inputs.items())
    known = dict(types or {})
    results = ", ".join(f"{known.pop(name, 'float')} {name}" for name in outputs)
    inner = ", ".join([*constants, *(f"{text} {name}" for name, text in known.items())])
    body = "\n".join(nodes)
    text = f"{HEAD} g ({signature}) => ({results}) {f'<{inner}>' if inner else ''} {{ {body} }}"
    model = onnx.parser.parse_model(text)
    for value in model.graph.output:
        if value.name not in (types or {}):
            value.ClearField("type")
        if strides and value.name in strides:
            value.metadata_props.add(key="strides", value=strides[value.name])
    graph = _C.Graph.from_onnx(model.SerializeToString())
    if not strides:
        _C.infer_types(graph)
    return graph


def ops(graph: _C.Graph) -> list[str]:
    return [node["op"] for node in graph.nodes()]


def fuse(graph: _C.Graph) -> _C.Graph:
    fused = graph.clone()
    _C.run_pass("fuse_regions", fused)
    fused.verify("test")
    return fused


def fused(graph: _C.Graph) -> _C.Graph:
    """Give the graph with all its nodes in one region."""
    result = fuse(graph)
    assert ops(result) == ["Region"], ops(result)
    return result


def on_cuda(graph: _C.Graph) -> _C.Graph:
    """Give the same graph with all its values on the current GPU."""
    model = onnx.load_from_string(graph.to_onnx(_C.required_opset(graph)))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.metadata_props.add(key="device", value="cuda:0")
    return _C.Graph.from_onnx(model.SerializeToString())


class Compiled:
    """A graph for an instruction set, or for the GPU; tensors of the CPU come and go."""

    def __init__(self, graph: _C.Graph, isa: str = "", **settings) -> None:
        self.is_on_cuda = isa == CUDA
        if self.is_on_cuda:
            cuda.configure()
            graph, isa = on_cuda(graph), ""
        self.session = _C.Session.compile(graph, {}, _C.SessionOptions(isa=isa, **settings))

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.is_on_cuda:
            return self.session.run(dict(inputs))
        results = self.session.run({name: to_cuda(x) for name, x in inputs.items()})
        torch.cuda.synchronize()
        return {name: x.cpu() for name, x in results.items()}


def to_cuda(x: torch.Tensor) -> torch.Tensor:
    """Give a copy on the GPU with the strides of the tensor."""
    extent = 1 + sum((size - 1) * step for size, step in zip(x.size(), x.stride(), strict=True))
    memory = x.as_strided((extent if x.numel() else 0,), (1,))
    return memory.to(CUDA).as_strided(x.size(), x.stride())


def run_by_name(
    graph: _C.Graph, inputs: Mapping[str, torch.Tensor], isa: str = "", **settings
) -> dict[str, torch.Tensor]:
    return Compiled(graph, isa, **settings).run(inputs)


def run(graph: _C.Graph, inputs: Mapping[str, torch.Tensor], isa: str = "") -> list[torch.Tensor]:
    return list(run_by_name(graph, inputs, isa).values())


def program(graph: _C.Graph, inputs: Mapping[str, torch.Tensor], isa: str = "") -> str:
    """Run a graph with one region and give its tile program as text."""
    compiled = _C.Session.compile(graph, {}, _C.SessionOptions(isa=isa))
    compiled.run(dict(inputs))
    ((_, text),) = compiled.programs()
    return text


def assert_near(
    got: torch.Tensor, want: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> None:
    """Compare with a result in float64; other kinds must be equal."""
    if not got.is_floating_point():
        torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=0)
        return
    rtol = TOLERANCE[got.dtype] if rtol is None else rtol
    atol = rtol if atol is None else atol
    torch.testing.assert_close(
        got.double(), want.to(got.dtype).double(), rtol=rtol, atol=atol, equal_nan=True
    )
