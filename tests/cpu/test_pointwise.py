"""Every point-wise operation of regions, beside another one so that both are fused, against eager
PyTorch in float64; element types, special values, sizes, broadcasts and strides, on every
instruction set that the processor runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
from collections.abc import Callable, Sequence

import pytest
import regions
import torch
import torch.nn.functional as F
from regions import BUILT_ISAS, ISAS, REAL, assert_near

import torch_ort
from torch_ort import _C, UserError

backward = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    node: str  # of the operands {0}, {1}, {2}
    eager: Callable[..., torch.Tensor]
    operands: int = 1
    truth: bool = False  # gives truth values
    takes: str = "real"  # "real", "positive", "bool", "any", "where"
    error: float = 1.0  # times the usual tolerance

    def __str__(self) -> str:
        return self.name


def plain(op: str, eager: Callable, operands: int = 1, **settings) -> Operation:
    places = ", ".join(f"{{{i}}}" for i in range(operands))
    return Operation(op, f"{op} ({places})", eager, operands, **settings)


def gradient(op: str, names: Sequence[str], eager: Callable, attrs: str = "") -> Operation:
    node = regions.aten(f"aten::{op}", "{0}", "{1}", names=names, attrs=attrs)
    return Operation(f"{op} {attrs}".strip(), node, eager, 2, error=4)


FROM_INPUT, FROM_RESULT = ("grad_output", "self"), ("grad_output", "output")
OPERATIONS = [
    plain("Neg", torch.neg),
    plain("Abs", torch.abs),
    plain("Exp", torch.exp),
    plain("Log", torch.log, takes="positive"),
    Operation("Log1p", regions.aten("aten::log1p", "{0}", names=["self"]), torch.log1p,
              takes="positive"),
    plain("Sqrt", torch.sqrt, takes="positive"),
    plain("Reciprocal", torch.reciprocal),
    plain("Tanh", torch.tanh),
    plain("Erf", torch.erf),
    plain("Sigmoid", torch.sigmoid),
    plain("Relu", torch.relu),
    plain("Floor", torch.floor),
    plain("Ceil", torch.ceil),
    plain("Round", torch.round),
    Operation("Trunc", regions.aten("aten::trunc", "{0}", names=["self"]), torch.trunc),
    plain("Sign", torch.sign),
    Operation("sgn", regions.aten("aten::sgn", "{0}", names=["self"]), torch.sgn),
    plain("Sin", torch.sin),
    plain("Cos", torch.cos),
    plain("Not", torch.logical_not, truth=True, takes="bool"),
    plain("IsNaN", torch.isnan, truth=True),
    Operation("ToBool", "Cast <to = 9> ({0})", lambda x: x != 0, truth=True),
    # In float64, for eager's float32 kernel gives NaN for infinity.
    plain("Gelu", lambda x: F.gelu(x.double()), error=2),
    Operation("Gelu tanh", 'Gelu <approximate = "tanh"> ({0})',
              lambda x: F.gelu(x, approximate="tanh"), error=2),
    plain("Swish", F.silu),
    Operation("silu", regions.aten("aten::silu", "{0}", names=["self"]), F.silu),
    Operation("LeakyRelu", "LeakyRelu <alpha = 0.25> ({0})", lambda x: F.leaky_relu(x, 0.25)),
    Operation("LeakyRelu 0", "LeakyRelu <alpha = 0.0> ({0})", lambda x: F.leaky_relu(x, 0)),
    plain("Add", torch.add, 2),
    plain("Sub", torch.sub, 2),
    plain("Mul", torch.mul, 2),
    plain("Div", torch.div, 2),
    plain("Pow", torch.pow, 2, takes="positive", error=4),
    plain("Max", torch.maximum, 2),
    plain("Min", torch.minimum, 2),
    plain("Equal", torch.eq, 2, truth=True, takes="any"),
    plain("Less", torch.lt, 2, truth=True, takes="any"),
    plain("LessOrEqual", torch.le, 2, truth=True, takes="any"),
    plain("Greater", torch.gt, 2, truth=True, takes="any"),
    plain("GreaterOrEqual", torch.ge, 2, truth=True, takes="any"),
    plain("And", torch.logical_and, 2, truth=True, takes="bool"),
    plain("Or", torch.logical_or, 2, truth=True, takes="bool"),
    plain("Xor", torch.logical_xor, 2, truth=True, takes="bool"),
    gradient("gelu_backward", FROM_INPUT, lambda g, x: backward.gelu_backward(g, x)),
    gradient("gelu_backward", FROM_INPUT,
             lambda g, x: backward.gelu_backward(g, x, approximate="tanh"),
             'approximate = "tanh"'),
    gradient("silu_backward", FROM_INPUT, lambda g, x: backward.silu_backward(g, x)),
    gradient("tanh_backward", FROM_RESULT, lambda g, x: backward.tanh_backward(g, x)),
    gradient("sigmoid_backward", FROM_RESULT, lambda g, x: backward.sigmoid_backward(g, x)),
    gradient("threshold_backward", FROM_INPUT,
             lambda g, x: backward.threshold_backward(g, x, 0.25), "threshold = 0.25"),
    gradient("threshold_backward", FROM_INPUT,
             lambda g, x: backward.threshold_backward(g, x, 0), "threshold = 0"),
    gradient("leaky_relu_backward", FROM_INPUT,
             lambda g, x: backward.leaky_relu_backward(g, x, 0.25, False),
             'negative_slope = 0.25, self_is_result = "false"'),
    gradient("leaky_relu_backward", FROM_INPUT,
             lambda g, x: backward.leaky_relu_backward(g, x, 2, True),
             'negative_slope = 2, self_is_result = "true"'),
    plain("Where", torch.where, 3, takes="where"),
]  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
TAKES = {
    "real": REAL,
    "positive": REAL,
    "bool": (torch.bool,),
    "any": (*REAL, *INTEGERS),
    "where": (*REAL, *INTEGERS, torch.bool),
}


def operand_dtypes(op: Operation, dtype: torch.dtype) -> list[torch.dtype]:
    return [torch.bool, dtype, dtype] if op.takes == "where" else [dtype] * op.operands


def graph_of(op: Operation, dtype: torch.dtype, shapes: Sequence[Sequence[int | str]]) -> _C.Graph:
    """Write the operation and a second one that reads its result; both results leave."""
    dtypes = operand_dtypes(op, dtype)
    inputs = {
        f"x{i}": regions.type_text(*pair) for i, pair in enumerate(zip(dtypes, shapes, strict=True))
    }
    result = torch.bool if op.truth else dtype
    alike = all(shape == shapes[0] for shape in shapes)
    wide = shapes[0] if alike else torch.broadcast_shapes(*shapes)
    if result.is_floating_point:
        second = "Neg (y)"
    else:
        second = "Not (y)" if result is torch.bool else "Where (truth, y, y)"
        if result is not torch.bool:
            inputs["truth"] = regions.type_text(torch.bool, wide)
    nodes = [f"y = {op.node.format(*inputs)}", f"z = {second}"]
    # Most ATen operators have no rule that tells the type.
    types = {"y": regions.type_text(result, wide)} if "ATen" in op.node else None
    return regions.fused(regions.read(inputs, nodes, ["y", "z"], types=types))


def second(y: torch.Tensor) -> torch.Tensor:
    return -y if y.is_floating_point() else ~y if y.dtype is torch.bool else y


def check(
    op: Operation,
    graph: _C.Graph,
    operands: Sequence[torch.Tensor],
    isa: str,
    special: bool = False,
) -> None:
    given = {f"x{i}": x for i, x in enumerate(operands)}
    if "truth" in graph.input_names:
        given["truth"] = torch.ones(torch.broadcast_shapes(*(x.shape for x in operands))) > 0
    y, z = regions.run(graph, given, isa)
    # Where the range ends depends on the element type, so special values are worked on in it.
    exact = [x.double() if x.is_floating_point() and not special else x for x in operands]
    want = op.eager(*exact)
    assert y.shape == want.shape
    rtol = op.error * regions.TOLERANCE[y.dtype] if y.is_floating_point() else None
    assert_near(y, want, rtol)
    assert_near(z, second(want), rtol)


def numbers(op: Operation, dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype is torch.uint8 else -3
        return torch.randint(low, 4, shape, dtype=dtype, generator=generator)
    x = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
    x = x.abs() + 0.125 if op.takes == "positive" else x
    if op.truth or op.name in ("Max", "Min"):
        x = x.round()  # so that equal ones meet
    return x.to(dtype)


def operands_of(op: Operation, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list:
    dtypes = operand_dtypes(op, dtype)
    return [
        numbers(op, each, shape, i)
        for i, (each, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ]


CASES = [
    pytest.param(op, dtype, id=f"{op}-{regions.NAMES[dtype]}")
    for op in OPERATIONS
    for dtype in TAKES[op.takes]
]


@regions.also_on_cuda
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_operation(op: Operation, dtype: torch.dtype) -> None:
    graph = graph_of(op, dtype, [["N", 7]] * op.operands)
    for isa, rows in itertools.product(ISAS, (0, 1, 11)):
        check(op, graph, operands_of(op, dtype, [[rows, 7]] * op.operands), isa)


SPECIAL = [
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.25, 3.0,
    1e-40, -1e-40, 6e-8, 88.0, -88.0, 104.0, 1e4, -1e4, 1e30, -1e30,
]  # fmt: skip


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", REAL, ids=regions.NAMES.get)
@pytest.mark.parametrize(
    "op", [op for op in OPERATIONS if torch.float32 in TAKES[op.takes]], ids=str
)
def test_special_values(op: Operation, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    pairs = torch.cartesian_prod(x, x).unbind(1)
    if op.operands == 1:
        operands = [x]
    else:
        operands = list(pairs) if op.operands == 2 else [pairs[0] > pairs[1], *pairs]
    graph = graph_of(op, dtype, [["N"]] * op.operands)
    for isa in ISAS:
        check(op, graph, operands, isa, special=True)


@regions.also_on_cuda
@pytest.mark.parametrize("name", ["Sigmoid", "Swish", "silu", "silu_backward"])
def test_the_smallest_sigmoids_are_no_zeros(name: str) -> None:
    """Where exp(-x) is near the end of its range, a sigmoid is subnormal."""
    op = next(op for op in OPERATIONS if op.name == name)
    x = torch.linspace(-88.7, -80, 400)
    operands = [torch.full_like(x, 2.0), x] if op.operands == 2 else [x]
    graph = graph_of(op, torch.float32, [["N"]] * op.operands)
    want = op.eager(*(each.double() for each in operands))
    for isa in ISAS:
        got = regions.run(graph, {f"x{i}": each for i, each in enumerate(operands)}, isa)[0]
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


@regions.also_on_cuda
def test_zeros_keep_their_sign() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for op in OPERATIONS:
        if op.operands > 1 or op.truth or op.name == "Sign":
            continue
        if op.name == "Gelu tanh" and platform.machine() == "aarch64":
            continue  # eager PyTorch loses the sign there
        graph = graph_of(op, torch.float32, [["N"]])
        for isa in ISAS:
            got, want = regions.run(graph, {"x0": x}, isa)[0], op.eager(x)
            zeros = want == 0
            assert torch.equal(got[zeros].signbit(), want[zeros].signbit()), (op.name, isa)


# One for each number of operands.
BY_OPERANDS = [
    next(op for op in OPERATIONS if op.name == name) for name in ("Tanh", "Sub", "Where")
]


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", BY_OPERANDS, ids=str)
def test_ragged_sizes(op: Operation, dtype: torch.dtype) -> None:
    graph = graph_of(op, dtype, [["N"]] * op.operands)
    sizes = [*range(1, 71), 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 40001]
    for isa in ISAS:
        compiled = regions.Compiled(graph, isa)
        for size in sizes:
            operands = operands_of(op, dtype, [[size]] * op.operands)
            y = compiled.run({f"x{i}": x for i, x in enumerate(operands)})["y"]
            want = op.eager(*(x.double() if x.is_floating_point() else x for x in operands))
            assert_near(y, want)


BROADCASTS = [
    ([2, 3, 4, 5], [5]), ([2, 3, 4, 5], [4, 5]), ([2, 3, 4, 5], [1, 3, 4, 5]),
    ([2, 3, 4, 5], [2, 3, 4, 1]), ([2, 3, 4, 5], [2, 3, 1, 1]), ([2, 3, 4, 5], [2, 1, 1, 5]),
    ([2, 3, 4, 5], [2, 1, 4, 1]), ([2, 3, 4, 5], [3, 1, 5]), ([2, 3, 4, 5], [1, 1, 1, 5]),
    ([2, 3, 4, 5], []), ([2, 3, 4, 5], [1, 1]), ([2, 3, 1, 5], [2, 3, 4, 1]), ([6, 1], [1, 5]),
    ([70, 1], [70, 300]), ([3, 5000], [3, 1]), ([3, 5000], [5000]), ([2, 3, 5000], [2, 1, 5000]),
    ([2, 1, 5000], [1, 3, 1]),
]  # fmt: skip


@regions.also_on_cuda
@pytest.mark.parametrize("op", [op for op in BY_OPERANDS if op.operands > 1], ids=str)
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcasts(shapes: tuple[list[int], list[int]], op: Operation) -> None:
    for dtype, chosen in itertools.product(
        (torch.float32, torch.bfloat16), itertools.product(shapes, repeat=op.operands)
    ):
        if torch.broadcast_shapes(*chosen) != torch.broadcast_shapes(*shapes):
            continue
        graph = graph_of(op, dtype, chosen)
        for isa in ISAS:
            check(op, graph, operands_of(op, dtype, chosen), isa)


@regions.also_on_cuda
def test_broadcasts_of_one_input_in_several_ways() -> None:
    """A row of one reader is a column of another, and sizes of one are told by the run alone."""
    graph = regions.fused(
        regions.read(
            {"x": "float[N,N]", "v": "float[N]", "w": "float[N,1]"},
            ["a = Mul (x, v)", "b = Add (a, w)", "c = Sub (v, w)", "y = Add (b, c)"],
            ["y"],
        )
    )
    for size, isa in itertools.product((1, 2, 5, 40, 3000), ISAS):
        x, v, w = torch.randn(size, size), torch.randn(size), torch.randn(size, 1)
        (y,) = regions.run(graph, {"x": x, "v": v, "w": w}, isa)
        x, v, w = x.double(), v.double(), w.double()
        assert_near(y, (x * v + w) + (v - w))


# Tensors of 6 x 4 x 5 that do not lie row by row.
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "rows apart": lambda x: x.repeat(1, 1, 2)[..., :5],
    "every other": lambda x: x.repeat_interleave(2, 2)[..., ::2],
    "rows inside out": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "behind the start": lambda x: torch.cat([x.flatten()[:3], x.flatten()])[3:].view(x.shape),
    "all one": lambda x: x[:1, :1, :1].expand(x.shape),
    "one row": lambda x: x[:1, :1].expand(x.shape),
    "one column": lambda x: x[..., :1].expand(x.shape),
}


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", BY_OPERANDS, ids=str)
def test_layouts_of_inputs(op: Operation, layout: str, dtype: torch.dtype) -> None:
    shape = [6, 4, 5]
    operands = operands_of(op, dtype, [shape] * op.operands)
    graph = graph_of(op, dtype, [["A", "B", "C"]] * op.operands)
    for moved, isa in itertools.product(range(op.operands), ISAS):
        mixed = list(operands)
        mixed[moved] = LAYOUTS[layout](operands[moved])
        assert mixed[moved].shape == torch.Size(shape)
        check(op, graph, mixed, isa)
    check(op, graph, [LAYOUTS[layout](x) for x in operands], ISAS[-1])


@regions.also_on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", ["[1,A,A*B]", "[C,A*C,1]", "[B*C,1,B]"], ids=str)
def test_promised_strides_of_outputs(strides: str, dtype: torch.dtype) -> None:
    kind = regions.type_text(dtype, ["A", "B", "C"])
    graph = regions.read(
        {"x": kind, "v": regions.type_text(dtype, ["C"])},
        ["y = Add (x, v)", "z = Neg (y)"],
        ["y", "z"],
        types={"y": kind, "z": kind},
        strides={"z": strides},
    )
    fused = regions.fused(graph)
    for sizes, isa in itertools.product(([6, 4, 5], [3, 2, 3000], [1, 1, 1], [2, 0, 3]), ISAS):
        x, v = torch.randn(sizes).to(dtype), torch.randn(sizes[-1:]).to(dtype)
        y, z = regions.run(fused, {"x": x, "v": v}, isa)
        want = x.double() + v.double()
        assert_near(y, want)
        assert_near(z, -want)
        known = dict(zip("ABC", sizes, strict=True))
        assert y.is_contiguous()
        promised = _C.testing.shape_str(strides)
        assert list(z.stride()) == [
            _C.testing.dim_evaluate(dim, known) for dim in promised.strip("[]").split(",")
        ]


# ---- constants


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (-0.0, 0.0), (1.0, math.nan), (math.nan, 1.0)])
def test_constants_that_compare_as_equal_are_two(numbers: tuple[float, float]) -> None:
    text = [f"float {name} = {{{number}}}" for name, number in zip("ab", numbers, strict=True)]
    graph = regions.fused(
        regions.read(
            {"x": "float[N]"}, ["c = Neg (x)", "y = Div (c, a)", "z = Div (c, b)"], ["y", "z"], text
        )
    )
    x = torch.tensor([2.0, -3.0])
    for isa in ISAS:
        got = regions.run(graph, {"x": -x}, isa)
        torch.testing.assert_close(got, [x / numbers[0], x / numbers[1]], equal_nan=True)


# ---- integers


@regions.also_on_cuda
def test_wide_integers_are_exact() -> None:
    """Neighbours that a double does not tell apart."""
    big = torch.tensor([2**53, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63), -(2**63) + 1])
    graph = regions.read(
        {"a": "int64[N]", "b": "int64[N]"},
        ["e = Equal (a, b)", "l = Less (a, b)", "w = Where (e, a, b)", "n = Not (l)"],
        ["e", "w", "n"],
    )
    for other in (big, big.roll(1), big.flip(0), big - 1):
        for isa in ISAS:
            e, w, n = regions.run(regions.fuse(graph), {"a": big, "b": other}, isa)
            assert torch.equal(e, big == other)
            assert torch.equal(w, other)
            assert torch.equal(n, big >= other)


@regions.also_on_cuda
@pytest.mark.parametrize("number", [0, 3, 2**53 - 1, 2**53, -(2**53), 2**62 + 1])
@pytest.mark.parametrize("op", ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
def test_wide_integers_beside_a_constant_are_exact(op: str, number: int) -> None:
    graph = regions.read(
        {"x": "int64[N]"},
        [f"a = {op} (x, c)", f"b = {op} (c, x)", "y = And (a, b)", "z = Or (a, b)"],
        ["y", "z", "a"],
        [f"int64 c = {{{number}}}"],
    )
    x = torch.tensor([0, 1, -1, 7, 2**63 - 1, -(2**63)]) + number
    compare = next(each.eager for each in OPERATIONS if each.name == op)
    c = torch.tensor(number)
    for isa in ISAS:
        y, z, a = regions.run(regions.fuse(graph), {"x": x}, isa)
        assert torch.equal(a, compare(x, c))
        assert torch.equal(y, compare(x, c) & compare(c, x))
        assert torch.equal(z, compare(x, c) | compare(c, x))


# ---- element types


SOURCES = [*REAL, *INTEGERS, torch.int64, torch.bool]


@regions.also_on_cuda
@pytest.mark.parametrize("to", [*REAL, torch.bool], ids=regions.NAMES.get)
@pytest.mark.parametrize("source", SOURCES, ids=regions.NAMES.get)
def test_casts(source: torch.dtype, to: torch.dtype) -> None:
    number = {torch.bool: 9, torch.float32: 1, torch.float64: 11, torch.float16: 10}.get(to, 16)
    follow = "Not" if to is torch.bool else "Neg"
    graph = regions.read(
        {"x": regions.type_text(source, ["N"])},
        [f"y = Cast <to = {number}> (x)", f"z = {follow} (y)", f"w = {follow} (z)"],
        ["z", "w"],
    )
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0, 5.0, 7.0])
    if source.is_floating_point:
        x = torch.tensor(SPECIAL, dtype=torch.float64)
    x = x.to(source)
    for isa in ISAS:
        z, w = regions.run(regions.fused(graph), {"x": x}, isa)
        torch.testing.assert_close(z, second(x.to(to)), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(w, x.to(to), rtol=0, atol=0, equal_nan=True)


@regions.also_on_cuda
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=regions.NAMES.get)
def test_what_leaves_is_rounded_once(wide: torch.dtype) -> None:
    """Numbers stay as wide as they are worked on between a cast down and a cast up."""
    name, number = regions.NAMES[wide], {torch.float32: 1, torch.float64: 11}[wide]
    graph = regions.fused(
        regions.read(
            {"x": f"{name}[N]"},
            [
                "n = Neg (x)",
                "y = Cast <to = 16> (n)",
                f"w = Cast <to = {number}> (y)",
                "z = Abs (w)",
            ],
            ["y", "z"],
        )
    )
    x = torch.randn(1000, dtype=wide)
    for isa in ISAS:
        y, z = regions.run(graph, {"x": x}, isa)
        assert torch.equal(y, (-x).bfloat16())
        assert torch.equal(z, x.abs())


ARGUMENTS = {
    "a size": lambda x: F.threshold(x, x.shape[0], 0.5),
    "a truth value": lambda x: F.threshold(x, True, 0.5),
    "a slope that is a size": lambda x: F.leaky_relu(x, x.shape[0]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_numbers_of_calls_that_are_sizes_or_truth_values(name: str) -> None:
    """Gradients read the number as well, and beside another operation they would be fused."""
    torch.compiler.reset()
    torch_ort.reset_counters()
    function = torch.compile(
        lambda x: ARGUMENTS[name](x).exp(), backend="ort", dynamic=True, options={"strict": True}
    )
    for rows in (2, 3):
        x = torch.linspace(-4, 4, 7 * rows).view(rows, 7).requires_grad_()
        (got,) = torch.autograd.grad(function(x).sum(), x)
        (want,) = torch.autograd.grad(ARGUMENTS[name](x).exp().sum(), x)
        torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float32, torch.bool),
    ],
    ids=str,
)
def test_operands_of_two_dtypes_are_fused(
    wide: torch.dtype, narrow: torch.dtype, turned: bool
) -> None:
    """Forward and backward, where PyTorch's kernels would cast; `turned`: columns lie in a row."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y + y).sigmoid()

    def results(call: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list:
        operands = [z.detach().requires_grad_() for z in (x, y) if z.is_floating_point()]
        result = call(*operands, *(z for z in (x, y) if not z.is_floating_point()))
        return [result, *torch.autograd.grad(result.sum(), operands)]

    torch.compiler.reset()
    torch_ort.reset_counters()
    compiled = torch.compile(function, backend="ort", dynamic=True, options={"strict": True})
    for rows in (4, 5):
        x, y = (torch.randn(rows, 7, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        x, y = x.to(wide), y > 0 if narrow is torch.bool else y.to(narrow)
        if turned:
            x = x.t().contiguous().t()
        want = results(function, x.double(), y if narrow is torch.bool else y.double())
        for got, exact in zip(results(compiled, x, y), want, strict=True):
            assert_near(got, exact, 4 * regions.TOLERANCE[got.dtype])
    assert torch_ort.counters()["steps_out"] == torch_ort.counters()["fallbacks"] == 0


# ---- threads and instruction sets


def test_threads_share_the_work() -> None:
    op = BY_OPERANDS[1]
    for shape in ([300000], [500, 700], [3, 200000]):
        graph = graph_of(op, torch.float32, [shape] * 2)
        operands = operands_of(op, torch.float32, [shape] * 2)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check(op, graph, operands, "")


@pytest.mark.parametrize("isa", ISAS)
def test_program_is_of_the_asked_instruction_set(isa: str) -> None:
    graph = graph_of(BY_OPERANDS[0], torch.float32, [["N"]])
    assert f"float {isa}," in regions.program(graph, {"x0": torch.ones(3)}, isa)


def test_the_widest_instruction_set_is_the_default() -> None:
    graph = graph_of(BY_OPERANDS[0], torch.float32, [["N"]])
    assert f"float {ISAS[-1]}," in regions.program(graph, {"x0": torch.ones(3)})


def test_unknown_instruction_set() -> None:
    graph = graph_of(BY_OPERANDS[0], torch.float32, [["N"]])
    words = f"isa: got 'sse9', want one of {', '.join(BUILT_ISAS)}"
    with pytest.raises(UserError, match=words):
        _C.run(graph, {"x0": torch.ones(3)}, _C.SessionOptions(isa="sse9"))
    with pytest.raises(UserError, match=words):
        _C.Session.compile(graph, {}, _C.SessionOptions(isa="sse9"))


@pytest.mark.parametrize("isa", [name for name in BUILT_ISAS if name not in ISAS])
def test_instruction_set_that_the_processor_lacks(isa: str) -> None:
    with pytest.raises(UserError, match=f"isa: this processor does not run '{isa}'"):
        _C.run(
            graph_of(BY_OPERANDS[0], torch.float32, [["N"]]),
            {"x0": torch.ones(3)},
            _C.SessionOptions(isa=isa),
        )
