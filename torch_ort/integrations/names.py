"""Registers our names with Accelerate and Transformers, which check names against lists.

Both check the name of a backend or an optimizer against an enumeration that only they can extend.
`register()`, which importing torch_ort calls, adds a member to each as soon as the library is
imported:

    TrainingArguments(torch_compile_backend="ort")  # accelerate.utils.DynamoBackend.ORT
    TrainingArguments(optim="adamw_ort_fused")      # transformers' OptimizerNames.ADAMW_ORT_FUSED

`unregister()` takes them out again. `torch_compile_backend="onnxrt"` needs neither: Accelerate has
that name, and PyTorch finds the backend by its entry point.
"""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch_ort.integrations.after_import import after_import, forget

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Member:
    """A member that is added to an enumeration of a library."""

    module: str
    enumeration: str
    name: str
    value: str
    major: int  # version of the library that this was written for
    instead: str  # what the user can write with another one

    def __call__(self, module: ModuleType) -> None:
        """Add it to the enumeration of the imported module."""
        package = self.module.partition(".")[0]
        version = importlib.metadata.version(package)
        if int(version.partition(".")[0]) != self.major:
            log.warning(
                "torch_ort: %s %s does not get the name %r, want version %d; %s",
                package, version, self.value.lower(), self.major, self.instead,
            )  # fmt: skip
            return
        kind = getattr(module, self.enumeration)
        if self.name in kind.__members__:
            return
        member = str.__new__(kind, self.value)
        member._name_, member._value_ = self.name, self.value
        member.__objclass__ = kind
        member._sort_order_ = len(kind.__members__)
        setattr(kind, self.name, member)
        kind._member_map_[self.name] = member
        kind._member_names_.append(self.name)
        kind._value2member_map_[self.value] = member

    def find(self) -> enum.Enum | None:
        """Give the member, where it was added."""
        kind = getattr(sys.modules.get(self.module), self.enumeration, None)
        return None if kind is None else kind.__members__.get(self.name)

    def undo(self) -> None:
        member = self.find()
        if member is None:
            return
        kind = type(member)
        kind._member_names_.remove(self.name)
        del kind._member_map_[self.name]
        del kind._value2member_map_[self.value]
        type.__delattr__(kind, self.name)


_BACKEND = _Member(
    "accelerate.utils.dataclasses", "DynamoBackend", "ORT", "ORT", 1, 'write "onnxrt" for "ort"'
)
_OPTIMIZER = _Member(
    "transformers.training_args", "OptimizerNames", "ADAMW_ORT_FUSED", "adamw_ort_fused", 5,
    "write Trainer(optimizer_cls_and_kwargs=(torch_ort.optim.FusedAdam, {...}))",
)  # fmt: skip


class _OptimizerHandler:
    """What makes the optimizer of that name."""

    module = "transformers.trainer_optimizer"

    def __call__(self, module: ModuleType) -> None:
        """Tell the imported module, which has imported the names of optimizers."""
        if (member := _OPTIMIZER.find()) is not None:
            module._OPTIMIZER_HANDLERS[member] = _fused_adam

    def undo(self) -> None:
        module = sys.modules.get(self.module)
        if module is not None and (member := _OPTIMIZER.find()) is not None:
            module._OPTIMIZER_HANDLERS.pop(member, None)


def _fused_adam(context: Any) -> tuple[type, dict[str, Any]]:
    from torch_ort.optim.fused_adam import FusedAdam

    return FusedAdam, {**context.optimizer_kwargs, **context.adam_kwargs}


_ADDITIONS = (_BACKEND, _OPTIMIZER, _OptimizerHandler())


def register() -> None:
    """Add our names to the libraries that are imported, and to the others once they are.

    A second call changes nothing. A library of another major version is left as it is, after one
    warning that says what to write instead.
    """
    for addition in _ADDITIONS:
        forget(addition.module, addition)
        after_import(addition.module, addition)


def unregister() -> None:
    """Take our names out again."""
    for addition in reversed(_ADDITIONS):
        forget(addition.module, addition)
        addition.undo()
