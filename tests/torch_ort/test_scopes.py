"""What holds for the time of a block."""

import threading

import pytest

from torch_ort.core.scopes import listening, set_here


def test_an_attribute_is_as_it_was_afterwards():
    local = threading.local()
    with set_here(local, "line", 1):
        with set_here(local, "line", None):
            assert local.line is None
        with pytest.raises(ZeroDivisionError), set_here(local, "line", 2):
            local.line /= 0
        assert local.line == 1
    assert not hasattr(local, "line")


def test_other_threads_have_their_own():
    local, seen = threading.local(), []
    with set_here(local, "line", 1):
        thread = threading.Thread(target=lambda: seen.append(hasattr(local, "line")))
        thread.start()
        thread.join()
    assert seen == [False]


def test_lists_that_are_equal_are_told_apart():
    listeners: list[list[int]] = []
    with listening(listeners) as outer:
        with listening(listeners) as inner:
            assert inner == outer == []
        assert listeners[0] is outer
        assert len(listeners) == 1
    assert listeners == []
