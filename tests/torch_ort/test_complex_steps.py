"""Complex tensors in every form of a step: their operators, their views, and what is saved.

The default run takes one program for each operator, with its results in all forms, on one road and
with one dtype; `--run-slow` takes the other road and dtype too, and each form alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort
from tests.roads import ROADS

pytestmark = pytest.mark.ort_only

DTYPES = {"compile": torch.complex64, "ortmodule": torch.complex128}  # of programs with all forms
IDS = torch.tensor([2, 0, 1, 1])


def spread(x: torch.Tensor) -> torch.Tensor:
    """Move eigenvalues apart."""
    return x + torch.diag(torch.arange(4.0))


def positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + 4 * torch.eye(4, dtype=x.dtype)


def edited(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.real.mul_(2)
    y[0] = 1j
    return y


def eig(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eig(x)
    return values, vectors.abs()  # their phases may be any


OPERATORS: dict[str, Callable] = {
    "eig": lambda x: eig(spread(x)),
    "eig of reals": lambda x: eig(spread(x.real)),
    "eigvals": lambda x: torch.linalg.eigvals(spread(x)),
    "eigvals of reals": lambda x: torch.linalg.eigvals(spread(x.real)),
    "eigh": lambda x: torch.linalg.eigh(positive(x))[0],
    "svdvals": torch.linalg.svdvals,
    "inv": lambda x: torch.linalg.inv(positive(x)),
    "solve": lambda x: torch.linalg.solve(positive(x), x),
    "det": torch.linalg.det,
    "cholesky": lambda x: torch.linalg.cholesky(positive(x)),
    "fft": torch.fft.fft,
    "fft of rows": lambda x: torch.fft.fft(x, norm="ortho", dim=0),
    "ifft": torch.fft.ifft,
    "rfft": lambda x: torch.fft.rfft(x.real),
    "irfft": lambda x: torch.fft.irfft(x, 6),
    "hfft": torch.fft.hfft,
    "ihfft": lambda x: torch.fft.ihfft(x.imag),
    "fft2": torch.fft.fft2,
    "irfft2": torch.fft.irfft2,
    "fftn, shifted": lambda x: torch.fft.fftshift(torch.fft.fftn(x)),
    "view_as_real": torch.view_as_real,
    "view_as_complex": lambda x: torch.view_as_complex(torch.view_as_real(x) * 2),
    "parts": lambda x: (x.real, (x + 1).imag),
    "conj": lambda x: (x.conj(), x.conj().exp(), x.exp().mH),
    "parts of conj": lambda x: (x.conj().imag, x.exp().conj().imag),
    "polar": lambda x: torch.polar(x.abs(), x.angle()),
    "complex": lambda x: torch.complex(x.real * 2, x.imag),
    "angle": torch.angle,
    "abs": torch.abs,
    "sgn": torch.sgn,
    "stft": lambda x: torch.stft(
        x.real.flatten(), 8, 4, window=torch.hann_window(8, dtype=x.real.dtype), return_complex=True
    ).exp(),
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None].expand(2, 4, 4), x[None].conj().expand(2, 4, 4)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.conj()),
    "dot": lambda x: (torch.dot(x[0], x[1]), torch.vdot(x[0], x[1])),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x, x[0]),
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None]),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "sums": lambda x: (x.sum(), x.sum(0), x.mean(1)),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "index": lambda x: (x[IDS], x[IDS, IDS]),
    "slices": lambda x: (x[1], x[::2, 1:], x.diagonal()),
    "gather": lambda x: x.gather(0, IDS[None].expand(2, 4)),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, IDS, x),
    "index_put": lambda x: x.index_put((IDS[:2],), x[0]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, IDS[None].expand(4, 4), x),
    "cat": lambda x: (torch.cat([x, x * 2], 1), torch.cat([x, x.real], 0)),
    "stack": lambda x: torch.stack([x, x.exp()]),
    "where": lambda x: torch.where(x.real > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x.real > 0, 1j),
    "exp and log": lambda x: (x.exp(), x.log(), x.sqrt(), x.sin(), x.tanh(), x.reciprocal()),
    "powers": lambda x: (x**3, x ** (1 + 2j), x.square()),
    "with reals": lambda x: (x + x.real, x.abs() * x, x.real / x, x / (x.abs() + 1)),
    "moved": lambda x: (x.roll(1, 0), x.flip(1), x.tril(), x.t().reshape(-1), F.pad(x, (1, 2))),
    "expanded": lambda x: (x[:1].expand(3, 4), x.repeat(2, 1)),
    "casts": lambda x: (x.to(torch.complex128), x.to(torch.complex64), x.real.to(x.dtype)),
    "edited": edited,
}


def parts(results) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def size(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(each.abs().square().sum() for each in tensors)


def views(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    whole = [each.resolve_conj() for each in results]
    return [torch.view_as_real(each) if each.is_complex() else each.flatten() for each in whole]


def joined(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Write into parts of one tensor."""
    return [torch.cat([each.flatten()] * 2).neg() for each in results]


# By name: what a program returns besides its loss.
FORMS: dict[str, Callable] = {
    "result": lambda results: (size(results), *results),
    "view": lambda results: (size(results), *views(results)),
    "saved": lambda results: (size(tuple(each * each.conj() for each in results)), *results),
    "computed": lambda results: (size(results), *(each.conj() + 1 for each in results)),
    "joined": lambda results: (size(tuple(joined(results))), *joined(results)),
    "only a loss": lambda results: (size(results),),
    "first": lambda results: results,
}


def all_forms(results):
    losses, others = [], []
    for name in ("view", "saved", "computed", "joined"):
        loss, *rest = FORMS[name](results)
        losses.append(loss)
        others += rest if name != "saved" else []  # the views of which it returns already
    return (sum(losses), *others)


class Model(nn.Module):
    def __init__(self, operator: Callable, form: Callable, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=dtype))
        self.operator, self.form = operator, form

    def forward(self, x):
        return self.form(parts(self.operator(self.weight * x)))


def run(model: nn.Module, call: Callable) -> list:
    """Train with gradients of the first result, then of all, then infer; give all that is seen."""
    seen = []
    for step, used in enumerate((1, 1, None)):
        torch.manual_seed(step)
        results = call(torch.randn(4, 4, dtype=model.weight.dtype))
        model.zero_grad()
        size(tuple(each for each in results if each.requires_grad)[:used]).backward()
        seen += [*(each.detach() for each in results), model.weight.grad]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            seen += [each.clone() for each in call(torch.randn(4, 4, dtype=model.weight.dtype))]
    return seen


def compare(operator: Callable, form: Callable, dtype: torch.dtype, road: str) -> None:
    model = Model(operator, form, dtype)
    eager = copy.deepcopy(model)
    got, want = run(model, ROADS[road](model)), run(eager, eager)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, check_stride=False)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0
    assert counters["forward_runs"] == 5


# Which road an operator is recorded on makes no difference to what is recorded of it.
IN_TURN = [
    pytest.param(name, road, marks=() if turn % len(ROADS) == i else pytest.mark.slow)
    for turn, name in enumerate(OPERATORS)
    for i, road in enumerate(ROADS)
]


@pytest.mark.parametrize(("name", "road"), IN_TURN)
def test_all_forms_of_the_results_of_an_operator(name: str, road: str) -> None:
    compare(OPERATORS[name], all_forms, DTYPES[road], road)


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", OPERATORS)
def test_each_form_of_the_results_of_an_operator(name: str, road: str) -> None:
    for form in FORMS:
        for dtype in DTYPES.values():
            torch._dynamo.reset()
            torch_ort.reset_counters()
            compare(OPERATORS[name], FORMS[form], dtype, road)
