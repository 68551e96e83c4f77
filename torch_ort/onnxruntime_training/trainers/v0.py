"""The first ORTTrainer: descriptions as objects, an optimizer by name, a learning rate as a tensor.

ONNX Runtime Training had it as `onnxruntime.training.ort_trainer` and
`onnxruntime.capi.ort_trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ort.onnxruntime_training.optim.configs import (
    AdamConfig,
    LambConfig,
    OptimizerConfig,
    SGDConfig,
)
from torch_ort.onnxruntime_training.trainers import checkpoint_files
from torch_ort.onnxruntime_training.trainers.described_trainer import DescribedTrainer, Settings
from torch_ort.onnxruntime_training.trainers.descriptions import (
    IODescription,
    bind,
    check_model,
    demand,
)
from torch_ort.onnxruntime_training.trainers.loss_scaler import DynamicLossScaler
from torch_ort.onnxruntime_training.trainers.optimizer_state import MOMENTS, UPDATES
from torch_ort.onnxruntime_training.trainers.step_info import TrainStepInfo
from torch_ort.onnxruntime_training.trainers.unsupported import (
    checked_opset,
    checked_stage,
    refuse,
    tell_once,
)

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "load_checkpoint",
    "save_checkpoint",
]

# The name by which a call may give a loss scale.
_LOSS_SCALE = "loss_scale"
# The attributes of a weight that have other names in the configs.
_RENAMED = {"lambda": "lambda_coef"}
_OF_ALL = ("max_norm_clip", "weight_decay_mode")
# Keys of a state besides those of weights.
_STEP, _CALLS, _GRADIENT = "Step", "Calls", "Gradient"
_SCALE, _GOOD = "Loss_Scale", "Loss_Scale_Good_Steps"


class ModelDescription:
    """The inputs of a model, its labels last, and its outputs, the loss first.

    `inputs_` and `outputs_` are lists of `IODescription`.

    Args:
        inputs: Of the model, then the label of the loss function.
        outputs: The loss, without dims, then predictions.

    Raises:
        ValueError: one of the lists has no description, or two of the same name.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = _checked("inputs", inputs)
        self.outputs_ = _checked("outputs", outputs)


def _checked(what: str, described: Sequence[IODescription]) -> list[IODescription]:
    described = list(described)
    if not described or not all(isinstance(it, IODescription) for it in described):
        raise ValueError(f"ModelDescription: {what}: got {described!r}, want IODescriptions")
    names = [it.name_ for it in described]
    if len({*names}) < len(names):
        raise ValueError(f"ModelDescription: {what}: got names {names}, want each one once")
    return described


class LossScaler(DynamicLossScaler):
    """The loss scale of mixed precision.

    Args:
        loss_scale_input_name: Kept as `loss_scale_input_name`.
        is_dynamic_scale: Whether the scale changes.
        loss_scale: The scale of the beginning.
        up_scale_window: How many good steps in a row double it.
        min_loss_scale: The least scale.
        max_loss_scale: The largest one.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = 65536.0,
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 16777216.0,
    ) -> None:
        super().__init__(
            is_dynamic_scale, loss_scale, up_scale_window, min_loss_scale, max_loss_scale
        )
        self.loss_scale_input_name = loss_scale_input_name
        self.is_dynamic_scale = is_dynamic_scale

    @property
    def loss_scale_(self) -> float:
        """The scale of the next step."""
        return self.loss_scale

    def update_loss_scale(self, is_all_finite: bool | Tensor) -> None:
        """Halve the scale after a step with infinite gradients, double it after many good ones."""
        self.update(TrainStepInfo(None, all_finite=bool(is_all_finite)))


class ORTTrainer:
    """Trains by one call a step: forward, loss, backward and update run in the engine.

    Args:
        model: A module, or an ORTModule, whose options are taken over then.
        loss_fn: `loss_fn(prediction, label)`; None if the model gives the loss.
        model_desc: What the model takes and gives. Where it contradicts the data, a warning says
            so once, and the data is taken as it is.
        training_optimizer_name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        map_optimizer_attributes: Gives the settings of a parameter by its name, a dict of numbers:
            `alpha` and `beta` (of the running means), `lambda` (weight decay), `epsilon`,
            `do_bias_correction`, of Lamb `ratio_min` and `ratio_max`; the same for all,
            `max_norm_clip` and of Adam `weight_decay_mode`. None for the defaults.
        learning_rate_description: The name of the learning rate among the inputs of a step. Its
            shape does not matter.
        device: Where the model is brought to, and inputs as well.
        gradient_accumulation_steps: Every so manieth step updates, by the mean of gradients.
        world_rank: The number of this process among `world_size`.
        world_size: How many processes train together. Where torch.distributed has no group, it is
            made from the environment of torchrun or mpirun.
        use_mixed_precision: Whether the model runs under autocast in float16; gradients come from
            a scaled loss then.
        allreduce_post_accumulation: Accepted. Ranks always exchange gradients before an update
            alone.
        global_step: How many updates there were.
        get_lr_this_step: Gives the learning rate by the number of updates; steps take none then.
        loss_scaler: Keeps the scale of the loss; without one, steps of mixed precision take a scale
            and give whether all gradients were finite.
        deepspeed_zero_stage: 1 shares the state of the optimizer out among the ranks.
        enable_grad_norm_clip: Whether Adam and Lamb clip by `max_norm_clip`, 1 by default.
        frozen_weights: Names of parameters that are not trained.
        _opset_version: Of `save_as_onnx`.
        _use_deterministic_compute: Whether steps run under
            `torch.use_deterministic_algorithms(True)`.

    Raises:
        TypeError: the model is no module, an ONNX model for instance.
        RuntimeError: the loss function does not take two arguments, or there is no way to reach the
            other ranks.
        ValueError: an argument is out of its range, or asks for what there is not; the words say
            what to do.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping[str, float]] | None,
        learning_rate_description: IODescription | None,
        device: torch.device | str | None,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: LossScaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = 12,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[..., Any] | None = None,
        _use_deterministic_compute: bool = False,
        use_invertible_layernorm_grad: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        check_model(model, loss_fn)
        if not isinstance(model_desc, ModelDescription):
            raise ValueError(
                f"model_desc: got {type(model_desc).__name__}, want a ModelDescription"
            )
        if learning_rate_description is None and get_lr_this_step is None:
            raise ValueError(
                "learning_rate_description: got None, want an IODescription, or get_lr_this_step"
            )
        refuse("enable_adasum", enable_adasum)
        refuse("_extra_postprocess", _extra_postprocess)
        refuse("optimized_model_filepath", optimized_model_filepath)
        tell_once("use_invertible_layernorm_grad", use_invertible_layernorm_grad)
        tell_once("use_memory_efficient_gradient", use_memory_efficient_gradient)
        tell_once("run_symbolic_shape_infer", run_symbolic_shape_infer)
        tell_once("_enable_internal_postprocess=False", not _enable_internal_postprocess)
        names = {name for name, it in model.named_parameters() if it.requires_grad}
        config = described_optimizer(
            training_optimizer_name, names - {*frozen_weights}, map_optimizer_attributes
        )
        settings = Settings(
            device=None if device is None else torch.device(device),
            accumulation=gradient_accumulation_steps,
            world_rank=world_rank,
            world_size=world_size,
            is_sharded=checked_stage(deepspeed_zero_stage) == 1,
            is_mixed=use_mixed_precision,
            clips=enable_grad_norm_clip,
            is_deterministic=_use_deterministic_compute,
            opset=checked_opset("_opset_version", _opset_version),
            frozen_weights=list(frozen_weights),
        )
        outputs = model_desc.outputs_
        self._trainer = DescribedTrainer(
            model, loss_fn, model_desc.inputs_, outputs, outputs[0].name_, config, settings
        )
        self._trainer.core.num_updates = global_step
        self.model_desc_ = model_desc
        self.loss_scaler_ = loss_scaler
        self.get_lr_this_step_ = get_lr_this_step
        self.world_rank = world_rank
        self.world_size = world_size
        self.is_train = True
        self._lr_name = "" if get_lr_this_step else learning_rate_description.name_
        self._last_scale = 1.0

    @property
    def global_step_(self) -> int:
        """How many updates there were."""
        return self._trainer.core.num_updates

    @property
    def is_partitioned(self) -> bool:
        """Whether each rank keeps only a part of the optimizer's state."""
        return self._trainer.settings.is_sharded and self.world_size > 1

    def train(self) -> None:
        """Let calls of this object train."""
        self.is_train = True

    def eval(self) -> None:
        """Let calls of this object evaluate."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `train_step`, or `eval_step` after `eval()`."""
        return (
            self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)
        )

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Train on a batch.

        Args:
            args: The described inputs, the learning rate as a tensor of one number (not with
                `get_lr_this_step`), and in mixed precision without a loss scaler the loss scale.
            fetches: Names of outputs; all by default.
            kwargs: The same by name, the loss scale as `loss_scale`.

        Returns the outputs, one alone as it is, several as a tuple. In mixed precision without a
        loss scaler a last one tells whether all gradients were finite, a bool tensor without dims;
        between two updates it is true.

        Raises RuntimeError for a wrong number of inputs or an unknown name, ValueError for an
        unknown output.
        """
        is_mixed = self._trainer.settings.is_mixed
        takes_scale = is_mixed and self.loss_scaler_ is None
        fetches = self._trainer.checked_fetches(fetches)
        names = [
            *self._trainer.input_names,
            *([self._lr_name] if self._lr_name else []),
            *([_LOSS_SCALE] if takes_scale else []),
        ]
        found = bind("train_step", names, args, kwargs)
        demand("train_step", names, found)
        lr = _number(found[self._lr_name]) if self._lr_name else self._scheduled_lr()
        scale = None
        if is_mixed:
            scale = _number(found[_LOSS_SCALE]) if takes_scale else self.loss_scaler_.loss_scale
        outputs, has_updated = self._trainer.train(found, scale, lr)
        if is_mixed and has_updated is not None and not takes_scale:
            self.loss_scaler_.update_loss_scale(has_updated)
        results = self._trainer.fetched(outputs, fetches)
        if takes_scale:
            results.append(torch.tensor(has_updated is not False))
        return results[0] if len(results) == 1 else tuple(results)

    def _scheduled_lr(self) -> float:
        return float(self.get_lr_this_step_(self.global_step_))

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Give the outputs of a batch in evaluation mode, one alone as it is; nothing is trained.

        Labels may lack if `fetches` has predictions alone.

        Raises RuntimeError for a wrong number of inputs or an unknown name, ValueError for an
        unknown output.
        """
        fetches = self._trainer.checked_fetches(fetches)
        results = self._trainer.fetched(self._trainer.evaluate(args, kwargs, fetches), fetches)
        return results[0] if len(results) == 1 else tuple(results)

    def save_as_onnx(self, path: str) -> None:
        """Write what evaluation computes, with the weights of now, as an ONNX model.

        Inputs and outputs have the described names, weights those of the model. Raises RuntimeError
        before the first step, which tells what inputs are like.
        """
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Tensor]:
        """Give weights and buffers by name, and with them all that training goes on from.

        All are copies on the CPU. `Moment_1_<weight>`, `Moment_2_<weight>` and
        `Update_Count_<weight>` are of the optimizer (with `deepspeed_zero_stage=1` those of this
        rank's part), `Step` is the number of updates; between two updates `Gradient_<weight>` and
        `Calls`, and of a loss scaler its scale and its count of good steps.
        """
        state = self._trainer.weights()
        if not include_optimizer_state:
            return state
        for name, kept in self._trainer.optimizer_states().items():
            state |= {f"{kind}_{name}": value for kind, value in kept.items()}
        for name, gradient in self._trainer.pending().items():
            state[f"{_GRADIENT}_{name}"] = gradient
        core = self._trainer.core
        state[_STEP], state[_CALLS] = torch.tensor(core.num_updates), torch.tensor(core.num_calls)
        if self.loss_scaler_ is not None:
            scaler = self.loss_scaler_.state_dict()
            state[_SCALE] = torch.tensor(scaler["loss_scale"], dtype=torch.float64)
            state[_GOOD] = torch.tensor(scaler["num_good"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False) -> None:
        """Go on from what `state_dict` gave, or from the weights of a model.

        Raises RuntimeError, if `strict`, for weights of the model that are missing, ValueError for
        missing state of the optimizer where there is some.
        """
        state = dict(state_dict)
        named = self._trainer.trained
        model = self._trainer.model
        model.load_state_dict(
            {name: state.pop(name) for name in [*model.state_dict()] if name in state}, strict
        )
        states = {
            name: {
                kind: state.pop(f"{kind}_{name}")
                for kind in (*MOMENTS, UPDATES)
                if f"{kind}_{name}" in state
            }
            for name in named
            if f"{UPDATES}_{name}" in state
        }
        pending = {
            name: state.pop(f"{_GRADIENT}_{name}")
            for name in named
            if f"{_GRADIENT}_{name}" in state
        }
        core = self._trainer.core
        if states or _STEP in state:
            self._trainer.load_optimizer(states, pending, strict)
        core.num_updates = int(state.pop(_STEP, core.num_updates))
        core.num_calls = int(state.pop(_CALLS, core.num_calls))
        if self.loss_scaler_ is not None and _SCALE in state:
            scale = {"loss_scale": state.pop(_SCALE).item(), "num_good": state.pop(_GOOD).item()}
            self.loss_scaler_.load_state_dict(scale)
        if strict and state:
            raise ValueError(f"state_dict: got unknown {', '.join(sorted(state))}")


def described_optimizer(
    name: str,
    weights: Iterable[str],
    attributes_of: Callable[[str], Mapping[str, float]] | None,
) -> OptimizerConfig:
    """Give the optimizer that a name and settings of each weight describe.

    Raises ValueError for an unknown name, and for settings that are no numbers, unknown, or
    different where all weights have the same.
    """
    configs = {"SGDOptimizer": SGDConfig, "AdamOptimizer": AdamConfig, "LambOptimizer": LambConfig}
    if name not in configs:
        raise ValueError(f"training_optimizer_name: got {name!r}, want one of {', '.join(configs)}")
    groups: dict[tuple, list[str]] = {}
    for weight in sorted(weights) if attributes_of is not None else ():
        given = _attributes(weight, attributes_of(weight))
        groups.setdefault(tuple(sorted(given.items())), []).append(weight)
    if name == "SGDOptimizer":
        settings = [dict(found) for found in groups if found]
        if settings:
            raise ValueError(
                f"map_optimizer_attributes: got {', '.join(settings[0])}, want nothing: "
                "SGDOptimizer has no settings"
            )
        return SGDConfig()
    # As in the operators of ONNX Runtime Training, including Lamb.
    common: dict[str, Any] = {"do_bias_correction": True}
    for setting in _OF_ALL:
        values = {dict(found).get(setting) for found in groups} or {None}
        if len(values) > 1:
            raise ValueError(
                f"map_optimizer_attributes: {setting}: got several values, want one for all weights"
            )
        if None not in values:
            common[setting] = values.pop()
    params = [
        {"params": names, **{it: value for it, value in found if it not in _OF_ALL}}
        for found, names in groups.items()
    ]
    if name == "LambOptimizer" and "weight_decay_mode" in common:
        raise ValueError("map_optimizer_attributes: weight_decay_mode: LambOptimizer has none")
    return configs[name](params, **common)


def _attributes(weight: str, given: Mapping[str, float]) -> dict[str, float]:
    for setting, value in given.items():
        if not isinstance(value, int | float):
            raise ValueError(
                f"map_optimizer_attributes: {setting} of {weight}: got {value!r}, want a number"
            )
    return {_RENAMED.get(setting, setting): value for setting, value in given.items()}


def _number(value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RuntimeError(
            f"train_step: got a tensor of shape {list(value.shape)}, want one number"
        )
    return float(value)


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Write a trainer's state, and data of the caller beside it, as `<prefix>.ort.pt`.

    With `deepspeed_zero_stage=1` and several ranks each one writes its part, as
    `<prefix>.ZeRO.<rank>.<world size - 1>.ort.pt`; else rank 0 writes alone.

    Raises ValueError for data that cannot be read back as plain data.
    """
    given = dict(checkpoint_state_dict or {})
    checkpoint_files.check_plain("checkpoint_state_dict", given)
    is_partitioned = model.is_partitioned
    if is_partitioned or model.world_rank == 0:
        rank = model.world_rank if is_partitioned else None
        name = checkpoint_files.file_name(checkpoint_prefix, rank, model.world_size)
        path = checkpoint_files.in_folder(checkpoint_dir, name)
        checkpoint_files.write(path, {**given, "model": model.state_dict()})


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Let a trainer go on from a checkpoint; gives the data of the caller that is in it.

    Raises AssertionError where there is no such file, ValueError for a file of another kind.
    """
    rank = model.world_rank if model.is_partitioned else None
    data: dict[str, Any] = {}
    for path in checkpoint_files.find(checkpoint_dir, checkpoint_prefix, rank, model.world_size):
        part = checkpoint_files.read(path)
        if "model" not in part:
            raise ValueError(f"{path}: got no state of a model, want a checkpoint of ORTTrainer")
        data = {**data, **part, "model": {**data.get("model", {}), **part["model"]}}
    model.load_state_dict(data.pop("model"), strict)
    return data
