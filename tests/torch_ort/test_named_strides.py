"""as_strided counts in the memory of an argument, of which a graph may get a copy or a part."""

from __future__ import annotations

import pytest
import torch

import torch_ort
from tests.roads import ROADS, Applies
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only

FUNCTIONS = {
    "strides": lambda x: x.as_strided((2, 3), (3, 1)) * 2,
    "strides and offset": lambda x: x.as_strided((2, 3), (3, 1), 1) * 2,
    "of a view": lambda x: x[1:].as_strided((2, 3), (3, 1), 1) * 2,
    "copy": lambda x: torch.as_strided_copy(x, (2, 3), (3, 1), storage_offset=2) * 2,
    "scatter": lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (5,)) * 2,
    "of a copy": lambda x: x.clone().as_strided((2, 3), (3, 1), 1) * 2,
    "of a product": lambda x: (x * 2).neg().as_strided((2, 3), (3, 1), 1) * 2,
    "result": lambda x: x.as_strided((2, 3), (3, 1), 1),
}
ARGUMENTS = {
    "dense": lambda: torch.arange(24.0).view(4, 6),
    "part": lambda: torch.arange(40.0)[8:32].view(4, 6),
    "transposed": lambda: torch.arange(24.0).view(6, 4).t(),
    "gaps": lambda: torch.arange(40.0).view(4, 10)[:, 2:8],
}


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function(name, kind):
    function, x = FUNCTIONS[name], ARGUMENTS["dense"]()
    compiled = torch.compile(function, backend="ort")
    for tensor in (x, ARGUMENTS[kind](), x):
        torch.testing.assert_close(compiled(tensor), function(tensor))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_ortmodule(name, monkeypatch):
    function, x = FUNCTIONS[name], ARGUMENTS["dense"]()
    module = torch_ort.ORTModule(Applies(function))
    for kind in ("dense", "part", "transposed"):
        torch.testing.assert_close(module(ARGUMENTS[kind]()), function(ARGUMENTS[kind]()))
    assert torch_ort.counters()["fallbacks"] == 0
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = torch_ort.ORTModule(Applies(function))
    module(x)
    with pytest.warns(FallbackWarning, match="reads the memory of an argument that is not dense"):
        got = module(ARGUMENTS["gaps"]())
    torch.testing.assert_close(got, function(ARGUMENTS["gaps"]()))


def test_resize_to_its_own_sizes_keeps_what_is_not_row_major(monkeypatch):
    def resized(x):
        return (x.t() * 2).resize_(6, 4) * 2

    x = torch.arange(24.0).view(4, 6)
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    with pytest.warns(FallbackWarning, match="resize_: to the sizes that a tensor has"):
        got = torch_ort.ORTModule(Applies(resized))(x)
    torch.testing.assert_close(got, resized(x))


@pytest.mark.parametrize("road", ROADS)
def test_windows_that_are_written_into(road, monkeypatch):
    def written(x):
        y = x * 2
        y.unfold(0, 1, 2).neg_()  # every second row
        return y

    x = torch.arange(20.0).view(5, 4)
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = ROADS[road](Applies(written))
    with pytest.warns(FallbackWarning, match="forward writes into what unfold gave"):
        got = module(x)
    torch.testing.assert_close(got, written(x))
