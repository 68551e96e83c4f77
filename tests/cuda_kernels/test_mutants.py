"""Mistakes in kernels do not stay hidden: the emulator, and comparison with float64, find them.

`pytest -m "cuda and slow" tests/cuda_kernels/test_mutants.py -s` tells what becomes of each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import kernel_cases
import mutants
import pytest
from mutant_runs import FOUND, SURVIVED, Runner, machine_code, runner

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
FOR_EACH_CASE = 20


class Lab:
    """The texts of all cases, and what becomes of changed ones."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @functools.cache  # noqa: B019
    def program(self, case: str) -> tuple[str, str]:
        ((name, text),) = self._runner.texts(case).items()
        return name, text

    def text(self, case: str) -> str:
        return self.program(case)[1]

    def try_one(self, mutant: mutants.Mutant) -> str:
        """Say what becomes of a mutant; "" if it changes nothing, in this case or in others."""
        outcome = self._runner.run(mutant.case, {self.program(mutant.case)[0]: mutant.text})
        print(f"{outcome.word:16} {mutant.case}: {mutant.what} [{outcome.how}]")
        if outcome.word != SURVIVED:
            return outcome.word
        if any(re.search(place, mutant.what) for place in mutants.HARMLESS):
            return ""
        is_change = machine_code(mutant.text) != machine_code(self.text(mutant.case))
        for case in kernel_cases.CASES:
            other = mutant.elsewhere(case, self.text(case))
            if other and machine_code(other.text) not in (None, machine_code(self.text(case))):
                is_change = True
                if self._runner.run(case, {self.program(case)[0]: other.text}).word == FOUND:
                    print(f"    found in {case}")
                    return FOUND
        return SURVIVED if is_change else ""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with runner() as each:
        yield Lab(each)


def test_mistakes_by_hand(lab):
    todo = list(mutants.planted(lab.text))
    assert len(todo) >= 100
    assert [mutant.what for mutant in todo if lab.try_one(mutant) != FOUND] == []


def test_mistakes_in_sums_by_ids():
    with runner() as each:
        texts = functools.cache(each.texts)
        todo = list(mutants.planted_in_sums(texts))
        left = []
        for what, case, changed in todo:
            outcome = each.run(case, changed)
            print(f"{outcome.word:16} {case}: {what} [{outcome.how}]")
            if outcome.word != FOUND:
                left.append(what)
    assert len(todo) >= 60
    assert left == []


def test_mistakes_at_random(lab):
    """At least 95 of 100 that change the machine code of a case, but for the harmless ones.

    Most of those that are left change what no case comes to, as the stride of a single group.
    """
    todo = [
        mutant
        for case in kernel_cases.CASES
        for mutant in mutants.at_random(case, lab.text(case), FOR_EACH_CASE, seed=0)
    ]
    words = {mutant: lab.try_one(mutant) for mutant in todo}
    left = [mutant for mutant, word in words.items() if word == SURVIVED]
    found = sum(word == FOUND for word in words.values())
    for mutant in left:
        print(f"not found: {mutant.case}: {mutant.what}")
    print(f"{found} of {found + len(left)} found")
    assert found >= 120
    assert found >= 0.95 * (found + len(left))
