"""`FP16_Optimizer` of ONNX Runtime Training: faster checks for other libraries' optimizers."""

from __future__ import annotations

import warnings
from typing import Any

from torch_ort.onnxruntime_training.optim import of_apex, of_deepspeed, of_megatron
from torch_ort.onnxruntime_training.optim.replacing import NotReplaced, class_names

_LIBRARIES = (of_deepspeed, of_apex, of_megatron)
_ACCELERATE = "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper"
_OPTIONS = {"get_horizontal_model_parallel_rank", "get_horizontal_model_parallel_group"}
_DONE = "_torch_ort_replaced"


def FP16_Optimizer(optimizer: Any, **kwargs: Any) -> Any:
    """Let an optimizer of DeepSpeed, Apex or Megatron read its gradients in one pass.

    Returns the same object. The check of gradients on the CPU for infinities, and their norm, then
    take one call for all gradients instead of one or more for each. These methods are replaced, of
    this object alone:

    - DeepSpeed's `DeepSpeedZeroOptimizer` (ZeRO stages 1 and 2), as DeepSpeed 0.19.8 has it:
      `has_overflow_serial`, `get_grad_norm_direct`, `has_overflow_partitioned_grads_serial`. The
      source of these is compared by its hash.
    - Optimizers that Apex' `amp.initialize` has made: `_post_amp_backward`, but that of Apex' own
      fused optimizers, and with master weights `zero_grad`, which takes `set_to_none=True`. The
      methods are recognised by module, name and arguments.
    - Megatron's `megatron.fp16.fp16.FP16_Optimizer`: `_check_overflow`, and `clip_master_grads`
      where both keywords are given. They are recognised by their arguments.

    If accelerate wraps DeepSpeed's optimizer, the wrapped one is treated. Any other optimizer, and
    one whose methods are not the known ones, stays as it is, and a UserWarning says why. For
    DeepSpeed's a UserWarning lists what was replaced. A second call does nothing.

    Args:
        optimizer: an optimizer of one of these libraries, ready to use.
        kwargs: `get_horizontal_model_parallel_rank` and `get_horizontal_model_parallel_group`,
            functions without arguments, for Megatron.

    Raises:
        TypeError: another keyword is given.
    """
    for unknown in kwargs.keys() - _OPTIONS:
        raise TypeError(f"FP16_Optimizer: got {unknown!r}, want {' or '.join(sorted(_OPTIONS))}")
    inner = optimizer.optimizer if _ACCELERATE in class_names(optimizer) else optimizer
    if getattr(inner, _DONE, False):
        return optimizer
    name = class_names(inner)[0]
    library = next((each for each in _LIBRARIES if each.is_theirs(inner)), None)
    if library is None:
        warnings.warn(
            f"FP16_Optimizer: got a {name}, want an optimizer of DeepSpeed's ZeRO stages 1 and 2, "
            "Apex' amp or Megatron's fp16; it stays as it is",
            UserWarning,
            stacklevel=2,
        )
        return optimizer
    try:
        told = library.replace(inner, **kwargs)
    except NotReplaced as reason:
        told = f"{name} stays as it is: {reason}"
    else:
        setattr(inner, _DONE, True)
    if told:
        warnings.warn(f"FP16_Optimizer: {told}", UserWarning, stacklevel=2)
    return optimizer
