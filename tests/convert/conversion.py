"""Functions converted by the table of rows, run, and compared with eager.

Dynamo is left out: a function is traced to ATen calls, read, and run as it stands. `check` wants
the expected ops, eager's bits, a model that onnx's checker takes, and onnxruntime's numbers where
every node is standard; at every pinned opset.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnxruntime
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ort import _C
from torch_ort.read.fx_reader import FxReader

NEWEST = onnx.defs.onnx_opset_version()
PINS = (12, 14, 17, 20, NEWEST)


def convert(
    function: Callable[..., Any], *inputs: torch.Tensor, opset: int = NEWEST, dynamic: bool = False
) -> _C.Graph:
    """Trace a function of tensors and convert its calls; sizes are symbols if `dynamic`."""
    mode = "symbolic" if dynamic else "fake"

    # The tracer would give values to arguments that have defaults.
    def traced(*given: torch.Tensor) -> Any:
        return function(*given)

    module = make_fx(torch.func.functionalize(traced), tracing_mode=mode)(*inputs)
    module.graph.eliminate_dead_code()
    reader = FxReader(module, "converted", opset)
    nodes = list(module.graph.nodes)
    inner = [node for node in nodes if node.op not in ("placeholder", "output")]
    reader.add_placeholders(node for node in nodes if node.op == "placeholder")
    reader.add_nodes(inner)
    results = nodes[-1].args[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    reader.reader.set_outputs([reader.value_name(node) for node in results])
    graph = reader.reader.take()
    graph.verify("test")
    return graph


def ops_of(graph: _C.Graph) -> list[str]:
    """Name the ops in order: "Conv", "aten::gelu_backward"; sizes as values are left out."""
    names = []
    for node in graph.nodes():
        if node["op"] == "ATen":
            names.append(node["attrs"]["operator"])
        elif node["op"] != "Dims":
            names.append(node["op"])
    return names


def run(graph: _C.Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    given = dict(zip(graph.input_names, inputs, strict=True))
    results = _C.run(
        graph, given, _C.SessionOptions(products=False)
    )  # which leaves eager's own bits
    return [results[name] for name in graph.output_names]


def model_of(graph: _C.Graph) -> onnx.ModelProto:
    return onnx.load_model_from_string(graph.to_onnx(opset=_C.required_opset(graph)))


def assert_onnx_agrees(graph: _C.Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Check a graph of standard nodes with onnx and run it in onnxruntime."""
    model = model_of(graph)
    onnx.checker.check_model(model, full_check=True)
    if any(x.dtype in (torch.bfloat16, torch.float16) for x in inputs):
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {name: x.numpy() for name, x in zip(graph.input_names, inputs, strict=True)}
    theirs = session.run(None, given)
    for ours, other in zip(run(graph, inputs), theirs, strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(np.asarray(other)), rtol=1e-4, atol=1e-5)


def check(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    ops: Sequence[str] | dict[int, Sequence[str]],
    dynamic: bool = False,
    pins: Sequence[int] = PINS,
    runtime: bool = True,
) -> _C.Graph:
    """Convert at every pin and compare.

    `ops` are the expected ones, or those by pin: the entry of the largest key up to the pin counts.
    `runtime`: onnxruntime has kernels for the graph. Give the graph of the last pin.
    """
    want = function(*inputs)
    want = want if isinstance(want, (list, tuple)) else [want]
    expected = ops if isinstance(ops, dict) else {0: ops}
    for pin in pins:
        graph = convert(function, *inputs, opset=pin, dynamic=dynamic)
        names = ops_of(graph)
        assert names == list(expected[max(key for key in expected if key <= pin)]), (
            f"opset {pin}:\n{text_of(graph)}"
        )
        assert _C.required_opset(graph) <= pin
        for got, eager in zip(run(graph, inputs), want, strict=True):
            assert got.dtype == eager.dtype
            torch.testing.assert_close(got, eager, rtol=0, atol=0, equal_nan=True)
            assert got.stride() == eager.stride()
        is_standard = not any(node["domain"] for node in graph.nodes())
        if is_standard and runtime:
            assert_onnx_agrees(graph, inputs)
        elif not any("aten::" in name for name in names):
            onnx.checker.check_model(model_of(graph))
    return graph


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give normal numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def text_of(graph: _C.Graph) -> str:
    """Print a graph, for messages of failing tests."""
    stream = io.StringIO()
    for node in graph.nodes():
        print(node["outputs"], node["op"], node["inputs"], node["attrs"], file=stream)
    return stream.getvalue()
