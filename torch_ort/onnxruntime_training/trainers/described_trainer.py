"""What both generations of ORTTrainer share: a model whose inputs and outputs are described."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.optim.configs import OptimizerConfig
from torch_ort.onnxruntime_training.trainers import onnx_export, optimizer_state
from torch_ort.onnxruntime_training.trainers.core import Core
from torch_ort.onnxruntime_training.trainers.descriptions import (
    Described,
    IODescription,
    Watch,
    bind,
    check_model,
    demand,
)
from torch_ort.onnxruntime_training.trainers.ranks import join, num_ranks, sharded
from torch_ort.ortmodule import DebugOptions, ORTModule


@dataclass
class Settings:
    """The settings of a trainer besides model, descriptions and optimizer."""

    device: torch.device | None = None
    accumulation: int = 1
    world_rank: int = 0
    world_size: int = 1
    is_sharded: bool = False
    is_mixed: bool = False
    clips: bool = True
    is_deterministic: bool = False
    opset: int = 12
    frozen_weights: Sequence[str] = field(default_factory=list)


class DescribedTrainer:
    """Trains a described model with an optimizer that is made from its settings.

    Args:
        model: A module, or an ORTModule, whose options are taken over then.
        loss_fn: `loss_fn(prediction, label)`, or None if the model gives the loss.
        inputs: Descriptions, the label of `loss_fn` last.
        outputs: Descriptions.
        loss: The name of the output that is the loss.
        config: The optimizer.
        settings: All else.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor] | None,
        inputs: Sequence[IODescription],
        outputs: Sequence[IODescription],
        loss: str,
        config: OptimizerConfig,
        settings: Settings,
    ) -> None:
        check_model(model, loss_fn)
        debug_options: DebugOptions | None = None
        if isinstance(model, ORTModule):
            debug_options, model = model._debug_options, model.module
        join(settings.world_rank, settings.world_size, settings.device or torch.device("cpu"))
        if settings.device is not None:
            model.to(settings.device)
        freeze(model, settings.frozen_weights)
        self.model = model
        self.loss_fn = loss_fn
        self.settings = settings
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.loss = loss
        self.trained = {name: it for name, it in model.named_parameters() if it.requires_grad}
        self._watch = Watch()
        self._debug_options = debug_options
        self._predicting: dict[tuple[str, ...], ORTModule] = {}
        self._sample: list[Any] = []
        names = [it.name_ for it in self.outputs]
        # The core requires the loss as the first output.
        self._order = [loss, *(name for name in names if name != loss)]
        self.core = Core(
            Described(model, loss_fn, [it.name_ for it in self.inputs], self._order, loss),
            self._make_optimizer(config),
            accumulation=settings.accumulation,
            max_norm=_clip_of(config) if settings.clips else None,
            autocast=torch.float16 if settings.is_mixed else None,
            is_deterministic=settings.is_deterministic,
            debug_options=debug_options,
        )

    def _make_optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        groups = config.groups(self.trained.items())
        kind, own = config.made_by[config.name], config.settings()
        return sharded(kind, groups, own) if self.settings.is_sharded else kind(groups, **own)

    @property
    def input_names(self) -> list[str]:
        """Names of the described inputs."""
        return [it.name_ for it in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of the described outputs."""
        return [it.name_ for it in self.outputs]

    def train(
        self, given: Mapping[str, Any], scale: float | None, lr: Callable[[], float] | float
    ) -> tuple[dict[str, Tensor], bool | None]:
        """Train on a batch; give its outputs by name, and whether there was an update.

        `lr` is asked for before the update.
        """
        args = self._placed(demand("train_step", self.input_names, given))
        self._watch.look(self.inputs, args)
        self._remember(args)
        if not self.model.training:
            self.model.train()
        results, has_updated = self.core.step(
            tuple(args), scale=scale, before_update=lambda: self._set_lr(lr)
        )
        found = {name: it.detach() for name, it in zip(self._order, results, strict=True)}
        self._look_at(found)
        return found, has_updated

    def evaluate(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], fetches: Sequence[str]
    ) -> dict[str, Tensor]:
        """Give the outputs of a batch in evaluation mode; labels may lack if no loss is fetched."""
        found = bind("eval_step", self.input_names, args, kwargs)
        if self.loss in fetches or len(found) == len(self.inputs):
            args = self._placed(demand("eval_step", self.input_names, found))
            self._watch.look(self.inputs, args)
            self._remember(args)
            outputs = dict(zip(self._order, self.core.evaluate(tuple(args)), strict=True))
        else:
            outputs = self._predict(found)
        self._look_at(outputs)
        return outputs

    def _predict(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        """Call the model without its loss."""
        if self.loss_fn is None:
            names = [name for name in self.input_names if name in found]
        else:
            names = self.input_names[:-1]
        args = self._placed(demand("eval_step", names, found))
        described = {it.name_: it for it in self.inputs}
        self._watch.look((described[name] for name in names), args)
        outputs = self._order[1:]
        if tuple(names) not in self._predicting:
            module = Described(self.model, None, names, outputs, "")
            self._predicting[tuple(names)] = ORTModule(module, self._debug_options)
        results = self.core.evaluate(tuple(args), self._predicting[tuple(names)])
        return dict(zip(outputs, results, strict=True))

    def fetched(self, outputs: Mapping[str, Tensor], fetches: Sequence[str]) -> list[Tensor]:
        """Give outputs in the order in which they are fetched, or described."""
        return [outputs[name] for name in fetches or self.output_names]

    def checked_fetches(self, fetches: Sequence[str] | None) -> list[str]:
        """Give the outputs that a step is to give; raises ValueError for unknown ones."""
        fetches = list(fetches or self.output_names)
        for name in fetches:
            if name not in self.output_names:
                raise ValueError(
                    f"fetches: got {name!r}, want some of {', '.join(self.output_names)}"
                )
        return fetches

    def _placed(self, args: Sequence[Any]) -> list[Any]:
        device = self.settings.device
        if device is None:
            return list(args)
        return [it.to(device) if isinstance(it, Tensor) else it for it in args]

    def _look_at(self, outputs: Mapping[str, Tensor]) -> None:
        known = [it for it in self.outputs if it.name_ in outputs]
        # Under mixed precision predictions are float16, whatever the description states.
        self._watch.look(known, (outputs[it.name_] for it in known), not self.settings.is_mixed)

    def _set_lr(self, lr: Callable[[], float] | float) -> None:
        value = float(lr() if callable(lr) else lr)
        for group in self.core.optimizer.param_groups:
            group["lr"] = value

    def _remember(self, args: Sequence[Any]) -> None:
        """Keep of what kind the inputs are, for `save_as_onnx`; not their numbers."""
        if not self._sample:
            self._sample = [
                (list(it.shape), it.dtype, it.device) if isinstance(it, Tensor) else it
                for it in args
            ]

    def save_as_onnx(self, path: str) -> None:
        """Write what evaluation computes, with the weights of now, as an ONNX model.

        Raises RuntimeError before the first step, which tells what inputs are like.
        """
        if not self._sample:
            raise RuntimeError(
                "save_as_onnx: no step has run yet, which tells what inputs are like"
            )
        made = (
            torch.zeros(it[0], dtype=it[1], device=it[2]) if isinstance(it, tuple) else it
            for it in self._sample
        )
        names = self.input_names
        module = Described(self.model, self.loss_fn, names, self.output_names, self.loss)
        run = lambda engine: self.core.evaluate(tuple(made), engine)  # noqa: E731
        shapes = [it.shape_ for it in self.inputs]
        onnx_export.write(path, module, run, names, shapes, self.output_names, self.settings.opset)

    # ---- state by the names of parameters

    def weights(self) -> dict[str, Tensor]:
        """Give copies of all parameters and buffers of the model on the CPU, by its own names."""
        return {name: it.detach().cpu().clone() for name, it in self.model.state_dict().items()}

    def optimizer_states(self) -> optimizer_state.States:
        """Give the optimizer's state of each parameter; if it is sharded, this rank's part."""
        return optimizer_state.read(self.core.optimizer, self.trained)

    def pending(self) -> dict[str, Tensor]:
        """Give the gradients that wait for an update, by name, on the CPU.

        Raises RuntimeError where ranks have gradients that they have not exchanged yet.
        """
        found = self.core.pending_gradients()
        if found and num_ranks() > 1:
            raise RuntimeError(
                "state_dict: got gradients that ranks have not exchanged yet, want a state after "
                f"an update, each {self.core.accumulation}th step"
            )
        return {
            name: found[id(it)].detach().cpu().clone()
            for name, it in self.trained.items()
            if id(it) in found
        }

    def load_optimizer(
        self, states: optimizer_state.States, pending: Mapping[str, Tensor], strict: bool
    ) -> None:
        """Let the optimizer go on from such state and gradients."""
        optimizer_state.put(self.core.optimizer, self.trained, states, strict)
        self.core.optimizer.zero_grad()
        for name, gradient in pending.items():
            if name in self.trained:
                param = self.trained[name]
                param.grad = gradient.to(param.device, copy=True)


def freeze(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Take parameters out of training; raises ValueError for a name that is not there."""
    known = dict(model.named_parameters())
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 2, 0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"frozen_weights: got {name!r}, want names of parameters{hint}")
        known[name].requires_grad_(False)


def _clip_of(config: OptimizerConfig) -> float | None:
    return config.defaults.get("max_norm_clip")
