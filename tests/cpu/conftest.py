# Tests here run with several numbers of threads. Those of what regions compute run on a GPU too.
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from regions import CACHES, CUDA, ISAS

from torch_ort import _C


def pytest_configure(config: pytest.Config) -> None:
    if "cuda" in (config.getoption("-m") or "").replace("not cuda", ""):
        ISAS[:] = [CUDA]  # the modules that are imported later take it from there


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("also_on_cuda") and ISAS == [CUDA]:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def planted() -> Iterator[Callable[[str], None]]:
    """Return a function that lets products be as on processors with caches of a name."""
    yield lambda name: _C.testing.plant_caches(CACHES[name])
    _C.testing.plant_caches(None)
