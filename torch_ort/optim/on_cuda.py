"""Optimizer steps on GPUs, by the engine's kernels (csrc/optim/on_cuda.h)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_ort import _C
from torch_ort._C import Unsupported


def are_there() -> bool:
    """Tell whether kernels can run on CUDA; if not, a warning has said once why."""
    return _missing() == ""


@functools.cache
def _missing() -> str:
    # `python -m torch_ort.options` must be the first to import the module.
    from torch_ort.engine import cuda

    cuda.configure()
    missing = _C.cuda.missing()
    if missing:
        cuda.say_that_nothing_is_fused(missing)
    return missing


def settings(lr: float | Tensor, taken: float | Tensor = 0, **numbers: Any) -> _C.StepSettings:
    """Give the settings of a group; its rate and count of steps may be tensors on the device."""
    made = _C.StepSettings(**numbers)
    for name, value in (("lr", lr), ("taken", taken)):
        setattr(made, f"{name}_tensor" if isinstance(value, Tensor) else name, value)
    return made


def step(
    rule: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    settings_of: Sequence[int],
    settings: Sequence[_C.StepSettings],
    **arguments: Any,
) -> tuple[list[int], Tensor | None, Tensor | None]:
    """Update what kernels take; gives the indices of the others, norm and `skipped` as tensors.

    Nothing is updated where a kernel does not build: a warning has said once why.
    """
    try:
        return _C.step_on_cuda(rule, params, grads, states, settings_of, settings, **arguments)
    except Unsupported as error:
        from torch_ort.engine import cuda

        cuda.say_that_nothing_is_fused(str(error))
        return list(range(len(params))), None, None
