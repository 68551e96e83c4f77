"""Models of libraries that recognise their own models by class, such as `PreTrainedModel`.

Transformers' Trainer saves a `PreTrainedModel` with its configuration and its tied weights, finds
the names of labels in the class, and generates text; PEFT's models are saved as adapters. An
ORTModule around such a model answers as `unittest.mock` and proxies do: its `__class__` is the
model's.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch

from torch_ort.options import Options

# Base classes that libraries test for, by module and name, so that nothing has to be imported.
_ASKED_FOR = {("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel")}
_GENERATING = ("transformers.generation.utils", "GenerationMixin")


def is_library_model(module: torch.nn.Module) -> bool:
    """Whether a library asks for the class of this module."""
    return any(_name(base) in _ASKED_FOR for base in type(module).__mro__)


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def generates_text(module: torch.nn.Module) -> bool:
    """Whether `generate` of this module calls the module itself, as transformers' models do."""
    return any(_name(base) == _GENERATING for base in type(module).__mro__)


def generating(model: torch.nn.Module, options: Options) -> Callable[..., Any]:
    """Give the model's `generate`, whose calls of the model run in the engine.

    Forward assigns the fields of the cache that it gets, and the cache grows with each token.
    Dynamo captures that, so forward is compiled as `torch.compile(backend="ort")` does it, with the
    options of an ORTModule. `generate` runs on a shallow copy of the model, which has this forward
    and shares all else: the model itself is as it was for whoever calls it meanwhile.
    """
    defaults = Options()
    given = {
        field.name: value
        for field in fields(options)
        if (value := getattr(options, field.name)) != getattr(defaults, field.name)
    }
    forward = torch.compile(model.forward, backend="ort", options=given)

    @functools.wraps(type(model).generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        twin = copy.copy(model)
        twin.forward = forward
        return twin.generate(*args, **kwargs)

    return generate


def methods_of_library(kind: type) -> Iterator[str]:
    """Name the methods of a library's model that the library itself defines.

    They run on the wrapped model: `generate` looks for its helpers in the type of what it is called
    on, `save_pretrained` writes the type's name.
    """
    libraries = {module.partition(".")[0] for module, _ in _ASKED_FOR}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in libraries:
            continue
        yield from (name for name, it in vars(base).items() if inspect.isfunction(it))
