"""`SGD`, `Adam` and `AdamW` of `torch.optim`, with steps that read and write memory once.

They take the arguments of those classes, except for the ones that choose between implementations
(`foreach`, `fused`). They keep the same state under the same names, and either class loads the
other's `state_dict`. One call updates all parameters on the CPU, and one those on GPUs
(csrc/optim). PyTorch's functions update the others: those that are on another device, complex, not
dense, or on the CPU with a tensor as learning rate. `torch_ort.counters()` counts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as torch_adam
from torch.optim import sgd as torch_sgd

from torch_ort import _C
from torch_ort.core.counting import count
from torch_ort.optim import on_cuda
from torch_ort.optim.gradients import isa_in_force

Params = Iterable[Any]
Group = dict[str, Any]


class _FusedStep(torch.optim.Optimizer):
    """The step of an optimizer whose groups are updated one by one."""

    def __init__(self, *args: Any, in_backward: bool = False, **kwargs: Any) -> None:
        self._in_backward = in_backward
        self._isa = isa_in_force()
        super().__init__(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._in_backward = False
        self._isa = isa_in_force()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer` does."""
        super().add_param_group(param_group)
        if self._in_backward:
            group = self.param_groups[-1]
            step = functools.partial(self._step_one, group)
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(step)

    @torch.no_grad()
    def _step_one(self, group: Group, parameter: Tensor) -> None:
        self._step_group({**group, "params": [parameter]})
        parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError

    def _update(
        self,
        step: Callable[..., list[int]],
        step_on_cuda: Callable[[list[list[Any]], Group], list[int]],
        lists: list[list[Any]],
        settings: Group,
        *,
        for_torch: bool,
    ) -> list[int]:
        """Update the parameters in `lists[0]` that the steps support; gives the indices of others.

        `for_torch`: a setting is in force that only PyTorch's functions support.
        """
        params = lists[0]
        left = list(range(len(params)))
        of_tensors = {name for name, value in settings.items() if isinstance(value, Tensor)}
        if not for_torch and not of_tensors:
            left = step(*lists, **settings, isa=self._isa)
        # The device reads the learning rate where it is.
        may_run = not for_torch and of_tensors <= {"lr"}
        if may_run and any(params[i].is_cuda for i in left) and on_cuda.are_there():
            theirs = [_at(each, left) for each in lists]
            left = [left[i] for i in step_on_cuda(theirs, settings)]
        count("optimizer_parameters", len(params) - len(left))
        count("optimizer_parameters_by_torch", len(left))
        return left


class SGD(_FusedStep, torch.optim.SGD):
    """Stochastic gradient descent, optionally with momentum or Nesterov momentum.

    Arguments, defaults, formulas, state and errors are those of `torch.optim.SGD`.

    With `in_backward=True` each parameter is updated during backward, as soon as its gradient is
    computed, and its gradient is freed; `step` then has nothing to do. This suits training with one
    backward per step, without a gradient scaler, without clipping by the norm of all gradients, and
    without DistributedDataParallel, which averages gradients later. The hooks that do this live as
    long as the parameters; a copy of the optimizer has none.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        in_backward: bool = False,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize,
            in_backward=in_backward,
        )  # fmt: skip

    def _step_group(self, group: Group) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        known: list[Tensor | None] = []
        has_sparse_grad = self._init_group(group, params, grads, known)
        settings = _pick(
            group, "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"
        )
        buffers = [
            torch.empty_like(param) if buffer is None else buffer
            for param, buffer in zip(params, known or (), strict=False)
        ]
        lists = [params, grads, buffers, [buffer is None for buffer in known]]
        for_torch = group["differentiable"]
        left = self._update(_C.sgd_step, _sgd_on_cuda, lists, settings, for_torch=for_torch)
        if left:
            theirs = _at(known, left)
            torch_sgd.sgd(_at(params, left), _at(grads, left), theirs, has_sparse_grad, **settings)
            for i, buffer in zip(left, theirs, strict=False):
                buffers[i] = buffer
        for param, buffer in zip(params, buffers, strict=False):
            self.state[param]["momentum_buffer"] = buffer


class Adam(_FusedStep, torch.optim.Adam):
    """Adam (Kingma and Ba, 2015): mean of the gradient over the root of the mean of its square.

    Arguments, defaults, formulas, state and errors are those of `torch.optim.Adam`.

    With `capturable=True` steps are counted on the GPU, and `torch.amp.GradScaler` leaves unscaling
    and its check for infinities to the step. So the CPU need not wait for the GPU, and a CUDA graph
    can capture the step.

    With `in_backward=True` each parameter is updated during backward, as soon as its gradient is
    computed, and its gradient is freed; `step` then has nothing to do. This suits training with one
    backward per step, without a gradient scaler, without clipping by the norm of all gradients, and
    without DistributedDataParallel, which averages gradients later. The hooks that do this live as
    long as the parameters; a copy of the optimizer has none.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        decoupled_weight_decay: bool = False,
        in_backward: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            decoupled_weight_decay=decoupled_weight_decay, in_backward=in_backward,
        )  # fmt: skip

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # In this case torch.amp.GradScaler leaves the scale and the check for infinities to the
        # step, which then must not wait to know whether it counts.
        on_device = all(
            group["capturable"] and not group["differentiable"] for group in self.param_groups
        )
        return on_device and on_cuda.are_there()

    def _step_group(self, group: Group) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        largest: list[Tensor] = []
        steps: list[Tensor] = []
        has_complex = self._init_group(group, params, grads, means, squares, largest, steps)
        settings = _pick(
            group, "lr", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"
        )
        settings["beta1"], settings["beta2"] = group["betas"]
        lists = [params, grads, means, squares, largest, steps]
        # GradScaler sets these as attributes.
        scaled = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        step = _take_nothing if group["capturable"] else _C.adam_step
        on_gpu = functools.partial(_adam_on_cuda, **scaled)
        for_torch = group["differentiable"]
        left = self._update(step, on_gpu, lists, settings, for_torch=for_torch)
        theirs = [_at(tensors, left) for tensors in lists]
        if left and _unscale(theirs[1], **scaled):
            asked_of_torch = {name: group[name] for name in ("capturable", "differentiable")}
            torch_adam.adam(*theirs, has_complex=has_complex, **settings, **asked_of_torch)


class AdamW(Adam):
    """Adam with weight decay apart from the running means (Loshchilov and Hutter, 2019).

    Arguments, defaults, formulas, state and errors are those of `torch.optim.AdamW`.

    `capturable=True` and `in_backward=True` mean what they mean for `Adam`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        in_backward: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            decoupled_weight_decay=True, in_backward=in_backward,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the state was saved by a torch without this entry
            group["decoupled_weight_decay"] = True


def _take_nothing(params: list[Tensor], *_: Any, **__: Any) -> list[int]:
    """Take none of the parameters."""
    return list(range(len(params)))


def _sgd_on_cuda(lists: list[list[Any]], settings: Group) -> list[int]:
    params, grads, buffers, is_first = lists
    rule = on_cuda.settings(**settings)
    states = [buffers] if settings["momentum"] != 0 else []
    of_one = [0] * len(params)
    return on_cuda.step("sgd", params, grads, states, of_one, [rule], is_first=is_first)[0]


def _adam_on_cuda(
    lists: list[list[Any]], settings: Group, grad_scale: Tensor | None, found_inf: Tensor | None
) -> list[int]:
    params, grads, means, squares, largest, steps = lists
    numbers = {name: settings[name] for name in ("beta1", "beta2", "eps", "weight_decay")}
    decay = _C.StepDecay.BEFORE if settings["decoupled_weight_decay"] else _C.StepDecay.GRADIENT
    rule = on_cuda.settings(
        settings["lr"], **numbers, maximize=settings["maximize"], decay=decay, corrects=True
    )
    states = [means, squares, largest] if settings["amsgrad"] else [means, squares]
    left, _, _ = on_cuda.step(
        "adam", params, grads, states, [0] * len(params), [rule], steps=steps,
        scale_tensor=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    return left


def _unscale(grads: list[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
    """Replace gradients by unscaled ones for PyTorch's functions; tell whether to step."""
    if found_inf is not None and found_inf.item() != 0:
        return False
    if grad_scale is not None:
        grads[:] = [grad / grad_scale for grad in grads]
    return True


def _pick(group: Group, *names: str) -> Group:
    return {name: group[name] for name in names}


def _at(tensors: list[Any], indices: list[int]) -> list[Any]:
    return [tensors[i] for i in indices] if tensors else []
