"""Ops that compute element by element."""

from __future__ import annotations

import onnx
import pytest
import torch
from driver import ELEMENT_TYPES, Case, check, floats, ints, run, with_half

import torch_ort

X = floats(2, 3)
POSITIVE = X.abs() + 0.5
UNIT = torch.tanh(X) * 0.9
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, 0.5, float("inf"), float("-inf"), float("nan")])
BOOLS = torch.tensor([[True, False, True], [False, False, True]])

UNARY = [
    ("Abs", torch.abs, X),
    ("Acos", torch.acos, UNIT),
    ("Acosh", torch.acosh, POSITIVE + 1),
    ("Asin", torch.asin, UNIT),
    ("Asinh", torch.asinh, X),
    ("Atan", torch.atan, X),
    ("Atanh", torch.atanh, UNIT),
    ("Ceil", torch.ceil, SPECIAL),
    ("Cos", torch.cos, X),
    ("Cosh", torch.cosh, X),
    ("Erf", torch.erf, X),
    ("Exp", torch.exp, X),
    ("Floor", torch.floor, SPECIAL),
    ("IsInf", torch.isinf, SPECIAL),
    ("IsNaN", torch.isnan, SPECIAL),
    ("Log", torch.log, POSITIVE),
    ("Neg", torch.neg, SPECIAL),
    ("Reciprocal", torch.reciprocal, POSITIVE),
    ("Relu", torch.relu, SPECIAL),
    ("Round", torch.round, SPECIAL),
    ("Sigmoid", torch.sigmoid, X),
    ("Sign", torch.sign, X),
    ("Sin", torch.sin, X),
    ("Sinh", torch.sinh, X),
    ("Sqrt", torch.sqrt, POSITIVE),
    ("Tan", torch.tan, X),
    ("Tanh", torch.tanh, X),
]
ARITHMETIC = [("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul), ("Div", torch.div)]
COMPARISONS = [
    ("Equal", torch.eq),
    ("Greater", torch.gt),
    ("GreaterOrEqual", torch.ge),
    ("Less", torch.lt),
    ("LessOrEqual", torch.le),
]
SCALAR = torch.tensor(0.75)

CASES = [
    *(Case(op, [x], eager) for op, eager, x in UNARY),
    *(Case(op, [floats(0, 3)], eager, note="empty") for op, eager, _ in UNARY[:3]),
    Case("Tanh", [floats(4, 6)], torch.tanh, dims={0: ["N", "M"]}),
    Case("Exp", [torch.tensor(0.5)], torch.exp),
    Case("Neg", [ints(1, -2)], torch.neg),
    Case("Abs", [ints(1, -2, dtype=torch.int8)], torch.abs),
    Case("Relu", [ints(1, -2)], torch.relu, opset=14),
    Case("Not", [BOOLS], torch.logical_not, dims={0: ["N", 3]}),
    Case("BitwiseNot", [ints(1, -2)], torch.bitwise_not),
    *(Case(op, [floats(2, 3), floats(3)], eager) for op, eager in ARITHMETIC),
    *(Case(op, [floats(4, 1, 3), floats(5, 3)], eager, dims={0: ["N", 1, 3], 1: ["M", 3]}) for op,
     eager in ARITHMETIC),
    Case("Add", [floats(4, 3), floats(4, 3)], torch.add, dims={0: ["N", 3], 1: ["N", "M"]}),
    Case("Add", [floats(0, 3), floats(1, 1)], torch.add, note="empty"),
    *(Case(op, [X, SCALAR], lambda x, _, f=eager: f(x, 0.75), known=[1], note="number") for op,
     eager in ARITHMETIC),
    *(Case(op, [SCALAR, X], eager, known=[0], note="number first") for op, eager in ARITHMETIC),
    Case("Add", [X, torch.full((1, 1, 1), 0.75)], torch.add, known=[1], note="has dims"),
    Case("Mul", [SCALAR, torch.tensor(2.0)], torch.mul, known=[0, 1], note="two numbers"),
    Case("Add", [ints(1, 2, 3), ints(5)], torch.add),
    Case("Mul", [ints(1, 2, dtype=torch.int16), ints(5, 6, dtype=torch.int16)], torch.mul,
        opset=14),
    Case("Sub", [ints(1, 2), torch.tensor(3)], lambda x, _: x - 3, known=[1]),
    Case("Div", [ints(7, -7, 6), ints(2)], lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        reference=False, note="integers"),
    Case("Div", [ints(7, -7, 6), torch.tensor(2)], lambda a,
        _: torch.div(a, 2, rounding_mode="trunc"), known=[1], reference=False,
        note="integer number"),
    Case("Pow", [POSITIVE, floats(3)], torch.pow),
    Case("Pow", [X, torch.tensor(2.0)], lambda x, _: x**2, known=[1]),
    Case("Pow", [POSITIVE, torch.tensor(0.5)], lambda x, _: x**0.5, known=[1]),
    Case("Pow", [torch.tensor(2.0), X], lambda _, x: 2.0**x, known=[0]),
    Case("Pow", [ints(1, 2, 3), torch.tensor(2)], lambda x, _: x**2, known=[1]),
    Case("Pow", [X, torch.tensor(3)], lambda x, _: x**3, known=[1], note="integer exponent"),
    Case("Pow", [POSITIVE, ints(3)], torch.pow, note="integer exponents"),
    Case("Pow", [ints(2, 3, -4), torch.tensor([0.5, 2.0, 3.0])],
        lambda x, y: x.pow(y).to(x.dtype), half=False, note="float exponents"),
    Case("Pow", [ints(2, 3), torch.tensor(2.0)], lambda x, _: (x**2.0).to(x.dtype), known=[1],
        half=False, note="a float exponent"),
    Case("Mod", [ints(7, -7, 5), ints(3, 3, -3)], torch.remainder),
    Case("Mod", [ints(7, -7), torch.tensor(3)], lambda x, _: x % 3, known=[1]),
    Case("Mod", [X, POSITIVE], torch.fmod, {"fmod": 1}),
    *(Case(op, [X, X.flip(0)], eager) for op, eager in COMPARISONS),
    *(Case(op, [SPECIAL, SPECIAL.flip(0)], eager) for op, eager in COMPARISONS),
    *(Case(op, [X, SCALAR], lambda x, _, f=eager: f(x, 0.75), known=[1], note="number") for op,
     eager in COMPARISONS),
    Case("Equal", [ints(1, 2), ints(1, 3)], torch.eq),
    Case("Equal", [BOOLS, BOOLS[:1]], torch.eq),
    Case("Equal", [torch.tensor(2), ints(1, 2)], torch.eq, known=[0]),
    Case("Less", [torch.tensor(2), ints(1, 2, 3)], torch.lt, known=[0]),
    Case("And", [BOOLS, BOOLS[1:]], torch.logical_and, dims={0: ["N", 3]}),
    Case("Or", [BOOLS, BOOLS[1:]], torch.logical_or),
    Case("Xor", [BOOLS, BOOLS[1:]], torch.logical_xor),
    Case("And", [BOOLS, torch.tensor(True)], torch.logical_and, known=[1]),
    Case("BitwiseAnd", [ints(6, 5), ints(3)], torch.bitwise_and),
    Case("BitwiseOr", [ints(6, 5), torch.tensor(3)], lambda x, _: x | 3, known=[1]),
    Case("BitwiseXor", [ints(6, 5), ints(3)], torch.bitwise_xor),
    Case("Min", [X, floats(3)], torch.minimum, dims={0: ["N", 3]}),
    Case("Max", [SPECIAL, SPECIAL.flip(0)], torch.maximum),
    Case("Max", [X], torch.clone, note="one input"),
    Case("Max", [X, floats(3), floats(2, 1)], lambda a, b, c: a.maximum(b).maximum(c),
        dims={0: ["N", 3], 2: ["N", 1]}),
    Case("Min", [ints(1, 5), ints(3, 3)], torch.minimum),
    Case("Where", [BOOLS, X, floats(3)], torch.where, dims={0: ["N", 3], 1: ["N", 3]}),
    Case("Where", [BOOLS, SCALAR, X], torch.where, known=[1]),
    Case("Where", [BOOLS[:1], X, SCALAR], torch.where, known=[2]),
    Case("Where", [BOOLS, ints(1, 2, 3), ints(4)], torch.where),
    Case("Where", [BOOLS, BOOLS, ~BOOLS], torch.where),
    Case("Clip", [X, SCALAR * -1, SCALAR], lambda x, *_: x.clamp(-0.75, 0.75), known=[1, 2]),
    Case("Clip", [SPECIAL, SCALAR], lambda x, *_: x.clamp(min=0.75), known=[1], note="low"),
    Case("Clip", [X, None, SCALAR], lambda x, *_: x.clamp(max=0.75), known=[2]),
    Case("Clip", [X], torch.clone),
    Case("Clip", [X, SCALAR * -1, SCALAR], torch.clamp, note="not known"),
    Case("Clip", [ints(1, 5, 9), torch.tensor(2), torch.tensor(6)], lambda x, *_: x.clamp(2, 6),
        known=[1, 2]),
    *(Case("Cast", [x], lambda x, t=to: x.to(t, copy=True), {"to": ELEMENT_TYPES[to]}, half=False,
     opset=13, note=str(to)) for x in (torch.tensor([[0.0, 1.75, -2.5]]), ints(0, 1, 100),
     BOOLS) for to in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
def test_what_is_beyond_a_float_of_8_bits_is_its_greatest_number(name: str) -> None:
    to = getattr(torch, f"float8_{name}")
    x = torch.tensor([0.3, 1e6, -1e6, float("inf"), float("nan")])
    number = getattr(onnx.TensorProto, f"FLOAT8{name.upper()}")
    (got,) = run(Case("Cast", [x], None, {"to": number}, opset=19))
    greatest = torch.finfo(to).max
    assert got.dtype == to
    want = torch.tensor([0.3]).to(to).float().tolist()
    assert got.float().tolist()[:4] == [*want, greatest, -greatest, greatest]
    assert got.float()[4].isnan()


def test_two_symbols_that_may_be_one_have_no_known_shape() -> None:
    from driver import one_node_model, read

    case = Case("Add", [floats(4, 3), floats(4, 3)], None, dims={0: ["N", 3], 1: ["M", 3]})
    assert read(one_node_model(case, 1, symbolic=True)).types()["y0"][:2] == ("float32", None)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("Add", [floats(2), floats(3)], None), "Add: dims differ: got 3, want 2"),
        (Case("Add", [floats(2), ints(2, 3)], None), "dtype of input 1: got int64, want float32"),
        (Case("Cast", [floats(2)], None), "attributes of node 'y0': got too few, want 'to'"),
        (Case("Add", [floats(2)], None), "Add: inputs of node '.*': got 1, want at least 2"),
    ],
)
def test_wrong_node_is_an_error(case: Case, message: str) -> None:
    with pytest.raises(torch_ort.UserError, match=message):
        run(case)


def test_unsupported_form_names_the_node() -> None:
    case = Case("IsInf", [floats(2)], None, {"detect_negative": 0})
    with pytest.raises(torch_ort.Unsupported, match=r"detect_negative: got 0, want 1 \(node '.+'"):
        run(case)


def test_op_of_an_older_opset_is_refused() -> None:
    from torch_ort import _C

    node = onnx.helper.make_node("Softmax", ["x"], ["y"])
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy"
    )
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "old", [x], [y]),
        opset_imports=[onnx.helper.make_opsetid("", 12)],
        ir_version=10,
    )
    graph = _C.Graph.from_onnx(model.SerializeToString())
    with pytest.raises(torch_ort.Unsupported, match="opset of the graph: got 12, want 13 or newer"):
        _C.run(graph, {"x": floats(2, 3)})
