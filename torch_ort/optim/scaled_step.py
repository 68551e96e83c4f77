"""An optimizer step over all groups at once, with loss scaling, overflow check and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ort import _C
from torch_ort.core.counting import count
from torch_ort.optim import on_cuda
from torch_ort.optim.gradients import isa_in_force, norm

Params = Iterable[Any]
Group = dict[str, Any]
MOMENTS = ("exp_avg", "exp_avg_sq")
# As in torch.nn.utils.clip_grad_norm_.
NORM_EPS = 1e-6


@dataclass
class Operands:
    """What a step reads and writes, parameter by parameter."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    rule_of: list[int] = field(default_factory=list)

    def add(self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rule: int) -> None:
        """Add a parameter."""
        self.params.append(param)
        self.grads.append(grad)
        self.means.append(mean)
        self.squares.append(square)
        self.rule_of.append(rule)

    def lists(self) -> tuple[list[Any], ...]:
        """Give them in the order in which the engine takes them."""
        return self.params, self.grads, self.means, self.squares, self.rule_of

    def for_gpu(self) -> tuple[Any, ...]:
        """Give them in the order in which `on_cuda.step` takes them."""
        return self.params, self.grads, [self.means, self.squares], self.rule_of

    def at(self, indices: list[int]) -> Operands:
        """Give those of some parameters."""
        return Operands(*([each[i] for i in indices] for each in self.lists()))


class ScaledStep(torch.optim.Optimizer):
    """Optimizers with the running means of the gradient and of its square as state.

    The means of bfloat16 and float16 parameters are float32, others have the dtype of the
    parameter. `group["step"]` counts the updates of a group, for all of its parameters.

    If all gradients are on one GPU, the device alone decides what is updated, and the CPU does not
    wait for it: counts of groups, `grad_norm` and `step_skipped` are tensors there. Else the host
    decides.
    """

    _rule_name: str  # for on_cuda.step

    # Then torch.amp.GradScaler leaves the scale to the step, and makes no pass over the gradients.
    _step_supports_amp_scaling = True
    _max_norm: float | None = None  # for calls of step() without max_norm

    def __init__(self, params: Params, defaults: Group) -> None:
        super().__init__(params, defaults)
        self._begin()

    def limit_norm(self, max_norm: float | None) -> None:
        """Clip in steps that name no `max_norm`: by the norm of all gradients as one vector."""
        self._max_norm = max_norm

    def _begin(self) -> None:
        self._isa = isa_in_force()
        self.grad_norm: float | Tensor | None = None
        self.step_skipped: bool | Tensor = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_max_norm": self._max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the state was saved by another optimizer
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._begin()

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | Tensor | None = None,
        found_inf: float | Tensor | None = None,
        max_norm: float | None = None,
    ) -> Any:
        """Update all parameters that have a gradient; gives what `closure` returns.

        Args:
            closure: computes the loss and the gradients.
            grad_scale: what the loss was multiplied by. The update divides by it; the gradients
                stay as they are.
            found_inf: not 0 if the gradients are known to be infinite or NaN somewhere; nothing is
                updated or counted then. With None the step looks itself if it has to scale or clip.
            max_norm: limit of the norm of all gradients as one vector, after unscaling. The update
                follows gradients made smaller as `torch.nn.utils.clip_grad_norm_` does it.

        Afterwards `step_skipped` tells whether nothing was updated, and `grad_norm` the norm before
        clipping, None where it was not asked for. If all gradients are on one GPU, both are tensors
        there, and arguments that are tensors there are read by it; a scale is not checked then.

        Raises:
            RuntimeError: a gradient is sparse. Nothing is updated.
            ValueError: `grad_scale` is not above 0, or `max_norm` below 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # GradScaler sets these as attributes.
        grad_scale = getattr(self, "grad_scale", None) if grad_scale is None else grad_scale
        found_inf = getattr(self, "found_inf", None) if found_inf is None else found_inf
        max_norm = self._max_norm if max_norm is None else max_norm
        with_grads = [self._with_grads(group) for group in self.param_groups]
        self._check(grad_scale, max_norm)
        if not self._step_on_device(with_grads, grad_scale, found_inf, max_norm):
            grads = [_numbers(param.grad) for params in with_grads for param in params]
            factor = self._gradient_factor(grads, grad_scale, found_inf, max_norm)
            self.step_skipped = factor is None
            if factor is not None:
                self._update(with_grads, factor)
        return loss

    def _check(self, grad_scale: float | Tensor | None, max_norm: float | None) -> None:
        name = type(self).__name__
        scale = 1.0 if grad_scale is None or _is_on_gpu(grad_scale) else float(grad_scale)
        if not scale > 0:
            raise ValueError(f"{name}: grad_scale: got {scale}, want more than 0")
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"{name}: max_norm: got {max_norm}, want 0 or more")

    def _with_grads(self, group: Group) -> list[Tensor]:
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if param.grad.layout != torch.strided:
                name = type(self).__name__
                raise RuntimeError(
                    f"{name}: gradients: got a sparse one, want dense ones; "
                    "torch.optim.SparseAdam takes sparse gradients"
                )
        return params

    def _gradient_factor(
        self,
        grads: list[Tensor],
        grad_scale: float | Tensor | None,
        found_inf: float | Tensor | None,
        max_norm: float | None,
    ) -> float | None:
        """Give what gradients are multiplied by; None if nothing may be updated."""
        self.grad_norm = None
        scale = 1.0 if grad_scale is None else float(grad_scale)
        self._check(scale, max_norm)
        if found_inf is not None and float(found_inf) != 0:
            return None
        factor = 1 / scale
        if max_norm is None and (grad_scale is None or found_inf is not None):
            return factor
        total = norm(grads, self._isa) / scale
        if max_norm is not None:
            self.grad_norm = total
            factor *= min(1.0, max_norm / (total + NORM_EPS))
        return factor if math.isfinite(total) else None

    def _operands(self, with_grads: list[list[Tensor]]) -> Operands:
        operands = Operands()
        for number, params in enumerate(with_grads):
            for param in params:
                state = self.state[param]
                if not state:
                    self._init_state(param, state)
                tensors = param, param.grad, state["exp_avg"], state["exp_avg_sq"]
                operands.add(*(map(_numbers, tensors) if param.is_complex() else tensors), number)
        return operands

    def _update(self, with_grads: list[list[Tensor]], factor: float) -> None:
        operands = self._operands(with_grads)
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
        rules = [self._rule(group, factor) for group in self.param_groups]
        left = self._step_of_engine(operands, rules)
        if any(operands.params[i].is_cuda for i in left) and on_cuda.are_there():
            left = self._step_of_gpus(operands.at(left), left, factor)
        for i in left:
            self._step_of_torch(
                operands.params[i], operands.grads[i], operands.means[i], operands.squares[i],
                rules[operands.rule_of[i]],
            )  # fmt: skip
        _count(len(operands.params), len(left))

    def _step_of_gpus(self, operands: Operands, numbers: list[int], factor: float) -> list[int]:
        """Update parameters on GPUs, as the host has decided; gives the indices of the others."""
        settings = [self._settings(group, group["step"]) for group in self.param_groups]
        scale = 1 / factor if factor != 0 else math.inf
        left, _, _ = on_cuda.step(self._rule_name, *operands.for_gpu(), settings, scale=scale)
        return [numbers[i] for i in left]

    def _step_on_device(
        self,
        with_grads: list[list[Tensor]],
        grad_scale: float | Tensor | None,
        found_inf: float | Tensor | None,
        max_norm: float | None,
    ) -> bool:
        """Leave the step to the GPU that has all gradients; tell whether there is one that can."""
        devices = {param.device for params in with_grads for param in params}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        if device.type != "cuda" or not on_cuda.are_there():
            return False
        operands = self._operands(with_grads)
        params, grads, states, settings_of = operands.for_gpu()
        if _C.left_by_cuda(params, grads, states):
            return False
        self.grad_norm, self.step_skipped = None, False
        looks = max_norm is not None or (grad_scale is not None and found_inf is None)
        if found_inf is not None and not _is_on_gpu(found_inf):
            if float(found_inf) != 0:
                self.step_skipped = True
                return True
            found_inf = None
        scale: dict[str, Any] = {"scale_tensor": grad_scale}
        if not _is_on_gpu(grad_scale):
            scale = {"scale": 1.0 if grad_scale is None else float(grad_scale)}
        counts = [_count_on(device, group.get("step", 0)) for group in self.param_groups]
        groups = list(zip(self.param_groups, counts, strict=True))
        settings = [self._settings(group, taken) for group, taken in groups]
        left, norm, skipped = on_cuda.step(
            self._rule_name, params, grads, states, settings_of, settings, **scale,
            found_inf=found_inf, looks=looks, max_norm=max_norm,
        )  # fmt: skip
        if left:
            return False
        for group, taken in groups:
            group["step"] = taken
        if max_norm is not None:
            self.grad_norm = norm
        if skipped is not None:
            self.step_skipped = skipped
        _count(len(params), 0)
        return True

    def _rule(self, group: Group, factor: float) -> Any:
        """Give the rule by which the step updates the parameters of a group."""
        raise NotImplementedError

    def _settings(self, group: Group, taken: float | Tensor) -> Any:
        """Give the same for a GPU, which works out what depends on steps and gradients."""
        raise NotImplementedError

    def _step_of_engine(self, operands: Operands, rules: list[Any]) -> list[int]:
        """Update the parameters that the engine supports; gives the indices of the others."""
        raise NotImplementedError

    def _step_of_torch(
        self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rule: Any
    ) -> None:
        """Do the same to a parameter on another device or of another layout."""
        raise NotImplementedError

    @staticmethod
    def _init_state(param: Tensor, state: dict[str, Any]) -> None:
        dtype = torch.promote_types(param.dtype, torch.float32)
        for name in MOMENTS:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def state_dict(self) -> dict[str, Any]:
        """Give the state under the names of `torch.optim.AdamW`, which can load it.

        Each parameter gets its group's number of steps as `step`.
        """
        added = self.register_state_dict_post_hook(_add_steps, prepend=True)
        try:
            return super().state_dict()
        finally:
            added.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of `torch.optim.AdamW`.

        Means that were saved in float32 stay what they were. The parameters of a group share one
        number of steps: the largest of theirs where the saved group has none.

        Raises:
            ValueError: the state has amsgrad or maximize, or does not fit the groups.
        """
        read: list[dict[str, Any]] = []

        def take(_: Any, given: dict[str, Any]) -> None:
            self._check_loaded(given)  # as hooks of the program have left it
            read.append(given)

        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(
            lambda _: self._take_over(read[0]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            for name in ("amsgrad", "maximize"):
                if group.get(name):
                    raise ValueError(
                        f"{type(self).__name__}: state_dict: got one of an optimizer with "
                        f"{name}=True, which this one does not know"
                    )

    def _take_over(self, saved: dict[str, Any]) -> None:
        # PyTorch has cast the means to the dtype of the parameters.
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            steps = [0]
            for param, number in zip(group["params"], saved_group["params"], strict=True):
                state = self.state.get(param, {})
                if "step" in state:
                    steps.append(int(state.pop("step")))
                dtype = torch.promote_types(param.dtype, torch.float32)
                for name in MOMENTS:
                    if name in state:
                        mean = saved["state"][number][name]
                        state[name] = mean.to(device=param.device, dtype=dtype)
            if "step" not in saved_group:
                group["step"] = max(steps)


def _add_steps(_: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    for group in packed["param_groups"]:
        if "step" in group:
            group["step"] = int(group["step"])  # it may have been counted on a GPU
        for number in group["params"]:
            state = packed["state"].get(number)
            if state:
                # One tensor for each parameter, since PyTorch's optimizers count in place.
                steps = torch.tensor(float(group.get("step", 0)))
                packed["state"][number] = {"step": steps, **state}


def update_moments(mean: Tensor, square: Tensor, grad: Tensor, rule: Any) -> None:
    """Let the running means of the gradient and of its square follow a gradient, by PyTorch."""
    mean.lerp_(grad, 1 - rule.beta1)
    square.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _count_on(device: torch.device, count: float | Tensor) -> Tensor:
    """Give a count of steps as a number on a GPU: itself if it is on one."""
    if _is_on_gpu(count):
        return count.to(device)
    return torch.full((), float(count), dtype=torch.float32, device=device)


def _count(params: int, left: int) -> None:
    count("optimizer_parameters", params - left)
    count("optimizer_parameters_by_torch", left)


def _numbers(tensor: Tensor) -> Tensor:
    """Give a tensor of which real numbers are the elements; it shares memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def checked(name: str, group: Group) -> Group:
    """Give the defaults of an optimizer of this class as they are.

    Raises ValueError where a number is out of its range.
    """
    beta1, beta2 = group["betas"]
    for what, value, below in (
        ("lr", float(group["lr"]), math.inf),
        ("betas[0]", beta1, 1.0),
        ("betas[1]", beta2, 1.0),
        ("eps", group["eps"], math.inf),
        ("weight_decay", group["weight_decay"], math.inf),
    ):
        if not 0 <= value < below:
            limit = "0 or more" if below == math.inf else f"0 or more and less than {below:g}"
            raise ValueError(f"{name}: {what}: got {value}, want {limit}")
    return group
