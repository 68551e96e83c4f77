# Random programs with fixed seeds on both roads; `make fuzz` tries new ones.
from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from programs import Aside, try_seed
from programs_exceptions import reason_for, unknown_of
from programs_run import Wrong, check, judge, run_eager
from programs_shrink import failure, script, shrink
from programs_write import Call, Input, Program, Writer

SEEDS = {"ortmodule": range(24), "compile": range(24, 32)}
GROUP = 8


@pytest.mark.hands_over("some programs write into inputs, and have unbacked sizes")
@pytest.mark.parametrize(
    ("road", "first"), [(road, first) for road, seeds in SEEDS.items() for first in seeds[::GROUP]]
)
def test_programs_are_as_in_eager(road: str, first: int):
    outcomes = {seed: try_seed(seed, road) for seed in range(first, first + GROUP)}
    assert {seed: words for seed, (_, words) in outcomes.items() if words} == {}
    assert sum(outcome == "right" for outcome, _ in outcomes.values()) > GROUP // 2


def test_a_seed_writes_one_program():
    assert Writer(7).write() == Writer(7).write()
    assert Writer(7).write() != Writer(8).write()


STEPS = (Call({"B": 3, "T": 5}), Call({"B": 2, "T": 7}, backward="later"))


def program(*lines: str, results: str = "(v1,)", dtype: str = "float32") -> Program:
    return Program(3, (Input("x0", ("B", "T"), dtype, True),), (), (), lines, results, STEPS)


def changed(name: str, change) -> None:
    """Judge eager's own outcome with one value changed."""
    one = program("v1 = x0.exp() * 3")
    got, want = run_eager(one), run_eager(one)
    got.tensors[name] = change(got.tensors[name])
    judge(one, got, want, True)


def test_roundings_are_no_difference():
    changed("call 0, result 0", lambda x: x * (1 + 2e-7))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("call 0, result 0", lambda x: x * (1 + 2e-5)),
        ("call 1, gradient of input 0", lambda x: x.flip(0)),
        ("call 1, input 0 afterwards", lambda x: x.double()),
        ("call 0, buffer count", lambda x: x + 1),
        ("call 0, result 0", lambda x: torch.where(x > 4, torch.nan, x)),
        ("call 0, result 0", lambda x: torch.where(x > 4, torch.inf, x)),
    ],
)
def test_differences_are_seen(name: str, change):
    with pytest.raises(Wrong, match=name):
        changed(name, change)


def test_what_rounding_decides_is_no_difference():
    one = program("v1 = (x0 * 3 / 3 > x0) * 1.0", "v2 = x0 * v1", results="(v1, v2)")
    got, want = run_eager(one), run_eager(one)
    other = run_eager(program("v1 = (x0 / 3 * 3 > x0) * 1.0", "v2 = x0 * v1", results="(v1, v2)"))
    got.tensors["call 0, result 0"] = other.tensors["call 0, result 0"]
    judge(one, got, want, True)


def test_a_program_may_end_its_process():
    with Aside() as aside:
        with pytest.raises(BrokenProcessPool):
            aside.call(os.abort)
        assert aside.call(abs, -1) == 1


def test_a_failing_program_is_made_small(monkeypatch, tmp_path):
    lines = ("v1 = x0.sin()", "v2 = v1 + x0", "v3 = v2.erf()", "v4 = v3.cos()")
    large = program(*lines, results="(v1, v2, v4)")

    def fails(one: Program, road: str) -> None:
        if any("erf" in line for line in one.lines):
            raise Wrong("call 0, result 1: off by 3")

    monkeypatch.setattr("programs_shrink.check", fails)
    words = failure(large, "ortmodule")
    small = shrink(large, "ortmodule", words)
    assert small.lines == ("v3 = x0.erf()",)
    assert len(small.calls) == 1
    text = script(small, "ortmodule", words)
    assert "v3 = x0.erf()" in text
    exec(compile(text, "script.py", "exec"), {})  # nothing is wrong with it


CALLS_IN_STATES = (
    {"autocast": "bfloat16"}, {"autocast": "bfloat16", "backward_in_autocast": True},
    {"default_dtype": "float64"}, {"deterministic": True}, {"in_thread": True},
    {"numbers": (("hot", 0.25), ("step", 3))},
)  # fmt: skip


@pytest.mark.parametrize("road", ["ortmodule", "compile"])
def test_states_and_numbers_of_calls(road):
    one = program("v1 = x0.reshape(-1, 1) @ torch.ones(1, 3).to(x0) * self.hot", "self.step += 1")
    steps = tuple(replace(STEPS[0], **state) for state in CALLS_IN_STATES)
    assert check(replace(one, calls=steps), road) == []


@pytest.mark.hands_over("a mask makes a size")
@pytest.mark.parametrize("road", ["ortmodule", "compile"])
@pytest.mark.parametrize("kind", ["dataclass", "namespace", "class", "dict"])
def test_objects_and_threads(kind, road):
    one = program(
        "v1 = self.halved(torch.fft.fft(x0).abs())", "v2 = v1[x0 > 0]", results="[v1, v2]"
    )
    one = replace(one, packed=kind, at_once=True)
    assert unknown_of(check(one, road)) == []
    exec(compile(script(one, road, ""), "script.py", "exec"), {})


def test_attributes_that_are_wrong_are_found():
    one = program("self.step += 1", "v1 = x0 * self.hot")
    got, want = run_eager(one), run_eager(one)
    got.facts["call 1, attribute step"] = "3"
    with pytest.raises(Wrong, match="attribute step: got 3, want 4"):
        judge(one, got, want, True)


def test_reasons_that_nobody_has_read_are_found():
    known = "recorder: HandOver: aten._local_scalar_dense.default depends on numbers"
    assert unknown_of([known, "recorder: HandOver: it is Sunday"]) == [
        "recorder: HandOver: it is Sunday"
    ]


def test_an_engine_that_is_wrong_is_found(monkeypatch):
    import torch_ort

    def wrap(module, debug):
        return lambda *inputs: [x * 1.001 for x in module(*inputs)]

    monkeypatch.setattr(torch_ort, "ORTModule", wrap)
    with pytest.raises(Wrong, match="structure of the results"):
        check(program("v1 = x0.sin()"), "ortmodule")
    monkeypatch.setattr(
        torch_ort, "ORTModule", lambda module, debug: lambda x: tuple(wrap(module, debug)(x))
    )
    with pytest.raises(Wrong, match="call 0, result 0: off by"):
        check(program("v1 = x0.sin()"), "ortmodule")


def test_a_first_call_in_eager_is_expected_where_forward_assigns_attributes():
    counters = "'fallbacks': 0, 'graph_breaks': 0, 'captures_refused': 0, 'calls_left_to_eager': 1,"
    words = f"Wrong: it ran in eager PyTorch: {{{counters}}}"
    for line in ("self.count = self.count + 1", "self.count += 1", "if x:\n    self.seen = True"):
        assert reason_for(words, "ortmodule", ["y = x", line])
        assert not reason_for(words, "compile", ["y = x", line])
    assert not reason_for(words, "ortmodule", ["y = self.count + 1", "y = f(self.count == 1)"])
