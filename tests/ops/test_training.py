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


KINDS = {
    "INT": "an integer", "INTS": "a list of integers", "FLOAT": "a float",
    "FLOATS": "a list of floats", "STRING": "a string", "STRINGS": "a list of strings",
    "TENSOR": "a tensor", "GRAPH": "a graph",
}  # fmt: skip


@pytest.mark.parametrize("fact", STANDARD, ids=lambda fact: fact["name"])
def test_attributes_are_those_of_onnx(fact: dict) -> None:
    first = onnx.defs.get_schema(fact["name"], max(fact["since"], 12)).since_version
    schemas = [
        schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if (schema.name, schema.domain) == (fact["name"], "") and schema.since_version >= first
    ]
    kinds = {a.name: a.type.name for schema in schemas for a in schema.attributes.values()}
    kinds.pop("sparse_value", None)  # of Constant: the format of the engine has no such tensors
    ours = {name: kind for name, kind, _ in fact["attributes"]}
    assert ours == {name: KINDS[kind] for name, kind in kinds.items()}
    required = {name for name, _, is_required in fact["attributes"] if is_required}
    assert required <= {a.name for a in schemas[0].attributes.values() if a.required}
