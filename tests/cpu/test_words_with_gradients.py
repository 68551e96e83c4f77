"""Words of regions that are computed together with their gradients.

Both take the same exponentials, and have the bits that each of them has alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import regions
import torch
from torch.nn import functional

from torch_ort import _C

pytestmark = pytest.mark.ort_only

# By name in a tile program: the word, and the operator and attributes of its gradient.
WORDS = {
    "Gelu": ("Gelu (x)", "aten::gelu_backward", 'approximate = "none"'),
    "GeluTanh": ('Gelu <approximate = "tanh"> (x)', "aten::gelu_backward", 'approximate = "tanh"'),
    "Silu": ("Swish (x)", "aten::silu_backward", ""),
}
SPECIAL = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.7, 3.0, 1e-40, 88.0, -88.0, 104.0, 1e4,
    -1e4, 1e30, -1e30,
]  # fmt: skip
by_word = pytest.mark.parametrize("word", WORDS)


def gradient(word: str, of: str) -> str:
    _, operator, attrs = WORDS[word]
    return regions.aten(operator, of, "x", names=("grad_output", "self"), attrs=attrs)


def both(word: str) -> list[str]:
    """Write nodes that compute both, and one that has them in one region."""
    return [f"y = {WORDS[word][0]}", f"d = {gradient(word, 'g')}", "t = Add (y, d)"]


def region(
    nodes: Sequence[str], outputs: Sequence[str], dtype: torch.dtype = torch.float32
) -> _C.Graph:
    text = regions.type_text(dtype, ["N"])
    types = dict.fromkeys(("y", "z", "d", "t"), text)
    known = {name: types[name] for name in types if any(f"{name} =" in node for node in nodes)}
    return regions.fused(regions.read({"x": text, "g": text}, nodes, outputs, types=known))


def inputs_of(dtype: torch.dtype, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, g = (4 * torch.randn(2, count, dtype=torch.float64, generator=generator)).to(dtype)
    return {"x": x, "g": g}


def eager(word: str, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    kind = "tanh" if word == "GeluTanh" else "none"
    y = functional.silu(x) if word == "Silu" else functional.gelu(x, approximate=kind)
    y.backward(g)
    return y.detach(), x.grad


def is_joined(graph: _C.Graph, word: str, inputs: dict[str, torch.Tensor], isa: str = "") -> bool:
    return f"{word}, {word}Grad" in regions.program(graph, inputs, isa)


def check(word: str, inputs: dict[str, torch.Tensor], isa: str) -> None:
    dtype = inputs["x"].dtype
    joined = region(both(word), ["y", "d", "t"], dtype)
    assert is_joined(joined, word, inputs, isa)
    got = regions.run_by_name(joined, inputs, isa)
    for name, node in (("y", WORDS[word][0]), ("d", gradient(word, "g"))):
        alone = region([f"{name} = {node}", f"z = Neg ({name})"], [name, "z"], dtype)
        want = regions.run_by_name(alone, inputs, isa)
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True)


@by_word
@pytest.mark.parametrize("dtype", regions.REAL, ids=regions.NAMES.get)
@pytest.mark.parametrize("isa", regions.ISAS)
def test_the_bits_are_those_of_each_alone(isa: str, dtype: torch.dtype, word: str) -> None:
    for count in (1, 5, 19, 4099):
        check(word, inputs_of(dtype, count), isa)


@by_word
@pytest.mark.parametrize("dtype", regions.REAL[:2], ids=regions.NAMES.get)
@pytest.mark.parametrize("isa", regions.ISAS)
def test_special_values(isa: str, dtype: torch.dtype, word: str) -> None:
    g, x = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * 2).unbind(1)
    check(word, {"x": x.contiguous(), "g": g.contiguous()}, isa)


@by_word
def test_nothing_to_compute(word: str) -> None:
    joined = region(both(word), ["y", "d", "t"])
    for result in regions.run(joined, inputs_of(torch.float32, 0)):
        assert result.shape == (0,)


@by_word
def test_against_eager(word: str) -> None:
    inputs = inputs_of(torch.float64, 100)
    joined = region(both(word), ["y", "d", "t"], torch.float64)
    got = regions.run_by_name(joined, inputs)
    for name, want in zip("yd", eager(word, **inputs), strict=True):
        torch.testing.assert_close(got[name], want, rtol=1e-13, atol=1e-14)


@by_word
@pytest.mark.parametrize(
    "nodes",
    [
        ["y = {word}", "z = Neg (y)", "d = {gradient}"],
        ["d = {gradient}", "z = Neg (d)", "y = {word}"],
        ["y = {word}", "d = {of_word}", "z = Neg (d)"],
    ],
    ids=["the word is read before", "the gradient comes first", "the gradient of the word itself"],
)
def test_what_stays_apart(nodes: list[str], word: str) -> None:
    fields = {
        "word": WORDS[word][0], "gradient": gradient(word, "g"), "of_word": gradient(word, "y"),
    }  # fmt: skip
    nodes = [*(node.format(**fields) for node in nodes), "t = Add (y, d)"]
    graph = region(nodes, ["y", "z", "d", "t"])
    inputs = inputs_of(torch.float32, 37)
    assert not is_joined(graph, word, inputs)
    got = regions.run_by_name(graph, inputs)
    of = got["y"] if nodes[1] == f"d = {gradient(word, 'y')}" else inputs["g"]
    y, d = eager(word, inputs["x"].double(), of.double())
    torch.testing.assert_close(got["y"].double(), y, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got["d"].double(), d, rtol=4e-6, atol=4e-6)


@by_word
def test_results_in_the_memory_of_operands(word: str) -> None:
    # x and g are read for the last time by the region, which overwrites one of them.
    text = regions.type_text(torch.float32, ["N"])
    nodes = ["x = CumSum (a, axis)", "g = CumSum (b, axis)", *both(word)]
    graph = regions.read(
        {"a": text, "b": text},
        nodes,
        ["y", "t"],
        constants=["int64 axis = {0}"],
        types=dict.fromkeys(("x", "g", "y", "d", "t"), text),
    )
    fused = regions.fuse(graph)
    assert regions.ops(fused) == ["CumSum", "CumSum", "Region"]
    inputs = inputs_of(torch.float32, 4099)
    given = {"a": inputs["x"], "b": inputs["g"]}
    plain = regions.run_by_name(graph, given)
    for name, got in regions.run_by_name(fused, given).items():
        torch.testing.assert_close(got, plain[name], rtol=4e-6, atol=4e-6)
