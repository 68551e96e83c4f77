"""One node, built, typed, run and compared.

A case names an op, its inputs and the eager PyTorch function that says the same. `check` wants the
same bits as eager, the inferred types equal to the real ones (with symbolic sizes too), a model
that onnx's checker takes, and the numbers of onnx's reference evaluator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import torch

from torch_ort import _C

ELEMENT_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.bool: onnx.TensorProto.BOOL,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
}
# Of the reference evaluator against ours: it computes sums in another order.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 2e-3}
FACTS = {(fact["domain"], fact["name"]): fact for fact in _C.testing.op_facts()}


@dataclasses.dataclass
class Case:
    op: str
    inputs: Sequence[torch.Tensor | None]  # None: left out
    eager: Callable[..., Any]  # takes all inputs that are there; gives a tensor or several
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    known: Sequence[int] = ()  # inputs that are initializers
    dims: dict[int, Sequence[int | str]] = dataclasses.field(
        default_factory=dict
    )  # symbolic shapes
    domain: str = ""
    opset: int = 12  # at least; the op's first one counts too
    half: bool = True  # runs with bfloat16 in place of float32 as well
    reference: bool = True  # the reference evaluator has this form
    outputs: int = 0  # slots of the node; 0: as many as eager gives
    note: str = ""

    def __str__(self) -> str:
        shapes = ",".join(
            "x".join(map(str, x.shape)) or "scalar" for x in self.inputs if x is not None
        )
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        return " ".join(part for part in (self.op, shapes, attrs, self.note) if part)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give normal numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def as_bfloat16(case: Case) -> Case:
    """Give the same case with bfloat16 wherever it has float32."""
    inputs = [
        x.bfloat16() if x is not None and x.dtype == torch.float32 else x for x in case.inputs
    ]
    return dataclasses.replace(case, inputs=inputs)


def to_proto(x: torch.Tensor, name: str) -> onnx.TensorProto:
    if x.dtype == torch.bfloat16:
        raw = x.contiguous().view(torch.int16).numpy().tobytes()
        return onnx.helper.make_tensor(name, ELEMENT_TYPES[x.dtype], x.shape, raw, raw=True)
    return onnx.numpy_helper.from_array(x.numpy(), name)


def required_opset(case: Case) -> int:
    fact = FACTS[case.domain, case.op]
    opset = max(case.opset, 12) if case.domain else max(case.opset, 12, fact["since"])
    if any(x is not None and x.dtype == torch.bfloat16 for x in case.inputs):
        opset = max(opset, fact["bfloat16_since"])
    return opset


def one_node_model(case: Case, num_outputs: int, symbolic: bool = False) -> onnx.ModelProto:
    """Build the model of a case; results have no declared type, so that rules must find it."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    inputs, initializers = [], []
    for i, x in enumerate(case.inputs):
        if x is None:
            continue
        if i in case.known:
            initializers.append(to_proto(x, names[i]))
            continue
        dims = case.dims.get(i, x.shape) if symbolic else x.shape
        inputs.append(onnx.helper.make_tensor_value_info(names[i], ELEMENT_TYPES[x.dtype], dims))
    outputs = [f"y{i}" for i in range(num_outputs)]
    node = onnx.helper.make_node(case.op, names, outputs, domain=case.domain, **case.attrs)
    values = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = onnx.helper.make_graph([node], "one_node", inputs, values, initializers)
    imports = [onnx.helper.make_opsetid("", required_opset(case))]
    if case.domain:
        imports.append(onnx.helper.make_opsetid(case.domain, 1))
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def read(model: onnx.ModelProto) -> _C.Graph:
    graph = _C.Graph.from_onnx(model.SerializeToString())
    _C.infer_types(graph)
    graph.verify("test")
    return graph


def given(case: Case) -> dict[str, torch.Tensor]:
    """Give the inputs that a run is handed, by name."""
    return {f"x{i}": x for i, x in enumerate(case.inputs) if x is not None and i not in case.known}


def assert_inferred(graph: _C.Graph, case: Case, want: Sequence[torch.Tensor]) -> None:
    """Compare inferred types with real ones; symbols take the sizes that the inputs have."""
    types, symbols = graph.types(), {}
    for name, x in given(case).items():
        for dim, size in zip(types[name][1], x.shape, strict=True):
            if isinstance(dim, str):
                symbols[dim] = size
    for i, real in enumerate(want):
        dtype, shape, _, _ = types[f"y{i}"]
        assert dtype == str(real.dtype).removeprefix("torch.")
        assert shape is not None, "the shape is not inferred"
        sizes = [
            _C.testing.dim_evaluate(dim, symbols) if isinstance(dim, str) else dim for dim in shape
        ]
        assert sizes == list(real.shape)


def run(case: Case) -> list[torch.Tensor]:
    """Run a case by itself and give its results, without any comparison."""
    num_outputs = case.outputs or 1
    return list(_C.run(read(one_node_model(case, num_outputs)), given(case)).values())


def reference_numbers(model: onnx.ModelProto, case: Case) -> list[np.ndarray]:
    inputs = {name: x.numpy() for name, x in given(case).items()}
    return onnx.reference.ReferenceEvaluator(model).run(None, inputs)


def check(case: Case) -> None:
    """Run a case and compare it with everything that knows better."""
    present = [x.clone() for x in case.inputs if x is not None]
    want = case.eager(*present)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    model = one_node_model(case, case.outputs or len(want))
    if not case.domain:
        onnx.checker.check_model(
            onnx.shape_inference.infer_shapes(model, strict_mode=True), full_check=True
        )

    for symbolic in (False, True) if case.dims else (False,):
        graph = read(one_node_model(case, case.outputs or len(want), symbolic))
        for products in (True, False):
            results = _C.run(graph, given(case), _C.SessionOptions(products=products))
            got = [results[f"y{i}"] for i in range(len(want))]
            # The engine's products add up in another order; all else has eager's bits.
            is_product = products and case.op in ("MatMul", "MatMulAdd", "Gemm")
            added_up = {} if is_product else {"rtol": 0, "atol": 0}
            for ours, eager in zip(got, want, strict=True):
                assert ours.dtype == eager.dtype
                torch.testing.assert_close(ours, eager, **added_up, equal_nan=True)
        assert_inferred(graph, case, want)

    has_bfloat16 = any(x.dtype == torch.bfloat16 for x in (*present, *want))
    if not case.reference or case.domain or has_bfloat16:
        return
    for ours, theirs in zip(got, reference_numbers(model, case), strict=True):
        tolerance = TOLERANCES.get(ours.dtype, 0)
        torch.testing.assert_close(
            ours, torch.from_numpy(np.array(theirs)), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def with_half(cases: Sequence[Case]) -> list[Case]:
    """Give the cases, and those with floats once more in bfloat16."""
    halves = []
    for case in cases:
        if case.half and any(x is not None and x.dtype == torch.float32 for x in case.inputs):
            halves.append(dataclasses.replace(as_bfloat16(case), note=f"{case.note} bf16".strip()))
    return [*cases, *halves]
