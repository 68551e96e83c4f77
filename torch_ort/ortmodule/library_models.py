"""Models of libraries that recognise their own models by class, such as `PreTrainedModel`.

Transformers' Trainer saves a `PreTrainedModel` with its configuration and its tied weights, finds
the names of labels in the class, and generates text; PEFT's models are saved as adapters. An
ORTModule around such a model answers as `unittest.mock` and proxies do: its `__class__` is the
model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

# Base classes that libraries test for, by module and name, so that nothing has to be imported.
_ASKED_FOR = {("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel")}


def is_library_model(module: torch.nn.Module) -> bool:
    """Whether a library asks for the class of this module."""
    return any((base.__module__, base.__qualname__) in _ASKED_FOR for base in type(module).__mro__)


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
