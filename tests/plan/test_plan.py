# Plans of small programs written by hand: what is placed where, what is refused, in which words.
from __future__ import annotations

import copy
from typing import Any

import pytest

from torch_ort import _C

BORDER = "--"


def program(tensors: dict[str, str], *steps: str, outputs: str = "", gradients: str = "") -> dict:
    """Read a program from text.

    A tensor is `"kind bytes"` or `"alias root"`, with `delivered` at the end. A step is
    `"writes = reads"`, with `| candidates` for in place at the end, `!` in front for an effect and
    `*` for a workspace, or `*64:` for one of which so many bytes are wanted; `--` stands between
    the halves.
    """
    index = {name: i for i, name in enumerate(tensors)}

    def indices(names: str) -> list[int]:
        return [index[name] for name in names.replace(",", " ").split()]

    def tensor(text: str) -> dict[str, Any]:
        kind, size, *rest = text.split()
        more = {"delivered": rest == ["delivered"]}
        if kind == "alias":
            return {"root": index[size], **more}
        return {"kind": kind, "bytes": int(size), **more}

    def step(text: str) -> dict[str, Any]:
        marks = {"effect": text[0] == "!", "workspace": text[0] == "*"}
        text = text.lstrip("!*")
        if ":" in text:
            wanted, text = text.split(":")
            marks["workspace_bytes"] = int(wanted)
        call, _, in_place = text.partition("|")
        writes, _, reads = call.partition("=")
        lists = {"writes": writes, "reads": reads, "in_place": in_place}
        return marks | {key: indices(names) for key, names in lists.items()}

    border = steps.index(BORDER) if BORDER in steps else len(steps)
    return {
        "tensors": [tensor(text) for text in tensors.values()],
        "steps": [step(text) for text in steps if text != BORDER],
        "num_forward": border,
        "outputs": indices(outputs),
        "gradients": indices(gradients),
    }


class Planned:
    """A plan in the given order unless told otherwise, checked, with tensors found by name."""

    def __init__(self, tensors: dict[str, str], *steps: str, reorder: bool = False, **more: Any):
        leaving = {key: more.pop(key) for key in ("outputs", "gradients") if key in more}
        early = more.pop("gradients_leave_early", False)
        self.program = program(tensors, *steps, **leaving) | {"gradients_leave_early": early}
        self.options = {"reorder": reorder, **more}
        self.names = list(tensors)
        self.plan = _C.plan(self.program, self.options)
        _C.verify_plan(self.program, self.plan, self.options)

    def __getattr__(self, name: str) -> Any:
        return self.plan[name]

    def place(self, name: str) -> tuple[str, int]:
        placement = self.plan["placements"][self.names.index(name)]
        return placement["area"], placement["offset"]

    def in_place_of(self, name: str) -> str | None:
        read = self.plan["placements"][self.names.index(name)]["in_place_of"]
        return None if read < 0 else self.names[read]

    def released(self) -> list[str]:
        return [" ".join(self.names[tensor] for tensor in list_) for list_ in self.plan["release"]]


CHAIN = {"x": "input 64", "a": "planned 64", "b": "planned 64", "c": "planned 64", "d": "output 64"}


# --- offsets --------------------------------------------------------------------------------------


def test_memory_is_used_again() -> None:
    plan = Planned(CHAIN, "a = x", "b = a", "c = b", "d = c", outputs="d")
    assert plan.place("a") == plan.place("c") == ("scratch", 0)
    assert plan.place("b") == ("scratch", 64)
    assert plan.place("x") == plan.place("d") == ("none", 0)
    assert plan.peak_bytes == plan.forward_scratch_bytes == 128


def test_a_read_is_live_while_its_step_writes() -> None:
    plan = Planned(CHAIN, "a = x", "b = a", "d = b", outputs="d")
    assert plan.place("a") != plan.place("b")


def test_a_result_nobody_reads_needs_its_memory_once() -> None:
    plan = Planned(CHAIN, "a, b = x", "c = a", "d = c", outputs="d")
    assert plan.place("b") == plan.place("c") != plan.place("a")


@pytest.mark.parametrize(("alignment", "want"), [(1, 110), (16, 128), (64, 192), (256, 512)])
def test_alignment(alignment: int, want: int) -> None:
    plan = Planned({"a": "planned 100", "b": "planned 10"}, "a =", "b = a", alignment=alignment)
    assert plan.peak_bytes == want


def test_an_alias_is_where_its_root_is_and_keeps_it() -> None:
    tensors = {"a": "planned 64", "v": "alias a", "b": "planned 64", "c": "planned 64"}
    plan = Planned(tensors, "a =", "v = a", "b =", "c = v, b")
    assert plan.place("v") == plan.place("a")
    assert len({plan.place(name) for name in "abc"}) == 3


def test_no_bytes_take_no_space() -> None:
    tensors = {"a": "planned 0", "s": "planned 0", "b": "planned 64", "c": "planned 0"}
    plan = Planned(tensors, "a =", "b = a", "s = b", "c = b, a | a", BORDER, "= s")
    assert plan.place("a") == plan.place("c") == ("scratch", 0)
    assert plan.place("s") == ("context", 0)
    assert (plan.context_bytes, plan.forward_scratch_bytes) == (0, 64)
    assert plan.in_place_of("c") is None


def test_an_unused_tensor_has_no_place() -> None:
    assert Planned({"a": "planned 64"}).place("a") == ("none", 0)


# --- the two areas --------------------------------------------------------------------------------


def test_what_crosses_lies_in_the_context() -> None:
    tensors = {"s": "planned 100", "t": "planned 10", "a": "planned 64", "b": "planned 64"}
    plan = Planned(tensors, "s =", "t =", "a = s", BORDER, "b = s, t")
    assert plan.context_bytes == 128 + 64
    assert plan.crossing == [0, 1]
    assert plan.saved_bytes == 110
    assert plan.place("s") == ("context", 0)
    assert plan.place("t") == ("context", 128)
    assert plan.peak_bytes == 192 + 64


def test_forward_scratch_lies_where_the_context_is_not_yet_written() -> None:
    tensors = {"a": "planned 128", "b": "planned 64", "s": "planned 128"}
    plan = Planned(tensors, "a =", "b = a", "s = b", BORDER, "= s")
    assert plan.place("a") == plan.place("s") == ("context", 0)
    assert plan.place("b") == ("scratch", 0)
    assert plan.peak_bytes == 128 + 64


def test_backward_scratch_lies_where_the_context_is_no_longer_read() -> None:
    tensors = {"s": "planned 64", "t": "planned 64", "a": "planned 64", "b": "planned 128"}
    plan = Planned(tensors, "s =", "t =", BORDER, "= t", "a = s")
    assert plan.place("a") == plan.place("t") == ("context", 64)
    assert plan.peak_bytes == 128
    plan = Planned(tensors, "s =", "t =", BORDER, "= t", "a = s", "b = a")
    assert plan.place("b") == plan.place("s") == ("context", 0)
    assert plan.place("a") == ("scratch", 0)
    assert plan.peak_bytes == 128 + 64


def test_a_hole_in_the_context_is_used() -> None:
    tensors = dict.fromkeys("stuab", "planned 64")
    plan = Planned(tensors, "s =", "t =", "u =", BORDER, "= t", "a = s, u", "b = a, s, u")
    assert plan.place("a") == plan.place("t") == ("context", 64)
    assert plan.place("b") == ("scratch", 0)


def test_each_half_has_a_scratch_layout_of_its_own() -> None:
    tensors = {"a": "planned 64", "b": "planned 192", "c": "planned 64"}
    plan = Planned(tensors, "a =", BORDER, "b =", "c = b")
    assert [plan.place(name) for name in "abc"] == [
        ("scratch", 0),
        ("scratch", 0),
        ("scratch", 192),
    ]
    assert (plan.forward_scratch_bytes, plan.backward_scratch_bytes) == (64, 256)
    assert plan.peak_bytes == 256


def test_an_alias_carries_its_root_across() -> None:
    tensors = {"s": "planned 64", "v": "alias s", "t": "planned 64", "w": "alias t"}
    plan = Planned(tensors, "s =", "v = s", "t =", "w = t", BORDER, "= w, v")
    assert plan.crossing == [0, 2]


def test_adopted_memory_crosses_and_outputs_are_not_counted() -> None:
    tensors = {
        "x": "input 8", "a": "adopted 100", "out": "adopted 1000", "o": "output 10000",
        "early": "adopted 7", "p": "planned 1",
    }  # fmt: skip
    steps = ("a, out, o, early, p = x", BORDER, "= a, out, o, x")
    plan = Planned(tensors, *steps, outputs="out, o, x", gradients="early")
    assert plan.crossing == [1, 2, 4]
    assert plan.saved_bytes == 107


# --- in place -------------------------------------------------------------------------------------


def test_a_chain_in_place_is_one_block() -> None:
    plan = Planned(CHAIN, "a = x", "b = a | a", "c = b | b", "d = c | c", outputs="d")
    assert plan.place("a") == plan.place("b") == plan.place("c")
    assert [plan.in_place_of(name) for name in "abcd"] == [None, "a", "b", None]
    assert plan.peak_bytes == 64


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        pytest.param(("a =", "b =", "c = a, b | b, a"), "b", id="first-choice"),
        pytest.param(("a =", "b =", "c = a, b | a, b", "= a"), "b", id="second-choice"),
        pytest.param(("a =", "c = a, a | a"), "a", id="read-twice"),
        pytest.param(("a =", "v = a", "c = v | v"), "v", id="through-an-alias"),
        pytest.param(("a =", "v = a", "c = v, a | v, a"), "v", id="alias-and-root"),
    ],
)
def test_in_place_is_taken(steps: tuple[str, ...], want: str) -> None:
    tensors = {"a": "planned 64", "b": "planned 64", "c": "planned 64", "v": "alias a"}
    plan = Planned(tensors, *steps)
    assert plan.in_place_of("c") == want
    assert plan.place("c") == plan.place(want)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(("c = x | x",), id="input"),
        pytest.param(("c = k | k",), id="constant"),
        pytest.param(("ad =", "c = ad | ad"), id="adopted"),
        pytest.param(("o =", "c = o | o"), id="output"),
        pytest.param(("o =", "vo = o", "c = vo | vo"), id="alias-of-output"),
        pytest.param(("big =", "c = big | big"), id="other-size"),
        pytest.param(("a =", "c = a"), id="not-listed"),
        pytest.param(("a =", "c = x | a"), id="not-read"),
        pytest.param(("a =", "c = a | a", "= a"), id="read-later"),
        pytest.param(("a =", "v = a", "c = a | a", "= v"), id="alias-read-later"),
        pytest.param(("a =", "v = a", "c = a, v | a"), id="read-beside"),
        pytest.param(("a =", "v, c = a | a"), id="second-write"),
        pytest.param(("a =", "c, v = a | a"), id="alias-made-beside"),
        pytest.param(("a =", "c =", "c = a, c | a"), id="written-before"),
        pytest.param(("a =", "v = a", "vs = a", "c = v | v", BORDER, "= vs"), id="crossing"),
    ],
)
def test_in_place_is_declined(steps: tuple[str, ...]) -> None:
    tensors = {
        "x": "input 64", "k": "constant 64", "ad": "adopted 64", "o": "output 64", "vo": "alias o",
        "big": "planned 128", "a": "planned 64", "v": "alias a", "vs": "alias a", "c": "planned 64",
    }  # fmt: skip
    assert Planned(tensors, *steps).in_place_of("c") is None


def test_in_place_can_be_switched_off() -> None:
    plan = Planned({"a": "planned 64", "b": "planned 64"}, "a =", "b = a | a", in_place=False)
    assert plan.in_place_of("b") is None


def test_only_planned_memory_is_written_in_place() -> None:
    tensors = {"a": "planned 64", "o": "output 64", "ad": "adopted 64", "b": "planned 64"}
    plan = Planned(tensors, "a =", "o = a | a", "b =", "ad = b | b", outputs="o")
    assert plan.in_place_of("o") is plan.in_place_of("ad") is None


def test_the_last_backward_reader_overwrites_what_crosses() -> None:
    tensors = {"s": "planned 64", "g": "planned 64", "h": "planned 64"}
    plan = Planned(tensors, "s =", BORDER, "= s", "g = s | s", "h = g | g")
    assert plan.in_place_of("g") == "s"
    assert plan.place("h") == plan.place("s") == ("context", 0)
    assert plan.peak_bytes == 64


def test_a_crossing_write_takes_a_forward_block_into_the_context() -> None:
    tensors = {"a": "planned 64", "s": "planned 64", "g": "planned 64"}
    plan = Planned(tensors, "a =", "s = a | a", BORDER, "g = s | s")
    assert {plan.place(name) for name in "asg"} == {("context", 0)}
    assert plan.crossing == [1]
    assert plan.peak_bytes == plan.context_bytes == 64


# --- adopted tensors ------------------------------------------------------------------------------

ADOPTED = {"a": "adopted 8", "v": "alias a", "b": "adopted 8"}


@pytest.mark.parametrize(
    ("steps", "leaving", "want"),
    [
        pytest.param(("a =", "= a", "="), {}, ["", "a", ""], id="after-its-last-read"),
        pytest.param(("a =", "="), {}, ["a", ""], id="never-read"),
        pytest.param(("a =", "v = a", "= v"), {}, ["", "", "a v"], id="held-for-its-alias"),
        pytest.param(("a =", "v = a", "= a"), {}, ["", "v", "a"], id="alias-goes-first"),
        pytest.param(("a =", "= a"), {"outputs": "a"}, ["", ""], id="output"),
        pytest.param(("a =", "v = a"), {"outputs": "v"}, ["", "a"], id="only-its-alias-leaves"),
        pytest.param((BORDER, "a =", "= a"), {"gradients": "a"}, ["", ""], id="gradient"),
        pytest.param(
            ("a =", BORDER, "="), {"gradients": "a"}, ["", ""], id="gradient-made-forward"
        ),
        pytest.param(("a =", "= a", BORDER, "= a", "="), {}, ["", "", "a", ""], id="crossing"),
        pytest.param((BORDER, "a =", "= a", "="), {}, ["", "a", ""], id="made-backward"),
    ],
)
def test_release(steps: tuple[str, ...], leaving: dict[str, str], want: list[str]) -> None:
    assert Planned(ADOPTED, *steps, **leaving).released() == want


# --- order ----------------------------------------------------------------------------------------


def test_order_lowers_the_peak() -> None:
    # Both large ones first would hold them together.
    tensors = {"a": "planned 1000", "b": "planned 1000", "c": "planned 8", "d": "planned 8"}
    plan = Planned(tensors, "a =", "b =", "c = a", "d = b", "= c, d", reorder=True)
    assert plan.order in ([0, 2, 1, 3, 4], [1, 3, 0, 2, 4])
    assert plan.peak_bytes < 1500


def test_order_stays_if_nothing_is_gained() -> None:
    tensors = dict.fromkeys("abcd", "planned 64")
    assert Planned(tensors, "a =", "b = a", "c =", "d = c", reorder=True).order == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("is_early", "want"), [(False, [0, 1, 2, 3, 4]), (True, [0, 1, 4, 2, 3])], ids=["late", "early"]
)
def test_gradients_that_leave_early_are_made_early(is_early: bool, want: list[int]) -> None:
    # The step of the gradient `w` frees what has crossed, `s`, and takes more memory for itself.
    tensors = {"s": "planned 64", "t": "input 8", "g": "planned 1000", "h": "planned 10"}
    tensors |= {"i": "output 10", "w": "output 900"}
    steps = ("s =", BORDER, "g = t", "h = g", "i = h", "w = g, s")
    leaving = {"gradients": "i, w", "gradients_leave_early": is_early}
    assert Planned(tensors, *steps, reorder=True, **leaving).order == want


def test_order_of_both_halves() -> None:
    half = ("a =", "b =", "c = a", "d = b", "= c, d")
    sizes = {"a": "planned 1000", "b": "planned 1000", "c": "planned 8", "d": "planned 8"}
    backward = {name + "2": text for name, text in sizes.items()}
    again = ("a2 =", "b2 =", "c2 = a2", "d2 = b2", "= c2, d2")
    plan = Planned(sizes | backward, *half, BORDER, *again, reorder=True)
    assert plan.order[:5] == [0, 2, 1, 3, 4]
    assert plan.order[5:] == [5, 7, 6, 8, 9]


@pytest.mark.parametrize(
    ("steps", "chain"),
    [
        pytest.param(("!a =", "!b =", "!c = a", "!d = b"), [0, 1, 2, 3], id="effects"),
        pytest.param(
            ("a =", "b =", "!x = b", "c = x, a", "d = b"), [1, 2, 3], id="write-then-read-of-input"
        ),
        pytest.param(
            ("a =", "b = x, a", "! = x", "c = a", "d = b"), [0, 1, 2], id="effect-reads-input"
        ),
        pytest.param(
            ("a =", "= a", "a = a", "b =", "c = a", "d = b"), [0, 1, 2, 4], id="written-twice"
        ),
        pytest.param(
            ("a =", "v = a", "b =", "v = v", "c = a", "d = b"), [0, 1, 3, 4], id="through-a-view"
        ),
    ],
)
def test_order_keeps_what_must_stay(steps: tuple[str, ...], chain: list[int]) -> None:
    tensors = {
        "x": "input 8", "a": "planned 1000", "b": "planned 1000", "c": "planned 8",
        "d": "planned 8", "v": "alias a",
    }  # fmt: skip
    plan = Planned(tensors, *steps, reorder=True)
    assert [step for step in plan.order if step in chain] == chain


# --- delivered gradients --------------------------------------------------------------------------

DELIVERY = {
    "x": "input 64", "a": "planned 64", "b": "planned 64", "o": "output 64", "g": "planned 64",
    "wa": "planned 64 delivered", "wb": "planned 64 delivered", "v": "alias wb",
}  # fmt: skip


def test_delivered_takes_the_place_of_what_has_crossed() -> None:
    steps = ("a = x", "b = a", "o = b", BORDER, "g = b", "wb = g", "g = a", "wa = g")
    plan = Planned(DELIVERY, *steps, outputs="o", gradients="wa, wb")
    assert plan.place("wb") == plan.place("b")
    assert plan.place("wa") == plan.place("a")
    assert plan.context_bytes == plan.crossing_bytes == 128


def test_delivered_makes_the_context_larger_where_nothing_is_dead() -> None:
    steps = ("a = x", "o = a", BORDER, "wb = a", "wa = a, wb")
    plan = Planned(DELIVERY, *steps, outputs="o", gradients="wa, wb")
    assert plan.crossing_bytes == 64
    assert plan.context_bytes == 192
    assert plan.backward_scratch_bytes == 0


def test_delivered_is_overwritten_by_nothing() -> None:
    steps = ("a = x", "o = a", BORDER, "wb = a", "v = wb", "g = v | v", "wa = g")
    plan = Planned(DELIVERY, *steps, outputs="o", gradients="wa, v")
    assert plan.in_place_of("g") is None
    assert len({plan.place(name) for name in ("wb", "g", "wa")}) == 3


def test_delivered_may_overwrite_what_has_crossed() -> None:
    plan = Planned(DELIVERY, "a = x", BORDER, "wa = a | a", gradients="wa")
    assert plan.in_place_of("wa") == "a"
    assert plan.place("wa") == plan.place("a")


# --- discarded memory -----------------------------------------------------------------------------

LAYERS = {
    "x": "input 64", "a": "planned 512", "b": "planned 512", "o": "output 64", "g": "adopted 512",
    "h": "adopted 512", "w": "planned 64 delivered",
}  # fmt: skip
LAYER_STEPS = ("a = x", "b = a", "o = b", BORDER, "g = b", "h = g, a", "w = h")


def test_dead_memory_goes_back_where_kernels_make_large_results() -> None:
    options = {"outputs": "o", "gradients": "w", "discard_bytes": 512}
    plan = Planned(LAYERS, *LAYER_STEPS, **options, discard_gain=1)
    # Where a was, the delivered gradient will lie.
    assert plan.place("w") == plan.place("a")
    assert plan.discards == [(3, plan.place("b")[1], 512)]
    # Without it, both areas of 512 bytes would be there beside both large results.
    assert Planned(LAYERS, *LAYER_STEPS, **options, discard_gain=512).discards == plan.discards
    assert Planned(LAYERS, *LAYER_STEPS, **options, discard_gain=513).discards == []
    assert Planned(LAYERS, *LAYER_STEPS, **options).discards == []


def test_dead_memory_goes_back_before_kernels_that_want_large_workspaces() -> None:
    tensors = {
        "x": "input 64", "a": "planned 512", "b": "planned 512", "o": "output 64", "t": "output 64",
        "w": "output 512",
    }  # fmt: skip
    steps = ("a = x", "b = a", "o = b", BORDER, "t = b", "*w = a")
    leaving = {"outputs": "o", "gradients": "t, w"}
    options = {"discard_bytes": 256, "discard_gain": 1}
    plan = Planned(tensors, *steps, **leaving, **options)
    assert plan.discards == [(3, plan.place("b")[1], 512)]
    for mark in ("", "*64:"):
        modest = [step.replace("*", mark) for step in steps]
        assert Planned(tensors, *modest, **leaving, **options).discards == []


def test_small_parts_and_small_results_discard_nothing() -> None:
    leaving = {"outputs": "o", "gradients": "w", "discard_gain": 1}
    assert Planned(LAYERS, *LAYER_STEPS, **leaving).discards == []
    small = LAYERS | {"g": "adopted 60", "h": "adopted 60"}
    assert Planned(small, *LAYER_STEPS, **leaving, discard_bytes=256).discards == []


# --- chunks ---------------------------------------------------------------------------------------

CHUNKED = {
    "x": "input 64", "a": "planned 512", "b": "planned 512", "c": "planned 512", "o": "output 64",
    "g": "planned 64", "h": "planned 64", "big": "planned 1024", "wc": "output 512",
    "wb": "output 512", "wa": "output 512",
}  # fmt: skip
CHUNK_STEPS = (
    "a = x", "b = a", "c = b", "o = c", BORDER, "g, wc = c", "h, wb = g, b", "wa = h, a",
)  # fmt: skip
CHUNK_LEAVING = {"outputs": "o", "gradients": "wa, wb, wc"}


def test_what_crosses_lies_in_chunks_that_die_layer_by_layer() -> None:
    plan = Planned(CHUNKED, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=512)
    assert [plan.place(name) for name in "abc"] == [("context", at) for at in (0, 512, 1024)]
    # h lies where c was, which lives so much longer.
    assert plan.place("h") == ("context", 1024)
    assert plan.chunks == [(0, 512, 6), (512, 512, 5), (1024, 512, 6)]


@pytest.mark.parametrize(
    ("smallest", "want"),
    [
        (0, [(0, 1536, 6)]),
        (600, [(0, 1536, 6)]),  # what is left of two layers would be too small
        (512, [(0, 512, 6), (512, 512, 5), (1024, 512, 6)]),
        (4096, [(0, 1536, 6)]),
    ],
)
def test_chunks_are_not_smaller_than_asked_for(smallest: int, want: list) -> None:
    plan = Planned(CHUNKED, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=smallest)
    assert plan.chunks == want


def test_no_block_lies_in_two_chunks() -> None:
    steps = (*CHUNK_STEPS[:-2], "h, wb = g, b", "big = h", "wa = big, a")
    whole = Planned(CHUNKED, *steps, **CHUNK_LEAVING)
    assert whole.place("big") == ("context", 512)  # where b and c were
    parts = Planned(CHUNKED, *steps, **CHUNK_LEAVING, chunk_bytes=512)
    assert parts.place("big")[0] == "scratch"


def test_of_two_orders_the_one_with_the_lower_peak_is_taken() -> None:
    # The first layer's activation is used first in backward.
    steps = ("a = x", "b = a", "c = b", "o = c", BORDER, "wa = a", "wb = b", "wc = c")
    plan = Planned(CHUNKED, *steps, **CHUNK_LEAVING, chunk_bytes=512)
    assert [position for _, _, position in plan.chunks] == [4, 5, 6]
    assert [plan.place(name) for name in "abc"] == [("context", at) for at in (0, 512, 1024)]


def test_a_chunk_with_a_delivered_gradient_lives_as_long_as_the_context() -> None:
    tensors = CHUNKED | {"wa": "planned 512 delivered"}
    plan = Planned(tensors, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=512)
    held = [chunk for chunk in plan.chunks if chunk[2] == len(plan.order)]
    assert held == [(512, 512, 7)]
    assert plan.place("wa") == ("context", 512)


def test_there_are_few_chunks() -> None:
    names = [f"a{i}" for i in range(200)]
    tensors = {"x": "input 64", "o": "output 64"} | dict.fromkeys(names, "planned 64")
    steps = [f"{name} = x" for name in names] + ["o = x", BORDER]
    plan = Planned(tensors, *steps, *(f"= {name}" for name in names), outputs="o", chunk_bytes=64)
    assert 16 <= len(plan.chunks) <= 33


def test_an_area_of_chunks_has_no_workspaces_and_discards() -> None:
    options = {"workspace_bytes": 64, "discard_bytes": 64, "discard_gain": 0}
    steps = tuple(step.replace("wa", "*wa") for step in CHUNK_STEPS)
    assert Planned(CHUNKED, *steps, **CHUNK_LEAVING, **options).workspaces
    plan = Planned(CHUNKED, *steps, **CHUNK_LEAVING, **options, chunk_bytes=512)
    assert plan.workspaces == plan.discards == []


# --- workspaces -----------------------------------------------------------------------------------

IMAGES = {
    "x": "input 64", "a": "planned 256", "b": "planned 512", "o": "output 64", "g": "planned 512",
    "w": "planned 64 delivered",
}  # fmt: skip
IMAGE_STEPS = ("*a = x", "*b = a", "o = b", BORDER, "*g = b", "*w = g, a")


def test_kernels_get_what_is_dead_while_they_run() -> None:
    plan = Planned(IMAGES, *IMAGE_STEPS, outputs="o", gradients="w", workspace_bytes=64)
    assert (plan.place("a"), plan.place("b")) == (("context", 0), ("context", 256))
    parts = {at: [part for part in plan.workspaces if part[0] == at] for at in range(5)}
    assert parts[0][0] == (0, "context", 256, plan.context_bytes - 256)  # b comes later
    assert parts[2] == []  # did not ask
    assert all(area == "scratch" or offset >= 768 for _, area, offset, _ in parts[1])
    # The forward half has as much scratch as backward, which is where g lies.
    assert plan.place("g")[0] == "scratch"
    assert plan.forward_scratch_bytes == plan.backward_scratch_bytes == 512
    assert (1, "scratch", 0, 512) in parts[1]


def test_a_gradient_that_is_a_view_leaves_forward_its_memory() -> None:
    tensors = {
        "x": "input 64", "a": "planned 512", "o": "output 64", "w": "planned 512 delivered",
        "v": "alias w",
    }  # fmt: skip
    steps = ("*a = x", "o = a", BORDER, "w = a", "v = w")
    given = program(tensors, *steps, outputs="o", gradients="v")
    given["tensors"][4]["bytes"] = 512
    options = {"reorder": False, "workspace_bytes": 64}
    plan = _C.plan(given, options)
    assert plan["workspaces"] == [(0, "context", 512, 512)]
    _C.verify_plan(given, plan, options)


def test_small_parts_are_no_workspaces() -> None:
    plan = Planned(IMAGES, *IMAGE_STEPS, outputs="o", gradients="w", workspace_bytes=4096)
    assert plan.workspaces == []


# --- what is no program ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_forward": 9}, r"number of forward steps: got 9, want 0 to 2"),
        ({"outputs": [7]}, r"tensor out of range in outputs: got 7, want 0 to 2"),
        ({"gradients": [-1]}, r"tensor out of range in gradients: got -1, want 0 to 2"),
        ({"outputs": [1]}, r"tensor 1 leaves but is in the engine's memory"),
        ({"steps": [{"reads": [1]}]}, r"step 0 reads tensor 1 before any step writes it"),
        ({"steps": [{"writes": [0]}]}, r"step 0 writes tensor 0, which is an input"),
        ({"steps": [{"writes": [2]}]}, r"step 0 writes tensor 2, which is a constant"),
        ({"steps": [{"reads": [3]}]}, r"tensor out of range in reads: got 3"),
        ({"tensors": [{"bytes": -1}]}, r"size of tensor 0: got -1, want 0 or more"),
        ({"tensors": [{"root": 5}]}, r"root of tensor 0: got 5"),
        ({"tensors": [{"root": 0}]}, r"root of tensor 0 is an alias itself"),
        ({"tensors": [{"root": 1, "delivered": True}, {}]}, r"tensor 0 is delivered: want planned"),
        (
            {"tensors": [{"kind": "adopted", "delivered": True}]},
            r"tensor 0 is delivered: want planned memory of its own",
        ),
        (
            {"tensors": [{"kind": "input"}, {"delivered": True}], "outputs": [1]},
            r"tensor 1 leaves but is in the engine's memory",
        ),
        ({"tensors": [{}, {"root": 0}, {"root": 1}]}, r"root of tensor 2 is an alias itself"),
    ],
)
@pytest.mark.parametrize("call", [_C.plan, _C.choose_order], ids=["plan", "choose_order"])
def test_broken_programs(call: Any, change: dict[str, Any], words: str) -> None:
    tensors = {"x": "input 64", "a": "planned 64", "k": "constant 64"}
    broken = program(tensors, "a = x", "= a") | change
    if "steps" in change:
        broken["num_forward"] = 1
    with pytest.raises(_C.InternalError, match=words):
        call(broken)


@pytest.mark.parametrize(
    ("broken", "options", "error", "words"),
    [
        ({"kind": "saved"}, {}, _C.UserError, "kind of a tensor: got 'saved', want one of input"),
        ({"size": 4}, {}, _C.UserError, "field of a tensor: got 'size', want one of kind, bytes"),
        ({}, {"align": 4}, _C.UserError, "option: got 'align', want one of reorder"),
        ({}, {"alignment": 0}, _C.InternalError, "alignment: got 0, want 1 or more"),
    ],
)
def test_broken_fields(broken: dict, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _C.plan({"tensors": [broken], "steps": []}, options)


# --- what verify_plan refuses ---------------------------------------------------------------------

TRAINING = {
    "x": "input 64", "a": "planned 64", "b": "planned 64", "s": "planned 64", "f": "adopted 64",
    "vf": "alias f", "o": "output 64", "g": "planned 64", "h": "planned 64", "w": "output 64",
    "va": "alias a", "early": "adopted 64", "ve": "alias early",
}  # fmt: skip
TRAINING_STEPS = (
    "a = x", "va = a", "!b = a | a", "f = b, va", "!vf = f", "s, early, ve = vf", "!o = s, a | a",
    BORDER, "g = x", "h = g, s | g, s", "w = h, g, x",
)  # fmt: skip
# Positions are those of the steps.
LAST_FORWARD, FIRST_BACKWARD = 6, 7


def index(name: str) -> int:
    return list(TRAINING).index(name)


def placement(plan: dict, name: str) -> dict:
    return plan["placements"][index(name)]


def overwrite(plan: dict, write: str, read: str) -> None:
    of = placement(plan, read)
    change(plan, write, in_place_of=index(read), area=of["area"], offset=of["offset"])


def change(plan: dict, name: str, **fields: Any) -> None:
    placement(plan, name).update(fields)


def swap(plan: dict, one: int, other: int) -> None:
    order = plan["order"]
    order[one], order[other] = order[other], order[one]


def release(plan: dict, name: str, position: int | None) -> None:
    for tensors in plan["release"]:
        if index(name) in tensors:
            tensors.remove(index(name))
    if position is not None:
        plan["release"][position].append(index(name))


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        # order
        (lambda p: p["order"].pop(), "steps in the order: got 9, want 10"),
        (lambda p: p["order"].__setitem__(1, 0), "order at 1: got step 0, want each of the 10"),
        (lambda p: swap(p, LAST_FORWARD, FIRST_BACKWARD),
         "step 7 is at position 6, on the other side of the border at 7"),
        (lambda p: swap(p, 2, 4), "effect change places: step 4 comes before step 2"),
        (lambda p: swap(p, 2, 3), "step 3 reads tensor 2: got it as left by steps -1"),
        # places
        (lambda p: p["placements"].pop(), "placements: got 12, want 13"),
        (lambda p: change(p, "va", offset=64 * 7), "alias 10 is not where its root 1 is"),
        (lambda p: change(p, "x", area="scratch"), "tensor 0 has a place and needs none"),
        (lambda p: change(p, "f", area="scratch"), "tensor 4 has a place and needs none"),
        (lambda p: change(p, "g", area="none"), "tensor 7 has no place"),
        (lambda p: change(p, "b", offset=1) or p.update(context_bytes=640),
         "offset of tensor 2 is not aligned: got 1, want a multiple of 64"),
        (lambda p: change(p, "b", offset=6400), "tensor 2 is out of its area: got 6400 to 6464"),
        (lambda p: change(p, "b", offset=-64), "tensor 2 is out of its area: got -64"),
        (lambda p: change(p, "s", area="scratch", offset=0),
         "tensor 3 crosses the border in the scratch area"),
        (lambda p: overwrite(p, "b", "a") or change(p, "b", in_place_of=-1),
         "tensors 1 and 2 are alive together and overlap in the scratch area by 64 bytes"),
        (lambda p: change(p, "g", area="context", offset=placement(p, "s")["offset"]),
         "tensors 3 and 7 are alive together and overlap in the context area by 64 bytes"),
        # in place
        (lambda p: overwrite(p, "b", "a"), "may not write 2 over 1: it is still read by step 6"),
        (lambda p: change(p, "a", in_place_of=0), "write 1 over 0: the step does not list it"),
        (lambda p: overwrite(p, "h", "g"), "write 8 over 7: it is still read by step 9"),
        (lambda p: overwrite(p, "h", "b"), "write 8 over 2: the step does not read it"),
        (lambda p: change(p, "h", in_place_of=99), "there is no such tensor"),
        (lambda p: change(p, "h", area="scratch"), "write 8 over 3: they lie in different places"),
        (lambda p: overwrite(p, "o", "a"), "tensor 6 has a place and needs none"),
        (lambda p: change(p, "o", in_place_of=index("a")), "no planned memory of its own"),
        # sums
        (lambda p: p["crossing"].pop(), "crossing tensors: got 1 of them, want these 2"),
        (lambda p: p.update(saved_bytes=1), "saved bytes: got 1, want 128"),
        (lambda p: p.update(peak_bytes=1), "peak bytes: got 1, want"),
        # discards
        (lambda p: p["discards"].append((3, 0, 64)), "discard after position 3 .* out of range"),
        (lambda p: p["discards"].append((10, 0, 64)), "discard after position 10 .* out of range"),
        (lambda p: p["discards"].append((7, placement(p, "s")["offset"], 64)),
         "tensor 3 is discarded after position 7 and still needed"),
        # workspaces
        (lambda p: p["workspaces"].append((10, "context", 0, 64)),
         "workspace at position 10 .* out"),
        (lambda p: p["workspaces"].append((0, "none", 0, 64)),
         "workspace at position 0 of 0 to 64"),
        (lambda p: p["workspaces"].append((7, "context", placement(p, "s")["offset"], 64)),
         "tensor 3 lives in the workspace at position 7"),
        # release
        (lambda p: p["release"].pop(), "release lists: got 9, want 10"),
        (lambda p: release(p, "f", 4), "tensor 4 is released after position 4, too early: step 5"),
        (lambda p: release(p, "f", None), "adopted tensor 4 is never released"),
        (lambda p: release(p, "early", 5), "released in the forward half, too early: it is saved"),
        (lambda p: p["release"][9].append(index("f")), "want each tensor once at most"),
        (lambda p: release(p, "b", 9), "tensor 2 is released but not adopted"),
    ],
)  # fmt: skip
def test_verify_plan_refuses(tamper: Any, words: str) -> None:
    plan = Planned(TRAINING, *TRAINING_STEPS, outputs="o", gradients="w, ve")
    tampered = copy.deepcopy(plan.plan)
    tamper(tampered)
    with pytest.raises(_C.InternalError, match=f"verify_plan: .*({words})"):
        _C.verify_plan(plan.program, tampered, {"reorder": True})


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (("c = x | x",), "it is an input or a constant"),
        (("c = k | k",), "it is an input or a constant"),
        (("o =", "c = o | o"), "it leaves as an output"),
        (("ad =", "c = ad | ad"), "its memory is adopted"),
        (("big =", "c = big | big"), "got 64 bytes, want 128"),
        (("a =", "v = a", "c = a, v | a"), "reads the same memory as tensor 6"),
        (("a =", "c, v = a | a"), "writes the same memory as tensor 6"),
        (("a =", "c, e = a | a"), "it is not the first write"),
    ],
)
def test_verify_plan_refuses_in_place(steps: tuple[str, ...], words: str) -> None:
    tensors = {
        "x": "input 64", "k": "constant 64", "ad": "adopted 64", "o": "output 64",
        "big": "planned 128", "a": "planned 64", "v": "alias a", "c": "planned 64",
        "e": "planned 64",
    }  # fmt: skip
    plan = Planned(tensors, *steps, in_place=False)
    write = "e" if "e =" in steps[-1] or ", e" in steps[-1] else "c"
    read = plan.program["steps"][-1]["in_place"][0]
    tampered = copy.deepcopy(plan.plan)
    tampered["placements"][plan.names.index(write)]["in_place_of"] = read
    with pytest.raises(_C.InternalError, match=words):
        _C.verify_plan(plan.program, tampered)


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        ({"area": "scratch", "offset": 0}, "tensor 5 is delivered in the scratch area"),
        ({"offset": 0}, "are alive together and overlap in the context area by 64 bytes"),
    ],
)
def test_verify_plan_guards_what_is_delivered(tamper: dict[str, Any], words: str) -> None:
    steps = ("a = x", "b = a", "o = b", BORDER, "wa = b", "g = a, wa", "wb = g")
    plan = Planned(DELIVERY, *steps, outputs="o", gradients="wa, wb")
    tampered = copy.deepcopy(plan.plan)
    tampered["placements"][plan.names.index("wa")].update(tamper)
    if tamper.get("area") == "scratch":
        tampered["backward_scratch_bytes"] = 64
    with pytest.raises(_C.InternalError, match=words):
        _C.verify_plan(plan.program, tampered, plan.options)


def test_verify_plan_guards_what_forward_delivers() -> None:
    tensors = {
        "x": "input 64", "d": "planned 64 delivered", "a": "planned 64", "o": "output 64",
    }  # fmt: skip
    plan = Planned(tensors, "d = x", "a = x", "o = a", BORDER, "= x", outputs="o")
    area, offset = plan.place("d")
    spoiled = plan.plan | {"workspaces": [(2, area, offset, 64)]}
    with pytest.raises(_C.InternalError, match="tensor 1 lives in the workspace at position 2"):
        _C.verify_plan(plan.program, spoiled, plan.options)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(0, 512, 6), (512, 512, 5)], "chunks end at 1024, want 1536"),
        ([(0, 512, 6), (520, 512, 5)], "chunk of 520 to 1032: want one that begins at 512"),
        ([(0, 1536, 6), (1536, 0, 6)], "chunk of 1536 to 1536: want one"),
        ([(0, 1536, 3)], "chunk of 0 to 1536 is dead after position 3, in the forward half"),
        ([(0, 256, 6), (256, 1280, 6)], "tensor 1 from 0 to 512 lies in two chunks"),
        ([(0, 512, 6), (512, 512, 4), (1024, 512, 6)], "tensor 2 is used after position 4, when"),
    ],
)
def test_verify_plan_guards_chunks(chunks: list, words: str) -> None:
    plan = Planned(CHUNKED, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=512)
    with pytest.raises(_C.InternalError, match=words):
        _C.verify_plan(plan.program, plan.plan | {"chunks": chunks}, plan.options)


def test_verify_plan_wants_no_discards_beside_chunks() -> None:
    plan = Planned(CHUNKED, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=512)
    tampered = plan.plan | {"discards": [(6, 0, 64)]}
    with pytest.raises(_C.InternalError, match="area of 3 chunks has discards or workspaces"):
        _C.verify_plan(plan.program, tampered, plan.options)


def test_verify_plan_guards_chunks_of_what_is_delivered() -> None:
    tensors = CHUNKED | {"wa": "planned 512 delivered"}
    plan = Planned(tensors, *CHUNK_STEPS, **CHUNK_LEAVING, chunk_bytes=512)
    chunks = [(offset, size, min(position, 6)) for offset, size, position in plan.chunks]
    with pytest.raises(_C.InternalError, match="tensor 10 is used after position 6, when its"):
        _C.verify_plan(plan.program, plan.plan | {"chunks": chunks}, plan.options)


def test_verify_plan_knows_the_options() -> None:
    tensors = {"a": "planned 64", "b": "planned 64", "c": "planned 64"}
    plan = Planned(tensors, "a =", "b = a | a", "c =")
    with pytest.raises(_C.InternalError, match="may not write 1 over 0: the options forbid it"):
        _C.verify_plan(plan.program, plan.plan, {"in_place": False})
    plan.plan["order"] = [0, 2, 1]
    with pytest.raises(_C.InternalError, match="order at 1: got step 2, want the given order"):
        _C.verify_plan(plan.program, plan.plan, {"reorder": False})
