"""Says where no `out=` overload is used: with versions of torch for which none has been proved."""

from __future__ import annotations

import functools
import logging

import torch

from torch_ort import _C

_logger = logging.getLogger("torch_ort.out_forms")


@functools.cache
def tell_of_unproved(device: str) -> None:
    """Log, once in a process, that the engine uses no `out=` overload on this type of device.

    What is computed is the same. Kernels of PyTorch then allocate their results, which are copied
    to where the plan wants them.
    """
    if not _C.proved_out_forms(device):
        _logger.info(
            "torch %s: no out= overload has been proved for this version on %s, so none is used, "
            "and PyTorch's kernels allocate their results; in a checkout, "
            "`python -m tests.out_forms.prove --write` proves them",
            torch.__version__, device,
        )  # fmt: skip
