"""Replaces checks of DeepSpeed's optimizer for ZeRO stages 1 and 2, to treat all gradients at once.

What is left of their work, reductions between processes among it, their own methods do: they are
called with one number in the place of the gradients.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.optim import replacing
from torch_ort.optim.gradients import isa_in_force, norm, sum_squares

_CLASSES = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer",  # before 0.5.9
}
# SHA-256 of the sources in DeepSpeed 0.19.8.
_DIGESTS = {
    "has_overflow_serial": "f7c99d2a1fb6a846c43034308cbe3767d16120138c854a5129f0c366af58aeaa",
    "get_grad_norm_direct": "8e1ffafc3841f46ad9ca84a19d9764bc0018ed4d146866f34483a2c66337668a",
    "has_overflow_partitioned_grads_serial": (
        "6141630b8b450d746f1a0084e3bdf0165bea02b1aa4bff25381c703c4f04f6fd"
    ),
}


def is_theirs(optimizer: Any) -> bool:
    """Tell whether it is an optimizer of these stages."""
    return not _CLASSES.isdisjoint(replacing.class_names(optimizer))


def replace(optimizer: Any, **_: Any) -> str:
    """Replace the three methods; returns the text of the warning. Raises NotReplaced."""
    theirs = {}
    for name, digest in _DIGESTS.items():
        theirs[name] = replacing.method(optimizer, name)
        replacing.check_source(theirs[name], [digest])
    isa = isa_in_force()
    known = theirs["get_grad_norm_direct"].__globals__

    def overflow_of(grads: list[Tensor]) -> Tensor:
        number = SimpleNamespace(grad=torch.tensor([sum_squares(grads, isa)]))
        return theirs["has_overflow_serial"]([number])

    def has_overflow_serial(self: Any, params: Any) -> Tensor:
        params = list(params)
        grads = [param.grad for param in params if param.grad is not None]
        if replacing.all_on_cpu(grads):
            return overflow_of(grads)
        return theirs["has_overflow_serial"](params)

    def has_overflow_partitioned_grads_serial(self: Any) -> Tensor:
        of_groups = [self.averaged_gradients[i] for i in range(len(self.bit16_groups))]
        grads = [grad for grads in of_groups for grad in grads if grad is not None]
        if replacing.all_on_cpu(grads):
            return overflow_of(grads)
        return theirs["has_overflow_partitioned_grads_serial"]()

    def is_counted_here(param: Any, rank: int) -> bool:
        if getattr(param, known["PIPE_REPLICATED"], False):
            return False
        return rank == 0 or known["is_model_parallel_parameter"](param)

    def get_grad_norm_direct(
        self: Any, gradients: Any, params: Any, norm_type: float = 2
    ) -> Tensor:
        gradients, params = list(gradients), list(params)
        real = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
        counted = [
            (grad, param)
            for grad, param in zip(real, params, strict=False)
            if is_counted_here(param, self.model_parallel_rank)
        ]
        grads = [grad for grad, _ in counted]
        if float(norm_type) != 2 or not counted or not replacing.all_on_cpu(grads):
            return theirs["get_grad_norm_direct"](gradients, params, norm_type)
        total = torch.tensor([norm(grads, isa)])
        return theirs["get_grad_norm_direct"]([total], [counted[0][1]], norm_type)

    for function in (
        has_overflow_serial,
        get_grad_norm_direct,
        has_overflow_partitioned_grads_serial,
    ):
        replacing.bind(optimizer, function)
    return f"{', '.join(_DIGESTS)} of {replacing.class_names(optimizer)[0]} are replaced"
