"""Short floats that are rounded inside of regions, since small differences of them decide a lot.

| what                                        | is compared with                             |
| ------------------------------------------- | -------------------------------------------- |
| places of maxima and minima, norms, ties    | eager PyTorch: the same places get gradients |
| branches by a number, whole parts           | eager PyTorch: the same side of each step    |
| exponentials of differences                 | float64: no less exact than eager PyTorch    |
| softmax, losses, norms                      | float64: they keep all digits                |
| the tile program                            | has one word for each value that is rounded  |
| nodes of a region that run one by one       | round the same values                        |
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import regions
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_ort
from torch_ort import _C

SHORT = (torch.bfloat16, torch.float16)
Function = Callable[[Tensor, Tensor], Tensor]


def by_largest(x: Tensor, t: Tensor) -> Tensor:
    y = x * t
    return torch.where(y == y.amax(-1, keepdim=True), y * 3, y * 0.5)


def by_largest_of_selected(x: Tensor, t: Tensor) -> Tensor:
    y = torch.where(t > 0, (x * t).abs(), -x)
    return torch.where(y >= y.amax(-1, keepdim=True), y * 3, y * 0.5)


def one_side(x: Tensor, t: Tensor) -> Tensor:
    y = x * t
    return torch.where(y > 0.3, y * 100, y.sin())


def fraction(x: Tensor, t: Tensor) -> Tensor:
    y = x * t * 9
    return y * (y - y.floor())


# Of products, which regions and eager PyTorch round to the same numbers: then the same places and
# sides get gradients.
DECIDING: dict[str, Function] = {
    "amax": lambda x, t: (x * t).amax(-1),
    "amin": lambda x, t: (x * t).amin(-1),
    "amax of all": lambda x, t: (x * t).amax(),
    "inf norm": lambda x, t: torch.linalg.vector_norm(x * t, torch.inf, dim=-1),
    "-inf norm": lambda x, t: torch.linalg.vector_norm(x * t, -torch.inf, dim=-1),
    "equal to the largest": by_largest,
    "largest of selected": by_largest_of_selected,
    "larger than a number": one_side,
    "maximum of equals": lambda x, t: torch.maximum(x * t, t * x),
    "threshold": lambda x, t: F.threshold(x * t, 0.3, -5.0),
}


def log_of_sum(x: Tensor, t: Tensor) -> Tensor:
    y = x * t * 20
    largest = y.amax(-1, keepdim=True)
    return (y - largest).exp().sum(-1).log() + largest.squeeze(-1)


def shares(x: Tensor, t: Tensor) -> Tensor:
    y = x * t * 20
    e = (y - y.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def shares_by_logarithm(x: Tensor, t: Tensor) -> Tensor:
    y = x * t * 20
    return (y - y.logsumexp(-1, keepdim=True)).exp()


DIFFERENCES: dict[str, Function] = {
    "logsumexp": lambda x, t: torch.logsumexp(x * t * 20, -1),
    "logsumexp by hand": log_of_sum,
    "softmax by hand": shares,
    "softmax by logsumexp": shares_by_logarithm,
    "fraction": fraction,
}


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % x.shape[-1]


WIDE: dict[str, Function] = {
    "softmax": lambda x, t: F.softmax(x * t * 20, -1),
    "log_softmax": lambda x, t: F.log_softmax(x * t * 20, -1),
    "cross entropy": lambda x, t: F.cross_entropy(x * t * 30, labels(x), reduction="none"),
    "layer norm": lambda x, t: F.layer_norm(x * t + 8, x.shape[-1:]),
    "amax in float32": lambda x, t: (x * t * 20).float().amax(-1),
    "variance": lambda x, t: (x * t * 20 + 50).var(-1),
}


def results(call: Function, dtype: torch.dtype, exact: bool = False) -> list[Tensor]:
    """Give the result of a function, and the gradients of both operands."""
    torch.manual_seed(0)
    x, t = (torch.randn(40, 97).to(dtype) for _ in range(2))
    weight = torch.randn(40, 97).to(dtype)
    if exact:
        x, t, weight = x.double(), t.double(), weight.double()
    x, t = x.requires_grad_(), t.requires_grad_()
    result = call(x, t)
    (result * weight.flatten()[: result.numel()].view_as(result)).sum().backward()
    return [result.detach(), x.grad, t.grad]


def compiled(function: Function, dtype: torch.dtype) -> list[Tensor]:
    torch.compiler.reset()
    torch_ort.reset_counters()
    found = results(torch.compile(function, backend="ort"), dtype)
    assert torch_ort.counters()["fallbacks"] == 0
    return found


def distances(got: list[Tensor], want: list[Tensor]) -> list[float]:
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", DECIDING)
def test_decisions_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    got, want = compiled(DECIDING[name], dtype), results(DECIDING[name], dtype)
    # Another element in one of 40 rows would be off by 0.1 or more.
    assert max(distances(got, want)) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_as_exact_as_in_eager(name: str, dtype: torch.dtype) -> None:
    exact = results(DIFFERENCES[name], dtype, exact=True)
    got = distances(compiled(DIFFERENCES[name], dtype), exact)
    want = distances(results(DIFFERENCES[name], dtype), exact)
    assert all(ours < 2 * theirs for ours, theirs in zip(got, want, strict=True)), (got, want)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", WIDE)
def test_composites_keep_all_digits(name: str, dtype: torch.dtype) -> None:
    exact = results(WIDE[name], dtype, exact=True)
    assert max(distances(compiled(WIDE[name], dtype), exact)) < 2 * torch.finfo(dtype).eps


# 0 and 3, by their bits.
ZERO, THREE = 0, {torch.bfloat16: 0x4040, torch.float16: 0x4200}


def body(dtype: torch.dtype, nodes: list[str]) -> _C.Graph:
    text, short = regions.type_text(dtype, (5, 40)), regions.type_text(dtype, ())
    constants = {
        "axis": "int64[1] axis = {-1}",
        "zero": f"{short} zero = {{{ZERO}}}",
        "three": f"{short} three = {{{THREE[dtype]}}}",
    }
    used = [constants[name] for name in constants if name in " ".join(nodes)]
    return regions.fused(regions.read({"x": text, "y": text}, nodes, ["r"], used))


ROUNDED = {
    "a maximum": (["a = Mul (x, y)", "r = ReduceMax <keepdims = 1> (a, axis)"], 1),
    "a sum": (["a = Mul (x, y)", "r = ReduceSum <keepdims = 1> (a, axis)"], 0),
    "what is read": (["a = Sin (y)", "r = Less (x, a)"], 1),
    "what is negated": (
        ["a = Mul (x, y)", "b = Neg (a)", "r = ReduceMax <keepdims = 1> (b, axis)"], 1,
    ),
    "both sides": (["a = Mul (x, y)", "b = Sin (x)", "r = Less (a, b)"], 2),
    "both sides of one": (["a = Mul (x, y)", "b = Neg (a)", "r = Less (a, b)"], 1),
    "a number": (["a = Mul (x, y)", "r = Greater (a, three)"], 1),
    "a floor": (["a = Mul (x, y)", "r = Floor (a)"], 1),
    "a difference": (["a = Mul (x, y)", "b = Sub (a, y)", "r = Exp (b)"], 1),
    "a sum of exponents": (["a = Mul (x, y)", "b = Add (a, y)", "r = Exp (b)"], 0),
    "a cast": (
        ["a = Cast <to = 1> (x)", "b = Sin (a)", "c = Cast <to = SHORT> (b)", "r = Floor (c)"], 1,
    ),
    "float32": (["a = Cast <to = 1> (x)", "b = Sin (a)", "r = Floor (b)"], 0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", ROUNDED)
def test_only_what_decides_is_rounded(name: str, dtype: torch.dtype) -> None:
    nodes, count = ROUNDED[name]
    word, number = {torch.bfloat16: ("ToBFloat16", 16), torch.float16: ("ToHalf", 10)}[dtype]
    graph = body(dtype, [node.replace("SHORT", str(number)) for node in nodes])
    inputs = {name: torch.randn(5, 40).to(dtype) for name in "xy"}
    assert regions.program(graph, inputs).count(word) == count


@pytest.mark.parametrize("dtype", SHORT)
def test_signs_are_told_without_rounding(dtype: torch.dtype) -> None:
    nodes = ["a = Mul (x, y)", "r = Greater (a, zero)"]
    inputs = {name: torch.randn(5, 40).to(dtype) for name in "xy"}
    listing = regions.program(body(dtype, nodes), inputs)
    # The smallest float16 is far above the smallest float.
    assert listing.count("ToHalf") == (1 if dtype == torch.float16 else 0)
    assert "ToBFloat16" not in listing
    inputs = {name: torch.full((5, 40), 1e-5).to(dtype) for name in "xy"}
    (got,) = regions.run_by_name(body(dtype, nodes), inputs).values()
    assert torch.equal(got, inputs["x"] * inputs["y"] > 0)


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", SHORT)
def test_nodes_that_run_one_by_one_round_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    nodes = ["a = Mul (x, y)", "b = ReduceMax <keepdims = 1> (a, axis)", "r = Equal (a, b)"]
    graph = body(dtype, nodes)
    inputs = {name: torch.randn(5, 40).to(dtype) for name in "xy"}
    product = inputs["x"] * inputs["y"]
    for mode in ("kernel", "checked", "nodes"):
        options = _C.SessionOptions(region_mode=mode, verify=True)
        session = _C.Session.compile(graph, {}, options)
        (got,) = session.run({name: x.clone() for name, x in inputs.items()}).values()
        assert torch.equal(got, product == product.amax(-1, keepdim=True))
