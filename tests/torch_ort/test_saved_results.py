# Backward reads results of forward that also leave the graph: as they are, as views, conjugate, and
# after an edit in place. Gradients are eager's, or both raise.
from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort
from torch_ort.pytorch.versions import is_within

linalg = torch.linalg
EDITED = "modified by an inplace operation"


def hermitian(x: torch.Tensor) -> torch.Tensor:
    return x + x.mH


def positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + torch.eye(x.shape[-1], dtype=x.dtype)


# Vectors are fixed but for a phase, which the loss takes away.
DECOMPOSITIONS: dict[str, Callable] = {
    "eig": lambda x: (lambda w, v: (w, v))(*linalg.eig(x)),
    "eig_values_conj": lambda x: (lambda w, v: (w.conj(), w.real, v.abs()))(*linalg.eig(x)),
    "eigh": lambda x: (lambda w, v: (w, v))(*linalg.eigh(hermitian(x))),
    "svd": lambda x: (lambda u, s, v: (s, u, (u * s) @ v))(*linalg.svd(x)),
    "qr": lambda x: tuple(linalg.qr(x)),
    "lu": lambda x: tuple(linalg.lu(x)),
    "cholesky": lambda x: (linalg.cholesky(positive(x)),),
    "inv": lambda x: (lambda y: (y, y.mH))(linalg.inv(positive(x))),
    "solve": lambda x: (linalg.solve(positive(x), x),),
    "det": lambda x: (linalg.det(positive(x)),),
    "slogdet": lambda x: (linalg.slogdet(positive(x))[1],),
}
# Whose backward reads the first result, so that an edit of it is an error.
ELEMENTS: dict[str, Callable] = {
    "exp": lambda x: (x.exp(),),
    "exp_and_views": lambda x: (lambda y: (y, y.mH, y[0]))(x.exp()),
    "tanh": lambda x: (lambda y: (y, y.conj(), y.mT))(x.tanh()),
    "sigmoid": lambda x: (x.sigmoid(),),
    "reciprocal": lambda x: (x.reciprocal(),),
    "sqrt": lambda x: ((x * x.conj() + 1).sqrt(),),
    "cumprod": lambda x: (x.cumprod(-1), x * 2),
}
REAL_ELEMENTS: dict[str, Callable] = {
    "softmax": lambda x: (lambda y: (y, y.mT))(x.softmax(-1)),
    "log_softmax": lambda x: (lambda y: (y, y[1]))(x.log_softmax(-1)),
    "logsumexp": lambda x: (x.logsumexp(-1),),
    "vector_norm": lambda x: (linalg.vector_norm(x, dim=-1),),
    "elu": lambda x: (F.elu(x), F.elu(x).mT),
    "relu": lambda x: (x.relu(), x.relu()[0]),
    "std": lambda x: (x.std(-1),),
    "logcumsumexp": lambda x: (x.logcumsumexp(-1),),
}
CONJUGATES: dict[str, Callable] = {
    "views_of_conj": lambda x: (lambda y: (y, y.conj()[0] * 3, y.mH.unsqueeze(0).exp()))(x * 2),
    "imag_of_conj": lambda x: ((x * 2).conj().imag.exp().tanh(), x.conj().imag.sigmoid() * 3),
    "result_and_view_of_conj": lambda x: (lambda y: (y, y.conj().diagonal() * 2))(x @ x),
}
CASES = [
    pytest.param(function, dtype, id=f"{name}-{str(dtype)[6:]}")
    for dtype, functions in (
        (torch.float64, DECOMPOSITIONS | ELEMENTS | REAL_ELEMENTS),
        (torch.complex128, ELEMENTS | CONJUGATES),
    )
    for name, function in functions.items()
]
EDITS = [
    pytest.param(function, dtype, id=f"{name}-{str(dtype)[6:]}")
    for dtype, functions in (
        (torch.float64, ELEMENTS | {k: REAL_ELEMENTS[k] for k in ("softmax", "log_softmax")}),
        (torch.complex128, ELEMENTS),
    )
    for name, function in functions.items()
]


class Calls(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.function(x)


@pytest.fixture(params=["compile", "ortmodule"])
def road(request: pytest.FixtureRequest) -> Callable[[Callable], Callable]:
    if request.param == "compile":
        return lambda function: torch.compile(function, backend="ort", fullgraph=True)
    return lambda function: torch_ort.ORTModule(Calls(function))


def results_and_gradient(call: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
    """Run both halves on a fixed matrix, with gradients for all results that have some."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 4, dtype=dtype, generator=generator).requires_grad_()
    results = call(x)
    weighed = [(each, each.detach().abs().cos()) for each in results if each.requires_grad]
    loss = sum((each.abs().square() * weights).sum() for each, weights in weighed)
    return [each.detach().resolve_conj() for each in results] + list(torch.autograd.grad(loss, x))


@pytest.mark.hands_over("floats that depend on sizes")
@pytest.mark.parametrize(("function", "dtype"), CASES)
def test_results_that_backward_reads_leave_the_graph(road, function, dtype):
    call = road(function)
    for _ in range(2):  # the second run has what the first one made
        want = results_and_gradient(function, dtype)
        got = results_and_gradient(call, dtype)
        for result, truth in zip(got, want, strict=True):
            torch.testing.assert_close(result, truth, rtol=1e-9, atol=1e-9)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["backward_runs"] == 2


@pytest.mark.parametrize(("function", "dtype"), EDITS)
def test_results_that_backward_reads_are_edited(road, function, dtype):
    if function is ELEMENTS["cumprod"] and is_within("", "2.13"):
        pytest.skip("the gradient of cumprod that a trace of this torch has reads no result")
    for call in (function, road(function)):
        x = torch.randn(4, 4, dtype=dtype).requires_grad_()
        results = call(x)
        with torch.no_grad():
            results[0].mul_(2)
        with pytest.raises(RuntimeError, match=EDITED):
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_largest_value_is_found_again(dtype: torch.dtype) -> None:
    """It is computed before rounding to a shorter float, and looked for after it."""

    def largest(x: torch.Tensor) -> torch.Tensor:
        return (x.float().log_softmax(-1).to(x.dtype) * 0.2).amax(-1)

    torch.manual_seed(0)
    x = torch.randn(4, 10).to(dtype).requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(largest, backend="ort")(x).sum(), x)
    (want,) = torch.autograd.grad(largest(x).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
