"""Operators that are made of others: what they give may be what they were given."""

import onnx
import onnx.parser
import pytest
import torch

from torch_ort import _C

HEAD = '<ir_version: 10, opset_import: ["" : 20, "org.pytorch.aten" : 1]>'
GIVING = {
    "dropout": ('overload_name = "", p = 0.5, train = 0, tensor_args = ["input"]', "float[N,M]"),
    "type_as": ('overload_name = "", tensor_args = ["self", "other"]', "float[N,M]"),
}


def run(text: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model = onnx.parser.parse_model(HEAD + text)
    return _C.run(_C.Graph.from_onnx(model.SerializeToString()), inputs)


@pytest.mark.parametrize("name", GIVING)
def test_the_plan_gives_its_memory_away_only_once(name):
    attributes, shape = GIVING[name]
    operands = "a, a" if name == "type_as" else "a"
    x = torch.randn(64, 64)
    got = run(
        f"""
        given ({shape} x) => ({shape} y, {shape} z)
        {{
            a = Tanh (x)
            b = org.pytorch.aten.ATen <operator = "aten::{name}", {attributes}> ({operands})
            c = Sin (x)
            d = Cos (c)
            y = Add (b, d)
            z = org.pytorch.aten.ATen <operator = "aten::{name}", {attributes}>
                ({operands.replace("a", "x")})
        }}
        """,
        x=x,
    )
    torch.testing.assert_close(got["y"], x.tanh() + x.sin().cos())
    torch.testing.assert_close(got["z"], x)
    assert got["z"].data_ptr() != x.data_ptr()
