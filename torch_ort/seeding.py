"""`torch_ort.set_seed`."""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """Seed the random numbers of the engine: the same as `torch.manual_seed(seed)`.

    The engine draws its seeds from PyTorch's generators, so this seeds PyTorch on all devices too.
    Raises TypeError unless `seed` is an int.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, want an int")
    torch.manual_seed(seed)
