"""Checks of arguments that the functions of this package share."""

from __future__ import annotations

from typing import Any

from torch_ort.ortmodule import ORTModule


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise TypeError for a value of another class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, want an object of {kind.__name__}")


def check_model(model: Any) -> None:
    """Raise TypeError unless the argument is an ORTModule."""
    check_kind("model", model, ORTModule)
