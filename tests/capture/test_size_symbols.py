"""Sizes as symbols: arithmetic, what is known, what becomes a guard."""

import math

import pytest
import torch

from torch_ort import _C
from torch_ort.core.refusals import HandOver, NoCapture
from torch_ort.pytorch.dispatch_compat import shape_questions_answered
from torch_ort.rules.numbers import conditions_collected, node_of_number


@pytest.fixture(autouse=True)
def as_in_a_recording():
    with shape_questions_answered():
        yield


def symbols(**values: int) -> tuple:
    """Give the table and a size for each name; `n` and what follows it are integers, no sizes."""
    table = _C.SizeSymbols()
    sizes = [table.symbol(name, value, is_size=name < "n") for name, value in values.items()]
    return table, *sizes


def text(size) -> int | str:
    return _C.size_text(size)


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda a, b: a + b, "a + b"),
        (lambda a, b: a - a, 0),
        (lambda a, b: 2 * a * b, "2*a*b"),
        (lambda a, b: (a * b) // b, "a"),
        (lambda a, b: (4 * a) % 4, 0),
        (lambda a, b: (a + 1) // 2, "(a + 1) // 2"),
        (lambda a, b: a**2, "a*a"),
        (lambda a, b: -a + 3, "-a + 3"),
        (lambda a, b: torch.sym_max(a, b), "max(a, b)"),
        (lambda a, b: torch.sym_min(a, 4), "min(a, 4)"),
        (lambda a, b: 7 - a, "-a + 7"),
    ],
)
def test_arithmetic(make, want):
    table, a, b = symbols(a=3, b=5)
    result = make(a, b)
    assert text(result) == want
    assert table.guards() == []


def test_values_are_those_of_the_recorded_call():
    _, a, b = symbols(a=3, b=5)
    assert _C.size_value(a * b + 1) == 16
    assert _C.size_value(7) == 7
    assert _C.evaluate_size(a * b + 1, {"a": 2, "b": 10}) == 21
    assert _C.symbols_in_size(a * b + a) == {"a": 3, "b": 5}
    assert _C.symbols_in_size(7) == {}


def test_a_symbol_without_a_value():
    _, a = symbols(a=3)
    with pytest.raises(_C.InternalError, match="evaluate_size: a has a symbol without a value"):
        _C.evaluate_size(a, {})


def test_a_name_is_given_once():
    table, _ = symbols(a=3)
    with pytest.raises(_C.InternalError, match="sizes: got symbol 'a' twice"):
        table.symbol("a", 4, is_size=True)


@pytest.mark.parametrize(
    ("ask", "answer", "guards"),
    [
        (lambda a, b: a > 2, True, ["(a > 2)"]),
        (lambda a, b: a > 10, False, ["(a <= 10)"]),
        (lambda a, b: a == 3, True, ["(a == 3)"]),
        (lambda a, b: a != 3, False, ["(a == 3)"]),
        (lambda a, b: a == b, False, ["(a != b)"]),
        (lambda a, b: a * b >= 15, True, ["((a * b) >= 15)"]),
        (lambda a, b: a >= 0, True, []),
        (lambda a, b: a < 0, False, []),
        (lambda a, b: a + 1 > 0, True, []),
        (lambda a, b: a == a, True, []),
        (lambda a, b: a // 2 >= 0, True, []),
        (lambda a, b: a % 4 < 4, True, []),
    ],
)
def test_what_the_user_asks_becomes_a_guard(ask, answer, guards):
    table, a, b = symbols(a=3, b=5)
    assert bool(ask(a, b)) is answer
    assert table.guards() == guards


def test_the_same_question_is_one_guard():
    table, a = symbols(a=3)
    for _ in range(3):
        assert a > 1
        assert not a <= 1
    assert table.guards() == ["(a > 1)"]


def test_a_guard_answers_what_follows_from_it():
    table, a = symbols(a=3)
    assert a > 2
    assert a >= 1
    assert a != 0
    assert a * 2 > 4
    assert not a < 3
    assert table.guards() == ["(a > 2)"]


def test_upper_bounds_are_known_as_well():
    table, a = symbols(a=3)
    assert a <= 8
    assert a < 9
    assert not a > 20
    assert 10 - a > 0
    assert table.guards() == ["(a <= 8)"]


def test_an_equal_size_is_read_as_the_first():
    table, a, b = symbols(a=4, b=4)
    product = b * 2
    assert b == a
    assert text(product) == "2*a"
    assert text(b) == "a"
    assert _C.same_sizes([a, b], [b, a])
    assert table.guards() == ["(a == b)"]


def test_a_size_that_equals_a_constant_is_one():
    _, a, b = symbols(a=4, b=5)
    assert a == 4
    assert text(a * b) == "4*b"
    assert text(a) == 4


def test_a_multiple_that_equals_a_constant():
    _, a = symbols(a=4)
    assert 2 * a == 8
    assert text(a) == 4


def test_equal_products_are_equal_factors():
    """Rows of tokens and rows of their labels: the engine fuses across what it knows equal."""
    table, a, b, c, d = symbols(a=2, b=8, c=2, d=8)
    assert a * b == c * d
    assert (text(c), text(d)) == ("a", "b")
    assert table.guards() == ["((a * b) == (c * d))", "(a == c)", "(b == d)"]


def test_a_factor_of_both_products_says_nothing():
    table, a, b = symbols(a=4, b=6)
    assert a * b == a * 6
    assert text(b) == 6
    assert text(a) == "a"
    assert table.guards() == ["((a * b) == (6 * a))", "(b == 6)"]


def test_factors_of_products_without_elements_stay():
    table, a, b = symbols(a=0, b=6)
    assert a * b == a * 7
    assert text(b) == "b"
    assert len(table.guards()) == 1


def test_equal_products_of_other_factors_stay():
    _, a, b, c, d = symbols(a=2, b=8, c=4, d=4)
    assert a * b == c * d
    assert (text(c), text(d)) == ("c", "d")


def test_an_integer_of_it_is_a_guard():
    table, a = symbols(a=3)
    assert int(a) == 3
    assert text(a) == 3
    assert table.guards() == ["(a == 3)"]


def test_an_index_is_an_integer():
    table, a = symbols(a=2)
    assert "xyz"[a] == "z"
    assert table.guards() == ["(a == 2)"]


def test_what_operators_ask_about_layouts_is_no_guard():
    """C++ asks whether dims are 1 or 0, to choose among ways to the same numbers."""
    table, a, b = symbols(a=1, b=0)
    x = torch.empty_strided((a, b, 4), (b * 4, 4, 1), device="meta")
    assert x.is_contiguous()
    assert x.is_contiguous(memory_format=torch.contiguous_format)
    assert table.guards() == []


def test_what_operators_ask_about_channels_is_a_guard():
    table, a = symbols(a=6)
    x = torch.empty_strided((5, a), (a, 1), device="meta")
    of_norm = [torch.empty(6, device="meta") for _ in range(4)]
    torch.batch_norm(x, *of_norm, True, 0.1, 1e-5, False)
    assert table.guards() == ["(a == 6)"]


def test_an_integer_that_is_no_size_may_be_negative():
    table, n = symbols(n=3)
    assert n >= 0
    assert table.guards() == ["(n >= 0)"]


def test_tables_do_not_mix():
    (_, a), (_, b) = symbols(a=3), symbols(b=3)
    with pytest.raises(RuntimeError, match="a symbol of another trace"):
        bool(a == b)


def test_floats_of_sizes_that_are_whole_numbers():
    table, a = symbols(a=3)
    assert text(math.floor(torch.sym_float(a) * 2.0)) == "2*a"
    assert text(math.ceil(torch.sym_float(a) + 1.0)) == "a + 1"
    assert table.guards() == []
    assert float(a) == 3.0
    assert text(a) == 3


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda a, b: a / (2 * a), 0.5),
        (lambda a, b: (a * b * 3) / (b * a), 3.0),
        (lambda a, b: ((a + 1) // 2 + b) / (2 * ((a + 1) // 2 + b)), 0.5),
        (lambda a, b: a / a * 0.5, 0.5),
        (lambda a, b: -(a / (4 * a)) + 1.5, 1.25),
        (lambda a, b: 2.0 ** (a / (2 * a)), 2.0**0.5),
        (lambda a, b: torch.sym_max(a / (2 * a), 0.75), 0.75),
        (lambda a, b: a / (2 * a) / 0.25, 2.0),
    ],
)
def test_floats_that_are_no_whole_numbers(make, want):
    table, a, b = symbols(a=3, b=5)
    number = make(a, b)
    assert _C.known_float(number) == want
    assert (float(number), int(number)) == (want, int(want))
    assert number > want - 1
    assert not number > want
    assert all("!= 0" in guard for guard in table.guards())


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a / b,
        lambda a, b: torch.sym_float(a) * 1.5,
        lambda a, b: 1 / a,
        lambda a, b: (a + 1) / a,
        lambda a, b: (a / b) * (b / a),
        lambda a, b: -(a / b) + 2.0 ** (b / a) - 0.25,
        lambda a, b: torch.sym_max(a / b, torch.sym_min(b / a, a)) // 0.5,
        lambda a, b: (a * 0.5) % (b / 3),
        lambda a, b: 3 * (a / (2 * a)) / (torch.sym_float(b) / a),
        lambda a, b: (a - b) / 4,
    ],
)
def test_floats_that_depend_on_sizes(make):
    table, a, b = symbols(a=3, b=5)
    with conditions_collected() as asked:
        number = make(a, b)
        held = node_of_number(number)
        assert _C.known_float(number) is None
        for values in ({"a": 3, "b": 5}, {"a": 8, "b": 6}):
            assert held.of({}, values) == pytest.approx(make(**values))
        assert not asked
        assert float(number) == pytest.approx(make(3, 5))
        assert asked.hold({}, {"a": 3, "b": 5})
    assert "(a == 3)" not in table.guards()


@pytest.mark.parametrize("ask", [float, int, math.floor, math.ceil, bool, lambda x: bool(x > 2)])
@pytest.mark.parametrize("make", [lambda a, b: a / b, lambda a, b: (a - b) / a * 3])
def test_what_is_asked_of_a_float_is_a_condition(make, ask):
    table, a, b = symbols(a=3, b=5)
    with conditions_collected() as asked:
        assert ask(make(a, b)) == pytest.approx(ask(make(3, 5)))
    for values in ({"a": 3, "b": 5}, {"a": 50, "b": 6}):
        assert asked.hold({}, values) == (ask(make(**values)) == ask(make(3, 5)))
    assert table.guards() == []


def test_no_float_of_a_size_that_data_tells_is_asked_for():
    table = _C.SizeSymbols()
    with conditions_collected():
        share = 1 / table.unbacked("t0", 4)
        with pytest.raises(HandOver, match=r"truediv\(1, t0\) depends on numbers"):
            float(share)


def test_fractions_are_rounded_as_pythons_are():
    _, a = symbols(a=3)
    half = -(a / (2 * a))
    assert (math.floor(half), math.ceil(half), int(half)) == (-1, 0, 0)


def test_a_quotient_of_nothing_is_an_error_of_python():
    table, a = symbols(a=0)
    with pytest.raises(NoCapture, match="Python raises ZeroDivisionError"):
        a / (2 * a)
    assert table.guards() == []


def test_the_text_of_an_integer_is_itself():
    assert text(5) == 5
    assert _C.contiguous_strides([2, 3, 4]) == [12, 4, 1]
    assert _C.contiguous_strides([2, 0, 4]) == [4, 4, 1]
    assert _C.contiguous_strides([]) == []


def test_strides_of_symbols():
    _, a, b = symbols(a=3, b=5)
    assert [text(s) for s in _C.contiguous_strides([a, b, 4])] == ["4*b", 4, 1]
    loud = [torch.sym_max(b, 1) * 4, 4, 1]
    assert [text(s) for s in _C.plain_strides(loud)] == ["4*b", 4, 1]


def test_conditions_as_text():
    _, a, b = symbols(a=3, b=5)
    assert _C.condition_text(a < b) == "a < b"
    assert _C.condition_text(True) == 1
    assert _C.known_condition(a < b) is None
    assert _C.known_condition(a >= 0) is True
    assert _C.known_condition(torch.sym_not(a >= 0)) is False
