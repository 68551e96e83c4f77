"""The second ORTTrainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.optim.configs import OptimizerConfig
from torch_ort.onnxruntime_training.trainers import checkpoint_files
from torch_ort.onnxruntime_training.trainers.described_trainer import DescribedTrainer, Settings
from torch_ort.onnxruntime_training.trainers.descriptions import bind, check_model
from torch_ort.onnxruntime_training.trainers.loss_scaler import DynamicLossScaler
from torch_ort.onnxruntime_training.trainers.step_info import TrainStepInfo
from torch_ort.onnxruntime_training.trainers.v1.checkpoint import aggregated
from torch_ort.onnxruntime_training.trainers.v1.model_desc import ModelDescription
from torch_ort.onnxruntime_training.trainers.v1.options import ORTTrainerOptions


class ORTTrainer:
    """Trains by one call a step: forward, loss, backward and update run in the engine.

    Args:
        model: A module, or an ORTModule, whose options are taken over then.
        model_desc: `{"inputs": [(name, shape), ...], "outputs": [(name, shape, is_loss), ...]}`,
            the label of the loss function the last input. Where it contradicts the data, a warning
            says so once, and the data is taken as it is.
        optim_config: `SGDConfig`, `AdamConfig` or `LambConfig` of `torch_ort.optim`.
        loss_fn: `loss_fn(prediction, label)`; None if the model gives the loss.
        options: See `ORTTrainerOptions`.

    Raises:
        TypeError: an argument is of another kind, an ONNX model for instance.
        RuntimeError: the loss function does not take two arguments, or there is no way to reach the
            other ranks.
        ValueError: the description is wrong, or an option does not fit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_desc: Mapping[str, Any],
        optim_config: OptimizerConfig,
        loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        check_model(model, loss_fn)
        if not isinstance(optim_config, OptimizerConfig):
            raise TypeError(
                f"optim_config: got {type(optim_config).__name__}, want an SGDConfig, AdamConfig "
                "or LambConfig"
            )
        if not isinstance(options, ORTTrainerOptions | None):
            raise TypeError(f"options: got {type(options).__name__}, want ORTTrainerOptions")
        self.options = options or ORTTrainerOptions()
        self.model_desc = ModelDescription(model_desc)
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self._trainer = DescribedTrainer(
            model, loss_fn, self.model_desc.inputs, self.model_desc.outputs, self.model_desc.loss,
            optim_config, _settings(self.options),
        )  # fmt: skip
        self.train_step_info = TrainStepInfo(optim_config)
        mixed = self.options.mixed_precision
        self._scaler = (mixed.loss_scaler or DynamicLossScaler()) if mixed.enabled else None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, given in the order of the description or by name.

        Returns the outputs, one alone as it is, several as a tuple: those that
        `train_step_info.fetches` names, or all.

        Raises RuntimeError for a wrong number of inputs or an unknown name, ValueError for an
        unknown output.
        """
        info = self.train_step_info
        fetches = self._trainer.checked_fetches(info.fetches)
        found = bind("train_step", self._trainer.input_names, args, kwargs)
        scale = None if self._scaler is None else self._scaler.loss_scale
        outputs, has_updated = self._trainer.train(found, scale, self._lr)
        info.step += 1
        if has_updated is not None:
            info.all_finite = has_updated
            info.optimization_step += has_updated
            if self._scaler is not None:
                scale = self._scaler.update(info)
                # A scaler of the caller's may track the scale itself.
                self._scaler.loss_scale = self._scaler.loss_scale if scale is None else float(scale)
        return _unwrapped(self._trainer.fetched(outputs, fetches))

    def _lr(self) -> float:
        schedule = self.options.lr_scheduler
        return self.optim_config.lr if schedule is None else schedule.step(self.train_step_info)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Give the outputs of a batch in evaluation mode; nothing is trained.

        Labels may lack if `train_step_info.fetches` names predictions alone.

        Raises RuntimeError for a wrong number of inputs or an unknown name, ValueError for an
        unknown output.
        """
        fetches = self._trainer.checked_fetches(self.train_step_info.fetches)
        found = self._trainer.evaluate(args, kwargs, fetches)
        return _unwrapped(self._trainer.fetched(found, fetches))

    def save_as_onnx(self, path: str) -> None:
        """Write what evaluation computes, with the weights of now, as an ONNX model.

        Inputs and outputs have the described names, weights those of the model. Raises RuntimeError
        before the first step, which tells what inputs are like.
        """
        self._trainer.save_as_onnx(path)

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Give all that training goes on from, as plain data with tensors on the CPU.

        Args:
            pytorch_format: Whether to give the model's own `state_dict` alone.

        Returns `model`, where `full_precision` has weights and buffers by name; `optimizer`, with
        `Moment_1`, `Moment_2` and `Update_Count` of each weight (in ZeRO stage 1 of this rank's
        part); `trainer_options`, `train_step_info`, `partition_info`; `loss_scaler` (None without
        mixed precision); and between two updates `gradients`.
        """
        weights = self._trainer.weights()
        if pytorch_format:
            return weights
        distributed, info = self.options.distributed, self.train_step_info
        return {
            "model": {"full_precision": weights},
            "optimizer": self._trainer.optimizer_states(),
            "trainer_options": {
                "optimizer_name": self.optim_config.name,
                "mixed_precision": self.options.mixed_precision.enabled,
                "zero_stage": distributed.deepspeed_zero_optimization.stage,
                "world_rank": distributed.world_rank,
                "world_size": distributed.world_size,
            },
            "train_step_info": {
                "optimization_step": info.optimization_step,
                "step": info.step,
                "all_finite": info.all_finite,
            },
            "partition_info": {"is_partitioned": self.is_partitioned},
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
            "gradients": self._trainer.pending(),
        }

    @property
    def is_partitioned(self) -> bool:
        """Whether each rank keeps only a part of the optimizer's state."""
        settings = self._trainer.settings
        return settings.is_sharded and settings.world_size > 1

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what `state_dict` gave, or take over the weights alone.

        Raises RuntimeError, if `strict`, for weights that are missing or unknown; ValueError for
        state of another optimizer, or of a part of the parameters.
        """
        nested = state_dict.get("model")
        if not isinstance(nested, Mapping) or "full_precision" not in nested:
            self._trainer.model.load_state_dict(dict(state_dict), strict)
            return
        saved = state_dict["trainer_options"]["optimizer_name"]
        states = state_dict["optimizer"]
        if states and saved != self.optim_config.name:
            raise ValueError(
                f"state_dict: got state of {saved}, want that of {self.optim_config.name}"
            )
        self._trainer.model.load_state_dict(nested["full_precision"], strict)
        pending = state_dict["gradients"]
        # A checkpoint may leave out the optimizer; one from before the first update has no state.
        if states or pending or state_dict["train_step_info"]["optimization_step"] == 0:
            self._trainer.load_optimizer(states, pending, strict)
        info, core = self.train_step_info, self._trainer.core
        for name, value in state_dict["train_step_info"].items():
            setattr(info, name, value)
        core.num_calls, core.num_updates = info.step, info.optimization_step
        if self._scaler is not None and state_dict["loss_scaler"] is not None:
            self._scaler.load_state_dict(state_dict["loss_scaler"])

    def save_checkpoint(
        self,
        path: str,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> None:
        """Write the state of training and data of the caller.

        With ZeRO stage 1 each rank writes a file of its own.

        Raises ValueError for data that is no mapping, or cannot be read back as plain data,
        FileExistsError for a file that is there.
        """
        if not isinstance(user_dict, Mapping | None):
            raise ValueError(f"user_dict: got {type(user_dict).__name__}, want a dict")
        user = dict(user_dict or {})
        checkpoint_files.check_plain("user_dict", user)
        if Path(path).exists():
            raise FileExistsError(f"save_checkpoint: {path} is there already")
        state = self.state_dict()
        if not include_optimizer_states:
            state |= {"optimizer": {}, "gradients": {}}
        checkpoint_files.write(path, {**state, "user_dict": user})

    def load_checkpoint(self, *paths: str, strict: bool = True) -> dict[str, Any]:
        """Go on from a checkpoint, or from those of all ranks together; gives the caller's data.

        Raises FileNotFoundError, ValueError for files of another kind (HDF5 by name), and what
        `load_state_dict` raises.
        """
        state = aggregated(paths)
        self.load_state_dict(state, strict)
        return state["user_dict"]


def _settings(options: ORTTrainerOptions) -> Settings:
    distributed = options.distributed
    return Settings(
        device=torch.device(options.device.id),
        accumulation=options.batch.gradient_accumulation_steps,
        world_rank=distributed.world_rank,
        world_size=distributed.world_size,
        is_sharded=distributed.deepspeed_zero_optimization.stage == 1,
        is_mixed=options.mixed_precision.enabled,
        clips=options.utils.grad_norm_clip,
        is_deterministic=options.debug.deterministic_compute,
        opset=options._internal_use.onnx_opset_version,
        frozen_weights=options.utils.frozen_weights,
    )


def _unwrapped(results: Sequence[Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)
