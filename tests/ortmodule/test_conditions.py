"""What a module's forward computes of sizes: conditions on later calls are numbers of any kind."""

from __future__ import annotations

import enum
import fractions
import gc
import numbers

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_ort
from tests.roads import Applies
from torch_ort import ORTModule
from torch_ort.capture import module as module_capture

pytestmark = [
    pytest.mark.ort_only,
    pytest.mark.hands_over("one of both ways to capture is AOTAutograd's"),
]


@pytest.fixture(autouse=True, params=["recorded", "traced"])
def capture(request) -> str:
    """Capture by the recorder, or leave all to AOTAutograd."""
    if request.param == "traced":
        request.getfixturevalue("traced")
    return request.param


FUNCTIONS = {
    "scale by a root": lambda x: x * (1.0 / x.shape[-1]) ** 0.5,
    "scale by a quotient": lambda x: x * (x.shape[0] / x.shape[-1]),
    "scale by a square root": lambda x: x / torch.sym_sqrt(x.shape[-1]),
    "area": lambda x: torch.nn.functional.interpolate(x[None], mode="area", scale_factor=1.7),
    "rounded": lambda x: x[:, : round(x.shape[1] * 0.5)] * 2,
    "branch on a root": lambda x: x * 2 if x.shape[-1] ** 0.5 > 1.5 else x * 3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_of_sizes(name):
    module = Applies(FUNCTIONS[name])
    wrapped = ORTModule(module)
    for size in (4, 9, 4):
        x = torch.randn(3, 2, size, requires_grad=True)
        want, got = module(x), wrapped(x)
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(y.sum(), x) for y in (got, want)]
        torch.testing.assert_close(*gradients)
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_condition_that_has_no_value_for_a_size_does_not_hold(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    wrapped = ORTModule(Applies(FUNCTIONS["scale by a root"]))
    wrapped(torch.randn(3, 4))
    with pytest.raises(ZeroDivisionError):
        wrapped(torch.randn(3, 0))


def test_one_of_several_conditions_may_have_alternatives():
    weight = torch.randn(4, 3)

    def forward(x):
        steps = torch.linspace(0, 1, x.shape[1])[:, None]  # a graph for this size alone
        mixed = torch.einsum("...i,ij->...j", x + steps, weight)  # asks for one size or another
        return mixed * (1.0 / x.shape[0]) ** 0.5

    wrapped = ORTModule(Applies(forward))
    for shape in ((3, 5, 4), (4, 6, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(wrapped(x), forward(x))
    assert torch_ort.counters()["fallbacks"] == 0


def test_captures_let_go_of_their_symbols():
    def alive():
        gc.collect()
        return sum(isinstance(one, ShapeEnv) for one in gc.get_objects())

    wrapped = ORTModule(Applies(FUNCTIONS["scale by a root"]))
    counts = []
    for _ in range(4):
        wrapped(torch.randn(3, 4))
        wrapped.recapture()
        counts.append(alive())
    assert len({*counts[1:]}) == 1


def test_what_pytorch_says_to_dynamo_is_answered_by_another_capture(capture, monkeypatch):
    compiled, said = module_capture.trace_and_compile, []

    def compile_later(*args):
        if not said:
            said.append(RestartAnalysis())
            raise said[0]
        return compiled(*args)

    monkeypatch.setattr(module_capture, "trace_and_compile", compile_later)
    module = Applies(FUNCTIONS["scale by a quotient"])
    x = torch.randn(3, 4)
    torch.testing.assert_close(ORTModule(module)(x), module(x))
    assert bool(said) == (capture == "traced")
    assert torch_ort.counters()["fallbacks"] == 0


TEXTS = {
    "of a shape": lambda x: len(repr(x.shape)),
    "formatted": lambda x: len(f"{x.shape[0]}"),
    "a key": lambda x: {"3": 2.0, "12": 7.0}.get(str(len(x)), 9.0),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.hands_over("the recorder is switched off")
def test_the_text_of_a_size_is_that_of_its_number(name, traced, monkeypatch):
    """A symbol's own text would be wrong in the graph, and right for no call."""
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder" if traced else "")
    eager = Applies(lambda x: x.exp() * TEXTS[name](x))
    ours = torch_ort.ORTModule(eager)
    for rows in (3, 12, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ours(x), eager(x))
    assert torch_ort.counters()["fallbacks"] == 0


class Rows(enum.IntEnum):
    FEW, SOME, MANY = 3, 4, 7


class Derived(int):
    pass


class Share(float):
    pass


KINDS = {
    "a size": lambda x, n: isinstance(x.size(0), int) and isinstance(x.size(0), (int, float)),
    "a number": lambda x, n: isinstance(n, int) and not isinstance(n, float),
    "a quotient": lambda x, n: isinstance(x.size(0) / 2, float) and not isinstance(n / 3, int),
    "a truth": lambda x, n: isinstance(x.size(0) > 2, bool),
    "abstract": lambda x, n: isinstance(n, numbers.Integral) and isinstance(n / 2, numbers.Real),
    "a class": lambda x, n: n.__class__ is int and (x.size(0) / n).__class__ is float,
    "a member of an enumeration": lambda x, n: (
        Rows(n) == n and n == Rows(n) and n in list(Rows) and [n != Rows(n)] == [False]
    ),
    "a derived class": lambda x, n: n == Derived(n) and x.size(0) / 2 == Share(n / 2),
    "a complex number": lambda x, n: x.size(0) == complex(n) and x.size(0) != complex(n, 1),
    "the text of a truth": lambda x, n: str(n > 2) + f"{n < 2}" == "TrueFalse",
    "parts": lambda x, n: (n.real, n.imag, n.denominator) == (n, 0, 1) and (n / 2).imag == 0.0,
    "other classes of numbers": lambda x, n: n == fractions.Fraction(int(n)),
    "bytes": lambda x, n: n.to_bytes(2, "big")[1] == n and hasattr(n, "numerator"),
    "an index": lambda x, n: hasattr(n, "__index__") and len(range(n)) == n,
    "rounded to tens": lambda x, n: round(10 * n + 4, -1) == 10 * n,
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_numbers_are_those_of_python(name):
    ask = KINDS[name]

    def forward(x, n):
        return x * 2 if ask(x, n) else x * 3

    wrapped = ORTModule(Applies(forward))
    for rows in (3, 4, 7):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(wrapped(x, rows), x * 2)
    assert torch_ort.counters()["fallbacks"] == 0
