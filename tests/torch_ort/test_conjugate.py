"""Conjugate and negative views: PyTorch keeps a bit in place of other numbers in memory."""

from __future__ import annotations

import onnx.parser
import pytest
import torch

import torch_ort
from tests.roads import ROADS, Applies
from torch_ort import _C
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


def conjugate_backward(x):
    class Conjugates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.conj()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.conj()

    return Conjugates.apply(x) * 2


FUNCTIONS = {
    "conj": lambda x: (x.conj() * 2).abs(),
    "conj of an expanded tensor": lambda x: x[:, :1].expand(-1, 4).conj().reshape(-1) * 2,
    "conj of a slice": lambda x: x[:, ::2].conj().transpose(0, 1) * x[:, ::2].t(),
    "conj that leaves": lambda x: (x * 2).conj(),
    "conj that is summed": lambda x: x.conj().sum(),
    "conj written into": lambda x: x.conj().clone().mul_(2).add_(x.conj()),
    "hfft": lambda x: torch.fft.hfft(x),
    "hfft of reals": lambda x: torch.fft.hfft(x.real),
    "hfft2 of reals": lambda x: torch.fft.hfft2(x.real),
    "hfftn of reals": lambda x: torch.fft.hfftn(x.real),
    "ihfft": lambda x: torch.fft.ihfft(x.imag),
    "imag of conj": lambda x: x.conj().imag * x.real,
    "imag of conj that leaves": lambda x: (x * 2).conj().imag,
    "product with the adjoint": lambda x: x.mH @ x,
    "saved": lambda x: (x.conj() * x).sin(),
    "solve": lambda x: torch.linalg.solve(x @ x.mH + torch.eye(3), x),
    "view_as_real": lambda x: torch.view_as_real(x.conj().resolve_conj()) * 2,
}


def gradient_of(function, x, tangent_like=lambda tangent: tangent):
    y = function(x)
    generator = torch.Generator().manual_seed(1)
    tangent = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return y.detach().resolve_conj(), torch.autograd.grad(y, x, tangent_like(tangent))[0]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_a_graph(name, road):
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    want = gradient_of(FUNCTIONS[name], x)
    got = gradient_of(ROADS[road](Applies(FUNCTIONS[name])), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("Dynamo makes an operator that takes graphs of a Function")
@pytest.mark.parametrize("road", ROADS)
def test_results_of_a_function(road):
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    want = gradient_of(conjugate_backward, x)
    torch.testing.assert_close(gradient_of(ROADS[road](Applies(conjugate_backward)), x), want)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("road", ROADS)
def test_gradients_that_come_back(road):
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    function = lambda x: x * x * 2  # noqa: E731
    compiled = ROADS[road](Applies(function))
    for like in (torch.conj, lambda tangent: tangent[:, :1].conj().expand(3, 4)):
        want = gradient_of(function, x, like)
        torch.testing.assert_close(gradient_of(compiled, x, like), want)
    real = torch.randn(3, 4, requires_grad=True)
    negative = lambda tangent: torch.complex(tangent, tangent).conj().imag  # noqa: E731
    want = gradient_of(function, real, negative)
    torch.testing.assert_close(gradient_of(compiled, real, negative), want)
    assert torch_ort.counters()["fallbacks"] == 0


INPUTS = {
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "conjugate and transposed": lambda: torch.randn(4, 3, dtype=torch.complex64).mH,
    "conjugate and expanded": lambda: torch.randn(3, 1, dtype=torch.complex64).conj().expand(3, 4),
    "negative": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.hands_over("the recorder takes no such inputs")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_torch_compile(name):
    x = INPUTS[name]().detach().requires_grad_()
    function = lambda x: (x * 2).sin() * x  # noqa: E731
    want = gradient_of(function, x)
    got = gradient_of(torch.compile(function, backend="ort"), x)
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == 1


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_an_ortmodule_run_in_pytorch(name, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    x = INPUTS[name]().detach().requires_grad_()
    module = Applies(lambda x: (x * 2).sin() * x)
    want = gradient_of(module, x)
    with pytest.warns(FallbackWarning, match="conjugate or negative view"):
        got = gradient_of(torch_ort.ORTModule(module), x)
    torch.testing.assert_close(got, want)


@pytest.mark.hands_over("the recorder takes no such inputs")
def test_an_input_that_is_written_into_is_eagers(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    x, expected = numbers.clone().conj(), numbers.clone().conj()
    with pytest.warns(FallbackWarning, match="that the graph writes into"):
        torch.compile(lambda x: x.mul_(2), backend="ort")(x)
    torch.testing.assert_close(x, expected.mul_(2))


def test_a_conjugate_view_in_a_file_is_refused():
    text = (
        '<ir_version: 10, opset_import: ["": 20, "org.pytorch.aten": 1]>'
        "graph (complex64[2] x) => (complex64[2] y)"
        '{ y = org.pytorch.aten.ATen <operator = "aten::_conj", overload_name = "", '
        'tensor_args = ["self"]> (x) }'
    )
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(_C.Unsupported, match="a view whose numbers are not in memory"):
        _C.run(graph, {"x": torch.zeros(2, dtype=torch.complex64)})
