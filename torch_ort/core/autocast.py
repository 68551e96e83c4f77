"""The autocast state of a thread as a value: which kinds of devices cast, and to what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

DEVICES = ("cpu", "cuda")

# The kinds of devices under autocast, each with its dtype.
State = tuple[tuple[str, torch.dtype], ...]

OFF: State = ()


def state_now() -> State:
    """Give the state of this thread."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in DEVICES
        if torch.is_autocast_enabled(device)
    )


def dtypes_now() -> dict[str, torch.dtype]:
    """Give for each kind of device, under autocast or not, what `torch.autocast(kind)` casts to."""
    return {device: torch.get_autocast_dtype(device) for device in DEVICES}


@contextmanager
def in_state(
    state: State, caches: bool | None = None, defaults: Mapping[str, torch.dtype] | None = None
) -> Iterator[None]:
    """Run under autocast of these kinds of devices, and no others.

    `caches` switches the cache of casts on or off. `defaults` are the dtypes of `dtypes_now` for
    the kinds that do not cast. None leaves either as it is.
    """
    dtypes = dict(state)
    now = dtypes_now()
    wanted = {**now, **(defaults or {}), **dtypes}
    with ExitStack() as stack:
        for device in DEVICES:
            is_on = device in dtypes
            if is_on or torch.is_autocast_enabled(device) or wanted[device] != now[device]:
                entered = torch.autocast(
                    device, wanted[device], enabled=is_on, cache_enabled=caches
                )
                stack.enter_context(entered)
        yield
