# Dims: text, canonical form, and arithmetic against Python's own.
from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

dims = _C.testing


@pytest.mark.parametrize(
    ("text", "want"),
    [
        # Constants fold with Python's rounding.
        ("2 + 3*4", "14"),
        ("-7 // 2", "-4"),
        ("7 // -2", "-4"),
        ("-7 % 3", "2"),
        ("7 % -3", "-2"),
        ("2**3**2", "512"),
        ("-2**2", "-4"),
        ("0**0", "1"),
        ("min(3, -1) + max(3, -1)", "2"),
        ("1 < 2", "1"),
        ("!(1 < 2)", "0"),
        ("2 & 0 | 3", "1"),
        # Neutral elements.
        ("N + 0", "N"),
        ("1*N", "N"),
        ("0*N", "0"),
        ("N // 1", "N"),
        ("N % 1", "0"),
        ("N**1", "N"),
        ("N**0", "1"),
        ("0 // N", "0"),
        # Like terms and constant factors are collected.
        ("N + T - N", "T"),
        ("N + N", "2*N"),
        ("(N + 1) - 1", "N"),
        ("2*(N + 1)", "2*N + 2"),
        ("1 - N", "-N + 1"),
        ("N*T - T*N", "0"),
        ("N**2 - N*N", "0"),
        ("3*(N + 1)*T", "3*T*(N + 1)"),
        # Exact divisions cancel.
        ("N*128 // 128", "N"),
        ("(N + 1)*128 // 128", "N + 1"),
        ("N*T*64 // (T*64)", "N"),
        ("4*N % 2", "0"),
        ("N // 2 * 2", "2*(N // 2)"),
        # Conditions.
        ("N == N", "1"),
        ("N < N", "0"),
        ("max(N, N)", "N"),
        ("max(1, N)", "max(N, 1)"),
        ("(N < 2) & 1", "N < 2"),
        ("(N < 2) | 1", "1"),
        ("!!(N < 2)", "N < 2"),
        ("-9223372036854775808", "-9223372036854775808"),
    ],
)
def test_canonical_form(text: str, want: str) -> None:
    assert dims.dim_parse_str(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "2*N + T // 4", "N - 2*T - 1", "-N + T", "N*(T + 1)", "N*(T // 4)", "N // T // 4",
        "N // (2*T)", "(N + 1) // 2", "N*T // 2", "-N // 2", "N % 8 - 1", "N // -2", "(-2)**N",
        "(N + 1)**T", "(N**T)**T", "N**T**T", "2**-N", "N**(T - 1)", "min(N, T + 1)", "!N",
        "!(N < T)", "!(N & T)", "(N == 1) & (T == 1)", "X | N & T", "N & (T | X)", "N + 1 < T",
        "X == (N < T)", "_a.b_1 + x.y",
    ],
)  # fmt: skip
def test_text_has_no_spare_parentheses(text: str) -> None:
    assert dims.dim_parse_str(text) == text
    for start, character in enumerate(text):
        if character != "(" or (start and text[start - 1].isalpha()) or "// 4)" in text:
            continue
        end = matching(text, start)
        without = text[:start] + text[start + 1 : end] + text[end + 1 :]
        try:
            assert not dims.dim_equal(without, text), without
        except _C.UserError:
            continue


def matching(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got the end of the text, want an integer, a symbol or"),
        ("N +", "bad expression 'N \\+': got the end of the text"),
        ("(N", r"got the end of the text, want '\)'"),
        ("N)", r"got '\)' at 1, want an operator or the end"),
        ("a b", "got 'b' at 2, want an operator or the end"),
        ("$", r"got '\$' at 0, want an integer, a symbol"),
        ("3x", "got 'x' at 1, want an operator or the end"),
        ("1.5", r"got '\.' at 1"),
        ("a < b < c", "got '<' at 6, want an operator or the end"),
        ("floor(N)", "unknown function in 'floor.N.': got 'floor', want min or max"),
        ("min(N)", r"got '\)' at 5, want ','"),
        ("9223372036854775808", "want a 64-bit integer"),
        ("9223372036854775807 + 1", "overflow: got 9223372036854775807 . 1, want a result of 64"),
        ("2**63", "overflow"),
        ("-9223372036854775808 // -1", "overflow"),
        ("(" * 300 + "N" + ")" * 300, "nested too deep: got more than 200 levels"),
        ("-" * 300 + "N", "nested too deep"),
        ("N+" * 3000 + "N", "too long: got 6001 characters, want at most 4096"),
    ],
)
def test_bad_text(text: str, words: str) -> None:
    with pytest.raises(_C.UserError, match="dim: .*" + words):
        dims.dim_parse_str(text)


@pytest.mark.parametrize(
    ("text", "symbols", "words"),
    [
        ("N // T", {"N": 1, "T": 0}, "division by zero: got 1 // 0"),
        ("N % T", {"N": 1, "T": 0}, "division by zero: got 1 % 0"),
        ("1 // 0", {}, "division by zero"),
        ("N**T", {"N": 2, "T": -1}, r"negative power: got 2\*\*-1, want an integer"),
        ("N*T", {"N": 2**62, "T": 4}, r"overflow: got 4611686018427387904 \* 4"),
    ],
)
def test_evaluation_errors(text: str, symbols: dict[str, int], words: str) -> None:
    with pytest.raises(_C.UserError, match="dim: " + words):
        dims.dim_evaluate(text, symbols)


def test_unbound_symbols_have_no_value() -> None:
    assert dims.dim_evaluate("N + T", {"N": 1}) is None
    assert dims.dim_evaluate("N - N", {}) == 0


def test_symbols_stand_once() -> None:
    assert dims.dim_symbols("T*N + max(N, T) // N") == ["N", "T"]


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: int(bool(a) or bool(b)),
}

# An expression: its text, and its value for given symbols, worked out by Python.
Expression = tuple[str, Callable[[dict[str, int]], int]]


def binary(sign: str, a: Expression, b: Expression) -> Expression:
    apply = BINARY[sign]
    return f"({a[0]}) {sign} ({b[0]})", lambda env: apply(a[1](env), b[1](env))


def function(name: str, a: Expression, b: Expression) -> Expression:
    apply = {"min": min, "max": max}[name]
    return f"{name}({a[0]}, {b[0]})", lambda env: apply(a[1](env), b[1](env))


def compound(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.builds(binary, st.sampled_from(sorted(BINARY)), inner, inner),
        st.builds(binary, st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
        st.builds(function, st.sampled_from(["min", "max"]), inner, inner),
        st.builds(
            lambda a, k: (f"({a[0]})**{k}", lambda env: a[1](env) ** k), inner, st.integers(0, 5)
        ),
        st.builds(lambda a: (f"-({a[0]})", lambda env: -a[1](env)), inner),
        st.builds(lambda a: (f"!({a[0]})", lambda env: int(not a[1](env))), inner),
    )


leaves = st.one_of(
    st.integers(-300, 300).map(lambda n: (f"({n})", lambda env: n)),
    st.sampled_from("abc").map(lambda name: (name, lambda env: env[name])),
)
expressions = st.recursive(leaves, compound, max_leaves=8)
environments = st.fixed_dictionaries({name: st.integers(-40, 40) for name in "abc"})


def parsed(text: str) -> str | None:
    try:
        return dims.dim_parse_str(text)
    except _C.UserError as error:
        if "overflow" not in str(error):
            raise
        return None


@settings(max_examples=600, deadline=None)
@given(expressions, environments)
def test_arithmetic_is_that_of_python(expression: Expression, env: dict[str, int]) -> None:
    text, value = expression
    try:
        want = value(env)
    except ZeroDivisionError:
        return  # x // y * 0 may be 0 before y is known
    if parsed(text) is None:
        return
    try:
        assert dims.dim_evaluate(text, env) == want
    except _C.UserError as error:
        if "overflow" not in str(error):
            raise


@settings(max_examples=600, deadline=None)
@given(expressions)
def test_text_reads_back_as_the_same_dim(expression: Expression) -> None:
    text = parsed(expression[0])
    if text is None:
        return
    assert dims.dim_parse_str(text) == text
    assert dims.dim_equal(text, expression[0])


@settings(max_examples=200, deadline=None)
@given(expressions, expressions, expressions)
def test_order_of_operands_does_not_matter(a: Expression, b: Expression, c: Expression) -> None:
    for sign in "+*":
        orders = [
            f"(({a[0]}) {sign} ({b[0]})) {sign} ({c[0]})",
            f"({a[0]}) {sign} (({c[0]}) {sign} ({b[0]}))",
            f"(({c[0]}) {sign} ({a[0]})) {sign} ({b[0]})",
        ]
        if all(parsed(order) is not None for order in orders):
            assert dims.dim_equal(orders[0], orders[1])
            assert dims.dim_equal(orders[0], orders[2])


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abN012 ()+-*/%<>=!&|,.minx", max_size=40))
def test_any_text_parses_or_raises_user_error(text: str) -> None:
    try:
        canonical = dims.dim_parse_str(text)
    except _C.UserError:
        return
    assert dims.dim_equal(canonical, text)


@pytest.mark.parametrize(
    ("shape", "numel", "strides"),
    [
        ("[]", "1", "[]"),
        ("[2,3,4]", "24", "[12,4,1]"),
        ("[N,128]", "128*N", "[128,1]"),
        ("[2,0,4]", "0", "[4,4,1]"),
        ("[N,T + 1,8]", "8*N*(T + 1)", "[8*T + 8,8,1]"),
        ("[max(N, 2),2]", "2*max(N, 2)", "[2,1]"),
    ],
)
def test_shapes(shape: str, numel: str, strides: str) -> None:
    assert dims.shape_str(shape) == shape
    assert dims.shape_numel(shape) == numel
    assert dims.shape_strides(shape) == strides


@pytest.mark.parametrize("text", ["", "2,3", "[2,3", "[2,,3]", "[,]"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(_C.UserError, match=r"dim: bad (list|expression)"):
        dims.shape_str(text)


def test_dtypes_are_those_of_torch_and_onnx() -> None:
    import onnx
    import torch

    for name, (number, size) in dims.dtype_sizes().items():
        assert getattr(torch, name).itemsize == size
        assert dims.dtype_from_name(name) == number
        array_type = onnx.helper.tensor_dtype_to_np_dtype(number)
        assert array_type.itemsize == size
    with pytest.raises(_C.Unsupported, match="dtype: got 'float17', want one that ONNX has, like"):
        dims.dtype_from_name("float17")
