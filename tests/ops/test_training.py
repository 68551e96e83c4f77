"""YieldOp, and facts that hold for all registered ops."""

from __future__ import annotations

import onnx.defs
import onnx.parser
import pytest
from driver import FACTS

from torch_ort import _C


def yield_types(attributes: str, outputs: str) -> dict:
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        graph (float[N,4] x, int64[N] i, double[2] z) => (float[N,4] y)
        {{
           {outputs} = com.microsoft.YieldOp {attributes} (x, i, z)
           y = Exp (x)
        }}
        """
    )
    graph = _C.Graph.from_onnx(model.SerializeToString())
    _C.infer_types(graph)
    return graph.types()


def test_gradients_have_the_types_of_the_outputs() -> None:
    types = yield_types("<full_shape_outputs = [0]>", "a, b, c")
    assert [types[name][:2] for name in "abc"] == [
        ("float32", ["N", 4]),
        ("int64", ["N"]),
        ("float64", [2]),
    ]


def test_outputs_without_gradient_are_passed_over() -> None:
    types = yield_types("<non_differentiable_outputs = [1]>", "a, c")
    assert [types[name][:2] for name in "ac"] == [("float32", ["N", 4]), ("float64", [2])]


STANDARD = [fact for (domain, _), fact in sorted(FACTS.items()) if not domain]


@pytest.mark.parametrize("fact", STANDARD, ids=lambda fact: fact["name"])
def test_first_opsets_are_those_of_onnx(fact: dict) -> None:
    def takes_bfloat16(opset: int) -> bool:
        schema = onnx.defs.get_schema(fact["name"], opset)
        return any("tensor(bfloat16)" in c.allowed_type_strs for c in schema.type_constraints)

    schema = onnx.defs.get_schema(fact["name"], max(fact["since"], 12))
    assert schema.min_input <= fact["min_inputs"]
    many = schema.max_input > 1000
    newest = onnx.defs.get_schema(fact["name"])
    assert fact["max_inputs"] <= newest.max_input or (many and fact["max_inputs"] == -1)
    if takes_bfloat16(onnx.defs.onnx_opset_version()):
        assert takes_bfloat16(max(fact["bfloat16_since"], fact["since"]))
