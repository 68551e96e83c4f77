"""What torch_ort does with versions of torch that it does not know."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torch_ort
from torch_ort import ORTModule, Unsupported
from torch_ort.pytorch import patches, private, versions

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
    monkeypatch.setattr(versions, "TESTED", ("2.5", "2.7", "2.9"))
    monkeypatch.setattr(versions, "_has_warned", False)
    words = r"tested with torch 2\.5, 2\.7 and 2\.9, and this is .*: what it relies on may have"
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


SOME = [
    "torch._dynamo.source:AttrSource",
    "torch._dynamo:exc.UserError",  # of a module
    "torch._functorch._aot_autograd.descriptors:",  # a whole module
    "torch.fx.experimental.symbolic_shapes:ShapeEnv",  # a class of ours is derived from it
    "torch._C:_SymNode",
    "torch._dynamo.convert_frame:ConvertFrameAssert.__call__",  # of a row that stays
]
STAYS = [row for row in patches.TABLE if row.stays and not isinstance(row, patches.Elsewhere)]
ALL = [
    *(f"{module}:{name}" for module, names in private.NAMES.items() for name in names.split()),
    *(row.target for row in STAYS if not row.target.endswith("__setattr__")),  # all objects have it
]


def trained_without(names: list[str]) -> list[str]:
    """Train with each of some names hidden from torch_ort; give what the program says of each."""
    script = Path(__file__).with_name("train_without_a_name.py")
    run = subprocess.run(
        [sys.executable, str(script), *names], capture_output=True, text=True, timeout=600,
        check=False, env=os.environ | {"TORCH_ORT_STRICT": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.split("end\n")[:-1]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_torch_that_lacks_a_name_trains_in_eager_mode(names):
    for name, said in zip(names, trained_without(names), strict=True):
        first = next(each for each in ALL if each.startswith(name))
        path = re.escape(first.replace(":", "."))
        lacks = (
            f"torch {re.escape(torch.__version__)} has no {path}(, nor [0-9]+ more names)?, which "
            "torch_ort uses to capture graphs; it is tested with torch [0-9., and]+"
        )
        # Of either road a warning, and an error in strict mode.
        wanted = [
            f"warning: torch_ort: capture: {lacks}; this graph runs in eager PyTorch .*",
            f"warning: ORTModule: .*{lacks}; the module runs from now on in plain PyTorch .*",
            f"Unsupported: {lacks}",
            f"ORTModuleONNXModelException: {lacks}",
        ]
        lines = said.splitlines()
        assert len(lines) == len(wanted), said
        for pattern, line in zip(wanted, lines, strict=True):
            assert re.fullmatch(pattern, line), (name, line)


def test_what_stands_for_a_name_has_no_instances():
    missing = versions.placeholder("torch._gone")

    class Derived(missing.Kind):
        pass

    assert not isinstance(1, missing | Derived)
    words = rf"torch {re.escape(torch.__version__)} has no torch\._gone\.Kind, which torch_ort uses"
    for call in (missing.Kind, Derived):
        with pytest.raises(Unsupported, match=words):
            call(1)
    with pytest.raises(TypeError, match="not iterable"):
        iter(missing)
