"""Complex numbers of Python as arguments of operators, in graphs and in files."""

from __future__ import annotations

import onnx.parser
import pytest
import torch
import torch.nn.functional as F

import torch_ort
from tests.roads import ROADS, Applies
from torch_ort import _C

pytestmark = pytest.mark.ort_only

INFINITE = complex(float("inf"), -2.0)
FUNCTIONS = {
    "product": lambda x: x * 2j,
    "product of reals": lambda x: x.real * (1.5 - 0.25j),
    "power": lambda x: x ** (0.5 + 1e-3j),
    "power of a number": lambda x: (2 - 1e-7j) ** x,
    "sum with a factor": lambda x: torch.add(x, x.conj(), alpha=-0.5j),
    "tensor full of a number": lambda x: torch.full_like(x, 1 - 2j) * x,
    "fill": lambda x: x.clone().fill_(INFINITE),
    "masked fill": lambda x: x.masked_fill(x.real > 0, complex(0.0, float("nan"))),
    "comparison": lambda x: torch.where(x == 1j, x, 3 * x),
    "polar": lambda x: torch.polar(x.real.abs(), x.imag),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_operators(name, road):
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    want, got = FUNCTIONS[name](x), ROADS[road](Applies(FUNCTIONS[name]))(x)
    torch.testing.assert_close(got, want, equal_nan=True)
    tangent = torch.randn_like(want)
    if want.requires_grad:
        gradients = [torch.autograd.grad(y, x, tangent)[0] for y in (got, want)]
        torch.testing.assert_close(*gradients, equal_nan=True)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("of attention with a mask of its own, AOTAutograd alone knows the parts")
def test_gradients_in_captures_of_aotautograd():
    def scaled(x):
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return torch.view_as_real(torch.complex(x, mixed) * 1j)

    found = []
    for call in (scaled, torch_ort.ORTModule(Applies(scaled))):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("numbers", [(2j, 3), (0.5, 3)])
def test_lists_of_numbers(numbers):
    def scaled(x, y):
        return torch._foreach_mul([x, y], numbers)

    x, y = torch.randn(3, dtype=torch.complex64), torch.randn(2, dtype=torch.complex64)
    compiled = torch.compile(scaled, backend="ort")
    torch.testing.assert_close(compiled(x, y), scaled(x, y))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("number", [2j, -1.5 - 1e-30j, 1e300 + 0.1j, INFINITE, complex(-0.0, -0.0)])
def test_files(number, tmp_path):
    def filled(x):
        return torch.full_like(x, number) + x

    x = torch.zeros(3, dtype=torch.complex128)
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "filled")}
    with torch.no_grad():
        torch.compile(filled, backend="ort", options=options)(x)
    (path,) = tmp_path.glob("*_captured.onnx")
    graph = _C.Graph.from_onnx(path.read_bytes())
    (got,) = _C.run(graph, dict.fromkeys(graph.input_names, x)).values()
    assert str(got.tolist()) == str(filled(x).tolist())


@pytest.mark.parametrize("text", ["(1+2j", "(1j)", "(+j)", "(1+2+3j)", "1+2j"])
def test_text_of_a_file_that_is_no_number(text):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "org.pytorch.aten": 1]>'
        "graph (complex64[2] x) => (complex64[2] y)"
        '{ y = org.pytorch.aten.ATen <operator = "aten::full_like", overload_name = "", '
        f'fill_value = "{text}", tensor_args = ["self"]> (x) }}'
    )

    def run():
        graph = _C.Graph.from_onnx(model.SerializeToString())
        _C.run(graph, {"x": torch.zeros(2, dtype=torch.complex64)})

    with pytest.raises(_C.UserError, match="bad expression"):
        run()
