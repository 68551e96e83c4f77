# Tests here run with several numbers of threads. Those of what regions compute run on a GPU too.
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from regions import CUDA, ISAS


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
