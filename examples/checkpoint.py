"""Checkpoints: what a training run needs to go on as if it had never stopped."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of another run; the message says which."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; an interruption leaves the former file as it was."""
    part = path.with_name(path.name + ".part")
    try:
        torch.save(state, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of a run with these settings.

    Only tensors and plain values are read, so a file from elsewhere cannot run code.
    Raises CheckpointError if there is none, or it is another run's.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"resume: no checkpoint at {path}; start without --resume") from None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"resume: {path} is no checkpoint: {reason}") from None
    if not isinstance(state, dict) or "settings" not in state:
        raise CheckpointError(f"resume: {path} is no checkpoint of this program")
    for name, want in settings.items():
        found = state["settings"].get(name)
        if found != want:
            raise CheckpointError(
                f"resume: {path} is of another run: {name}: got {want}, want {found}"
            )
    return state


def random_state(device: str) -> dict[str, torch.Tensor]:
    """Return the state of the generators that a run on this device draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: str) -> None:
    """Put the generators where `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
