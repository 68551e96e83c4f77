"""`torch_ort.set_seed`."""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """Seed all random numbers of the engine, which are PyTorch's: `torch.manual_seed`.

    Raises TypeError for what is no whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, want an int")
    torch.manual_seed(seed)
