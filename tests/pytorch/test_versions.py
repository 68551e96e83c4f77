"""What torch_ort does with versions of torch that it does not know."""

from __future__ import annotations

import logging
import re
import warnings

import pytest
import torch

import torch_ort
from torch_ort import ORTModule, Unsupported
from torch_ort.pytorch import patches, versions

pytestmark = pytest.mark.ort_only


@pytest.mark.parametrize(
    ("here", "since", "until", "want"),
    [
        ("2.13.0+cpu", "", "", True),
        ("2.13.0+cpu", "2.13", "", True),
        ("2.13.1", "2.14", "", False),
        ("2.9.0", "2.13", "", False),  # numbers, not texts
        ("2.13.0", "", "2.13", False),
        ("2.12.9+cu130", "", "2.13", True),
        ("2.12.0", "2.12", "2.13", True),
        ("3.0.0a0+git1", "2.12", "", True),
    ],
)
def test_versions_of_a_row(here, since, until, want, monkeypatch):
    monkeypatch.setattr(torch, "__version__", here)
    assert versions.is_within(since, until) is want


def captured(road):
    if road == "compile":
        torch.compiler.reset()
        return torch.compile(lambda x: x.sin() + 1, backend="ort")
    return ORTModule(torch.nn.GELU())


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_an_untested_version_is_told_of_once(road, monkeypatch):
    monkeypatch.setattr(versions, "TESTED", ("2.7", "2.9"))
    monkeypatch.setattr(versions, "_has_warned", False)
    words = r"tested with torch 2\.7 and 2\.9, and this is .*: what it relies on may have changed"
    with pytest.warns(UserWarning, match=words):
        captured(road)(torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(road)(torch.randn(4))
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_tested_version_is_not_told_of(monkeypatch):
    monkeypatch.setattr(versions, "TESTED", (".".join(torch.__version__.split(".")[:2]),))
    monkeypatch.setattr(versions, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured("compile")(torch.randn(3))


@pytest.mark.hands_over("the recorder cannot do without the name, and AOTAutograd can")
@pytest.mark.parametrize("target", ["torch.fx:_gone", "torch.no_such_room:f", "torch:_C.gone.f"])
@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_a_version_that_lacks_a_name_is_refused_by_it(road, target, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "torch_ort.recorder")
    row = patches.KNOWN_CONDITION
    place = row.place
    monkeypatch.setattr(row, "target", target)
    monkeypatch.delitem(vars(row), "place")
    words = f"torch {torch.__version__} has no {target.replace(':', '.')}, which torch_ort replaces"
    with pytest.raises(Unsupported, match=re.escape(words)):
        row.by(lambda theirs: None).__enter__()
    x = torch.randn(3, requires_grad=True)
    y = captured(road)(x)
    torch.testing.assert_close(y, x.sin() + 1 if road == "compile" else torch.nn.functional.gelu(x))
    assert words in caplog.text
    assert torch_ort.counters()["fallbacks"] == 0
    monkeypatch.undo()
    assert row.place == place


def test_a_row_of_other_versions_does_nothing(monkeypatch):
    row = patches.KNOWN_CONDITION
    before = getattr(*row.place)
    monkeypatch.setattr(row, "since", "99.0")
    with row.by(lambda theirs: None):
        assert getattr(*row.place) is before
