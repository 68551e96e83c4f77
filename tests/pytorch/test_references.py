"""References to what the package hands to private functions of torch: none is lost or kept.

Before torch 2.12, torch frees a reference to a stashed object that was not given to it. Objects
that are alive then are freed, and the interpreter crashes somewhere else.
"""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from torch_ort.pytorch import patches, patching

TIMES = 50


def taking(stash):
    """Give what torch 2.11 has in place of a function: it frees a reference of its caller's."""

    def stash_and_take(key, value):
        stash(key, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    return stash_and_take


@pytest.fixture(params=["as it is", "as in torch 2.11"])
def version(request, monkeypatch):
    if request.param == "as in torch 2.11":
        if patching._STASH_TAKES_A_REFERENCE:
            pytest.skip("this is such a version")
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", taking(torch._C._stash_obj_in_tls))
        monkeypatch.setattr(patching, "_CAN_TAKE_BACK", False)
        takes = patching._stash_takes_a_reference()
        assert takes
        monkeypatch.setattr(patching, "_STASH_TAKES_A_REFERENCE", takes)
    yield request.param
    if hasattr(torch._C, "_remove_obj_from_tls") and torch._C._is_key_in_tls(patching._KEY):
        torch._C._remove_obj_from_tls(patching._KEY)


class Ours:
    def __call__(self, theirs, *args):
        return theirs(*args)


def test_patches_keep_the_references_of_what_they_hand_on(version):
    ours, nothing = Ours(), patching._NOTHING
    before = sys.getrefcount(ours), sys.getrefcount(nothing)
    for _ in range(TIMES):
        with patches.KNOWN_CONDITION.by(ours), patches.COMPILE.by(ours):
            assert patching._ours()[patches.COMPILE].args[0]
    after = sys.getrefcount(ours), sys.getrefcount(nothing)
    # One object may stay with this thread, and is freed with it.
    assert all(abs(now - then) <= 2 for now, then in zip(after, before, strict=True))


def test_what_is_handed_on_lives_until_it_is_replaced(version):
    handed_on = {patches.COMPILE: "something"}
    before = sys.getrefcount(handed_on)
    for _ in range(TIMES):
        patching._hand_on(handed_on)
        assert torch._C._get_obj_in_tls(patching._KEY) is handed_on
    assert before <= sys.getrefcount(handed_on) <= before + 1
    patching._hand_on(patching._NOTHING)
    assert sys.getrefcount(handed_on) == before
