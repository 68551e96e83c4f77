"""CUDA's libraries and the cache of built kernels, as the environment and the packages say."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
from collections.abc import Iterator

from torch_ort import _C, options

# Of the packages that PyTorch's wheels bring: of CUDA 13, and of CUDA 12.
_NVRTC_FOLDERS = (("cu13", "lib"), ("cuda_nvrtc", "lib"))


def configure() -> None:
    """Tell the engine where CUDA's libraries are, and where built kernels are kept.

    Raises UserError for a value of the wrong kind, and for another library than the one in use.
    """
    found = options.resolve_process()
    _C.cuda.configure(
        libcuda=found.libcuda,
        nvrtc=found.nvrtc,
        nvrtc_folders=_nvrtc_folders(),
        cache_dir=found.kernel_cache_dir,
        cache_bytes=found.kernel_cache_bytes,
    )


@functools.cache
def _nvrtc_folders() -> list[str]:
    return [folder for folder in _candidates() if os.path.isdir(folder)]


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for parts in _NVRTC_FOLDERS:
        for package in (spec and spec.submodule_search_locations) or ():
            yield os.path.join(package, *parts)


# Threads may be building: what they call is taken down as the process ends.
atexit.register(_C.cuda.stop_working)
