"""Finds CUDA's libraries and the cache of built kernels, from the environment and the packages."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

import torch

from torch_ort import _C, options
from torch_ort.engine.program import Program
from torch_ort.pytorch import device_graphs
from torch_ort.pytorch.trace_compat import real_tensors

_logger = logging.getLogger("torch_ort.cuda")

# The folders of NVRTC in the packages that PyTorch's wheels depend on, by version of CUDA.
_NVRTC_FOLDERS = {"13": ("cu13", "lib"), "12": ("cuda_nvrtc", "lib")}


def configure() -> None:
    """Tell the engine where CUDA's libraries are, and where kernels and their texts go.

    Raises UserError for a value of the wrong kind, and for another library than the one in use.
    """
    found = options.resolve_process()
    of_graphs = options.resolve()
    _C.cuda.configure(
        libcuda=found.libcuda,
        nvrtc=found.nvrtc,
        nvrtc_folders=_nvrtc_folders(),
        cache_dir=found.kernel_cache_dir,
        cache_bytes=found.kernel_cache_bytes,
        dump_dir=of_graphs.dump_dir if "cuda" in of_graphs.dump else "",
    )


def look_at_device(program: Program) -> None:
    """Find out the capabilities of a program's GPU, once in a process.

    Warns if kernels for it cannot be built, or not be kept.
    """
    if not torch.cuda.is_available() or program.device_type() != "cuda":
        return
    _register_device_graphs()
    if missing := _C.cuda.missing():
        say_that_nothing_is_fused(missing)
        return
    _C.cuda.set_wide_products(_has_wide_products())
    if problem := _C.cuda.disk_cache_problem():
        _warn("kernels are built anew in each process: " + problem)


def say_that_nothing_is_fused(reason: str) -> None:
    """Warn, once in a process for each reason, that PyTorch's kernels run on CUDA."""
    _warn("nothing is fused on CUDA, where PyTorch's kernels run: " + reason)


@functools.cache
def _register_device_graphs() -> None:
    _C.set_device_graphs(device_graphs.capture)


@functools.cache
def _has_wide_products() -> bool:
    # A graph may be compiled while tensors are fake, or under autocast.
    with real_tensors(), torch.no_grad(), torch.autocast("cuda", enabled=False):
        ones = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
        try:
            return bool((torch.mm(ones, ones, out_dtype=torch.float32) == 8).all())
        # The GPU, PyTorch or its library does not support this.
        except (TypeError, RuntimeError):
            return False


@functools.cache
def _warn(message: str) -> None:
    _logger.warning("%s", message)


@functools.cache
def _nvrtc_folders() -> list[str]:
    return [folder for folder in _candidates() if os.path.isdir(folder)]


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    # PyTorch's own version comes first, because the driver may be too old for a newer one.
    own = (torch.version.cuda or "").partition(".")[0]
    for version in sorted(_NVRTC_FOLDERS, key=lambda version: version != own):
        parts = _NVRTC_FOLDERS[version]
        for package in (spec and spec.submodule_search_locations) or ():
            yield os.path.join(package, *parts)


# Threads may still compile kernels when the process unloads the libraries.
atexit.register(_C.cuda.stop_working)
