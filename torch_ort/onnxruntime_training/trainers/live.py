"""A trainer around an existing model, criterion and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ort.onnxruntime_training.trainers.core import Core
from torch_ort.onnxruntime_training.trainers.descriptions import check_model
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
        gradient_accumulation_steps: Calls per update, which uses the mean of their gradients.
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
        check_model(model, None)
        if isinstance(model, ORTModule):
            debug_options = debug_options or model._debug_options
            model = model.module
        held = [it for group in optimizer.param_groups for it in group["params"]]
        if not {id(it) for it in held} & {id(it) for it in model.parameters()}:
            raise ValueError("optimizer: got no parameter of the model among those that it holds")
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.core = Core(
            ModuleWithLoss(model, criterion), optimizer, accumulation=gradient_accumulation_steps,
            max_norm=max_grad_norm, debug_options=debug_options,
        )  # fmt: skip

    @property
    def num_calls(self) -> int:
        """How many calls of `step` there were."""
        return self.core.num_calls

    @property
    def num_updates(self) -> int:
        """How many updates there were."""
        return self.core.num_updates

    def step(self, *batch: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch, whose last part are the labels; give its loss and the prediction.

        Both are without a history. The model's mode is that which it is in.
        """
        (loss, prediction), has_updated = self.core.step(batch)
        if has_updated and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return loss.detach(), _without_history(prediction)

    def eval_step(self, *batch: Any) -> tuple[torch.Tensor, Any]:
        """Give the loss and the prediction of a batch in evaluation mode, and train nothing."""
        return self.core.evaluate(batch)

    def state_dict(self) -> dict[str, Any]:
        """Give all that training goes on from, for `torch.save`; the model's keys are its own.

        Between two updates it holds the gradients that are there already.
        """
        scheduler, pending = self.lr_scheduler, self.core.pending_gradients()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "num_calls": self.num_calls,
            "num_updates": self.num_updates,
            "gradients": {
                name: pending[id(parameter)]
                for name, parameter in self.model.named_parameters()
                if id(parameter) in pending
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
        self.core.num_calls, self.core.num_updates = state["num_calls"], state["num_updates"]
        self.optimizer.zero_grad()
        for name, parameter in self.model.named_parameters():
            if name in state["gradients"]:
                parameter.grad = state["gradients"][name].to(parameter.device, copy=True)


# The name in older scripts: `trainer = ort.trainer(model, criterion, optimizer)`.
trainer = Trainer


def _without_history(prediction: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, prediction)
