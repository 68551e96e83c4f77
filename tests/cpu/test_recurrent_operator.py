"""torch_ort::recurrent, one layer in one direction, against torch.nn's layers in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from recurrent_kinds import KINDS
from torch import Tensor
from torch.nn import functional

from tests.cpu.regions import crossed
from torch_ort import _C

recurrent = torch.ops.torch_ort.recurrent
pytestmark = pytest.mark.ort_only

CELLS = tuple(KINDS)
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
CLOSE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


@pytest.fixture
def of_isa() -> Iterator[Callable[[str], None]]:
    """Return a function that lets kernels be those of an instruction set."""
    yield _C.testing.plant_isa
    _C.testing.plant_isa(None)


class Given(NamedTuple):
    """What the operator takes: the sequence's part of the gates, and the rest."""

    sequence: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    memory: Tensor | None

    def run(self, cell: str, reverse: bool = False, keeps: bool = False) -> list[Tensor]:
        output, last, memory, _ = recurrent(*self, cell, reverse, keeps)
        return [output, last, memory] if cell == "lstm" else [output, last]


def given(cell: str, steps: int, batch: int, width: int, dtype=torch.float32) -> Given:
    torch.manual_seed(0)

    def leaf(*sizes: int, scale: float = 1) -> Tensor:
        return (torch.randn(*sizes, dtype=dtype) * scale).requires_grad_()

    gates = GATES[cell] * width
    return Given(
        leaf(steps, batch, gates), leaf(gates, width, scale=width**-0.5),
        leaf(width) if cell == "gru" else None, leaf(batch, width),
        leaf(batch, width) if cell == "lstm" else None,
    )  # fmt: skip


def through_layer(cell: str, it: Given, reverse: bool) -> list[Tensor]:
    """Let torch.nn's layer compute it: its input is the sequence, by a weight of ones."""
    width = it.state.shape[1]
    layer = KINDS[cell](it.sequence.shape[2], width, bidirectional=True).to(it.state.dtype)
    suffix = "_reverse" if reverse else ""
    names = [name + suffix for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    none = torch.zeros(GATES[cell] * width, dtype=it.state.dtype)
    inside = none if it.bias is None else functional.pad(it.bias, (2 * width, 0))
    values = [torch.eye(len(none), dtype=none.dtype), it.weight, none, inside]
    state = torch.stack([it.state, it.state])
    states = state if it.memory is None else (state, torch.stack([it.memory, it.memory]))
    replaced = dict(zip(names, values, strict=True))
    output, ends = torch.func.functional_call(layer, replaced, (it.sequence, states))
    side = int(reverse)
    half = output[..., side * width : (side + 1) * width]
    return [half, *(end[side] for end in (ends if cell == "lstm" else [ends]))]


def by_formula(cell: str, it: Given) -> Tensor:
    """Give the states of all times. Unlike the layer it adds no zeros times what is infinite."""
    state, memory, states = it.state, it.memory, []
    for x in it.sequence:
        gates = state @ it.weight.t()
        if cell == "gru":
            (r, z, n), (x_r, x_z, x_n) = gates.chunk(3, 1), x.chunk(3, 1)
            reset, update = (x_r + r).sigmoid(), (x_z + z).sigmoid()
            fresh = (x_n + reset * (n + it.bias)).tanh()
            state = fresh + update * (state - fresh)
        elif cell == "lstm":
            i, f, g, o = (x + gates).chunk(4, 1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
        else:
            state = (x + gates).tanh() if cell == "rnn_tanh" else (x + gates).relu()
        states.append(state)
    return torch.stack(states)


def leaves(it: Given) -> list[Tensor]:
    return [tensor for tensor in it if tensor is not None]


ISAS = _C.isa_names()
SIZES = [(5, 3, 7), (1, 1, 1), (4, 13, 64), (3, 2, 40), (6, 9, 17)]


@crossed(isa=ISAS, cell=CELLS, reverse=[False, True], sizes=SIZES, dtype=CLOSE)
def test_results_and_gradients(cell, reverse, sizes, dtype, isa, of_isa):
    of_isa(isa)
    exact = given(cell, *sizes, dtype=torch.float64)
    want = through_layer(cell, exact, reverse)
    tangents = [torch.randn_like(each) for each in want]
    want_gradients = torch.autograd.grad(want, leaves(exact), tangents)
    ours = Given(
        *(each if each is None else each.detach().to(dtype).requires_grad_() for each in exact)
    )
    got = ours.run(cell, reverse)
    rounded = [each.to(dtype) for each in tangents]
    got_gradients = torch.autograd.grad(got, leaves(ours), rounded)
    for a, b in zip([*got, *got_gradients], [*want, *want_gradients], strict=True):
        torch.testing.assert_close(a, b.to(dtype), **CLOSE[dtype])


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gradients_of_one_result(cell, only):
    it = given(cell, 4, 3, 6, torch.float64)
    want, got = through_layer(cell, it, False), it.run(cell)
    if only == len(got):
        pytest.skip("of an LSTM alone")
    inputs = leaves(it)
    torch.testing.assert_close(
        torch.autograd.grad(got[only].sin().sum(), inputs),
        torch.autograd.grad(want[only].sin().sum(), inputs),
    )


@pytest.mark.parametrize("asked", range(3))
def test_gradients_of_one_argument(asked):
    """The sequence, the weight or the bias."""
    whole = given("gru", 4, 3, 6, torch.float64)
    (want,) = torch.autograd.grad(whole.run("gru")[0].sin().sum(), [whole[asked]])
    it = Given(*(each if each is None else each.detach() for each in whole))
    it[asked].requires_grad_()
    (got,) = torch.autograd.grad(it.run("gru")[0].sin().sum(), [it[asked]])
    assert torch.equal(got, want)


@pytest.mark.parametrize("cell", CELLS)
def test_the_same_bits_for_any_number_of_threads(cell):
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            it = given(cell, 9, 23, 48)
            results = it.run(cell)
            loss = sum(each.sin().sum() for each in results)
            found.append([*results, *torch.autograd.grad(loss, leaves(it))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_without_gradients_nothing_is_kept(cell):
    it = given(cell, 4, 3, 6)
    want = it.run(cell)
    with torch.no_grad():
        *got, kept = recurrent(*it, cell, False, False)
    assert kept.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=False))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("number", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("isa", ISAS)
def test_large_numbers(cell, number, isa, of_isa):
    of_isa(isa)
    it = given(cell, 3, 3, 5)
    with torch.no_grad():
        it.sequence[1, 0] = number
        it.sequence[1, 1] = -number
        torch.testing.assert_close(
            it.run(cell)[0], by_formula(cell, it), equal_nan=True, **CLOSE[torch.float32]
        )


@pytest.mark.parametrize("cell", CELLS)
def test_no_sequences(cell):
    it = given(cell, 3, 0, 5)
    results = it.run(cell)
    assert results[0].shape == (3, 0, 5)
    gradients = torch.autograd.grad(sum(each.sum() for each in results), leaves(it))
    assert torch.equal(gradients[1], torch.zeros_like(it.weight))


@pytest.mark.parametrize("cell", CELLS)
def test_what_lies_otherwise_in_memory(cell):
    dense = given(cell, 4, 3, 6)

    def apart(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.stack([tensor.detach(), tensor.detach()], -1)[..., 0].requires_grad_()

    spread = Given(*map(apart, dense))
    for a, b in zip(spread.run(cell), dense.run(cell), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("reverse", [False, True])
def test_captures_learn_the_forms_of_its_results(cell, reverse):
    it = given(cell, 4, 3, 6)
    torch.library.opcheck(recurrent.default, (*it, cell, reverse, True))
    output, last, memory, kept = recurrent(*it, cell, reverse, True)
    tangents = (output, last, memory if cell == "lstm" else None)
    arguments = (*tangents, it.weight, it.state, it.memory, output, kept, cell, reverse)
    plain = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
    torch.library.opcheck(torch.ops.torch_ort.recurrent_backward.default, tuple(plain))


def test_gradients_are_not_differentiated_again():
    it = given("gru", 4, 3, 6)
    (gradient,) = torch.autograd.grad(it.run("gru")[0].sum(), [it.sequence], create_graph=True)
    with pytest.raises(RuntimeError, match="torch_ort::recurrent_backward is not implemented"):
        gradient.sum().backward()


REFUSED = {
    "cell: got elman, want lstm, gru, rnn_tanh or rnn_relu": lambda it: ("elman", it),
    "a sequence of 2 dims and a state of 2, want 3 and 2": lambda it: (
        "lstm", it._replace(sequence=it.sequence[0])),
    r"sequence: got sizes \[4, 2, 24\], want \[4, 3, 24\]": lambda it: (
        "lstm", it._replace(sequence=it.sequence[:, 1:])),
    r"weight: got sizes \[18, 6\], want \[24, 6\]": lambda it: (
        "lstm", it._replace(weight=it.weight[:18])),
    r"memory: got sizes \[2, 6\], want \[3, 6\]": lambda it: (
        "lstm", it._replace(memory=it.memory[1:])),
    "memory: got none, which an LSTM needs": lambda it: ("lstm", it._replace(memory=None)),
    "got a sequence without times": lambda it: ("lstm", it._replace(sequence=it.sequence[:0])),
    "weight: got Double, want Float": lambda it: ("lstm", it._replace(weight=it.weight.double())),
    "state: got BFloat16, want Float or Double": lambda it: (
        "lstm", it._replace(state=it.state.bfloat16())),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused(words):
    cell, it = REFUSED[words](given("lstm", 4, 3, 6))
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        it.run(cell)
