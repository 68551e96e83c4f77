"""A trainer around a model, a criterion and an optimizer that the caller has made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_ort.ortmodule import DebugOptions, ModuleWithLoss, ORTModule
from torch_ort.pytorch.module_compat import pytree


class Trainer:
    """Runs forward, backward and the update of weights in one call, through an ORTModule.

    The criterion is a part of the engine's graph. With several ranks of torch.distributed the
    gradients are averaged over them, by DistributedDataParallel around the ORTModule.

    Args:
        model: Any module, or an ORTModule, whose options are taken over then.
        criterion: Called as `criterion(model(*inputs), labels)`, gives a tensor without dims.
        optimizer: Holds parameters of the model.
        lr_scheduler: Its `step()` follows each update.
        gradient_accumulation_steps: Every so manieth call updates, by the mean of their gradients.
        max_grad_norm: The norm to which all gradients together are clipped before an update.
        debug_options: Of the ORTModule.

    Raises TypeError for a model that is no module, ValueError for numbers out of range and for an
    optimizer that holds no parameter of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        debug_options: DebugOptions | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, want a torch.nn.Module")
        if isinstance(model, torch.nn.DataParallel | DistributedDataParallel):
            raise TypeError(
                f"model: got {type(model).__name__}, want the module inside; "
                "ranks of torch.distributed train together without it"
            )
        if gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps: got {gradient_accumulation_steps}, want at least 1"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm: got {max_grad_norm}, want None or more than 0")
        if isinstance(model, ORTModule):
            debug_options = debug_options or model._debug_options
            model = model.module
        held = [it for group in optimizer.param_groups for it in group["params"]]
        if not {id(it) for it in held} & {id(it) for it in model.parameters()}:
            raise ValueError("optimizer: got no parameter of the model among those that it holds")
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.num_calls = 0
        self.num_updates = 0
        self._held = held
        self._ortmodule = ORTModule(ModuleWithLoss(model, criterion), debug_options)
        self._runs = _spread(self._ortmodule)

    def step(self, *batch: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch, whose last part are the labels; give its loss and the prediction.

        Both are without a history. The model's mode is that which it is in.
        """
        calls_before = self.num_calls % self.gradient_accumulation_steps
        is_last = calls_before == self.gradient_accumulation_steps - 1
        if calls_before == 0:
            self.optimizer.zero_grad()
        with self._synchronized(is_last):
            loss, prediction = self._runs(*batch)
            (loss / self.gradient_accumulation_steps).backward()
        self.num_calls += 1
        if is_last:
            self._update()
        return loss.detach(), _without_history(prediction)

    def eval_step(self, *batch: Any) -> tuple[torch.Tensor, Any]:
        """Give the loss and the prediction of a batch in evaluation mode, and train nothing."""
        modes = [(module, module.training) for module in self._ortmodule.module.modules()]
        self._ortmodule.eval()
        try:
            with torch.no_grad():
                return self._ortmodule(*batch)
        finally:
            for module, mode in modes:
                module.training = mode

    def state_dict(self) -> dict[str, Any]:
        """Give all that training goes on from, for `torch.save`; the model's keys are its own.

        Between two updates it holds the gradients that are there already.
        """
        is_between = self.num_calls % self.gradient_accumulation_steps
        scheduler = self.lr_scheduler
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "num_calls": self.num_calls,
            "num_updates": self.num_updates,
            "gradients": {
                name: parameter.grad
                for name, parameter in self.model.named_parameters()
                if is_between and parameter.grad is not None
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises ValueError where only one of both has a scheduler.
        """
        saved = state["lr_scheduler"]
        if (saved is None) != (self.lr_scheduler is None):
            has, wants = ("no", "one") if saved is None else ("one", "none")
            raise ValueError(f"lr_scheduler: the state has {has}, this trainer wants {wants}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(saved)
        self.num_calls, self.num_updates = state["num_calls"], state["num_updates"]
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            if name in state["gradients"]:
                parameter.grad = state["gradients"][name].to(parameter.device, copy=True)

    def _update(self) -> None:
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._held, self.max_grad_norm)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.num_updates += 1

    def _synchronized(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Let ranks exchange gradients at the last call before an update only."""
        if is_last or not isinstance(self._runs, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._runs.no_sync()


# As it was written: `trainer = ort.trainer(model, criterion, optimizer)`.
trainer = Trainer


def _spread(module: ORTModule) -> torch.nn.Module:
    """Put DistributedDataParallel around a module where there are several ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return module
    return DistributedDataParallel(module) if distributed.get_world_size() > 1 else module


def _without_history(prediction: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, prediction)
