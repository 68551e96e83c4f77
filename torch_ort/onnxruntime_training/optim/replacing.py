"""Recognises and replaces methods of other libraries' optimizers."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class NotReplaced(Exception):
    """Why an optimizer stays as it is."""


def class_names(value: Any) -> list[str]:
    """Give the full names of a value's class and of those above it."""
    return [f"{each.__module__}.{each.__qualname__}" for each in type(value).__mro__]


def method(owner: Any, name: str) -> Callable[..., Any]:
    """Give a method as it is bound now; raises NotReplaced if there is none."""
    found = getattr(owner, name, None)
    if not isinstance(found, types.MethodType):
        raise NotReplaced(f"it has no method {name}")
    return found


def check_source(found: Callable[..., Any], digests: Iterable[str]) -> None:
    """Raise NotReplaced unless the SHA-256 of a method's source is one of those known."""
    try:
        text = textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError) as error:
        raise NotReplaced(f"the source of {found.__name__} cannot be read") from error
    if hashlib.sha256(text.encode()).hexdigest() not in digests:
        raise NotReplaced(f"its {found.__name__} is not one that torch_ort knows")


def check_arguments(found: Callable[..., Any], names: list[str]) -> None:
    """Raise NotReplaced unless a method takes these arguments."""
    takes = list(inspect.signature(found).parameters)
    if takes != names:
        raise NotReplaced(f"its {found.__name__} takes {', '.join(takes) or 'nothing'}")


def check_attributes(owner: Any, names: Iterable[str]) -> None:
    """Raise NotReplaced unless an object has these attributes."""
    for name in names:
        if not hasattr(owner, name):
            raise NotReplaced(f"it has no {name}")


def bind(owner: Any, function: Callable[..., Any]) -> None:
    """Make a function the method of one object."""
    setattr(owner, function.__name__, types.MethodType(function, owner))


def all_on_cpu(tensors: Iterable[Tensor]) -> bool:
    """Tell whether no tensor is on another device, where reading a sum back would wait for it."""
    return all(each.device.type == "cpu" and not each.is_sparse for each in tensors)
