"""Hugging Face's trainers with the model in an ORTModule, as `optimum.onnxruntime` had them.

A plain `Trainer` needs none of this: `Trainer(model=ORTModule(model), ...)` trains, evaluates,
saves and generates, and `TrainingArguments(torch_compile_backend="ort")` compiles the model. The
classes are for scripts written for optimum's, and for a loss that the trainer computes
and not the model (`use_module_with_loss`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

try:
    import accelerate  # noqa: F401  (transformers imports without it, and cannot train)
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "torch_ort.integrations.transformers needs transformers 5 and accelerate 1: "
        "pip install 'transformers>=5,<6' 'accelerate>=1,<2'"
    ) from error

from torch_ort.core.counting import counters
from torch_ort.ortmodule import DebugOptions, LogLevel, ORTModule

__all__ = [
    "ORTCallback",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]

log = logging.getLogger(__name__)

Loss = Callable[..., torch.Tensor]

# Arguments of a call that are for the trainer's loss rather than for the model.
_LABELS, _COUNT = "labels_of_trainer", "num_items_in_batch"


@dataclass
class _EngineArguments:
    use_module_with_loss: bool = field(
        default=False,
        metadata={
            "help": "Make the loss that the trainer computes (label smoothing, compute_loss_func) "
            "a part of the graph. A loss that the model computes itself always is."
        },
    )
    save_onnx: bool = field(
        default=False, metadata={"help": "Write the graphs as ONNX files into `output_dir`."}
    )
    onnx_prefix: str | None = field(
        default=None, metadata={"help": "What the names of these files start with."}
    )
    onnx_log_level: str = field(
        default="WARNING",
        metadata={"help": "How much the engine logs: one of torch_ort.LogLevel's names."},
    )

    def debug_options(self) -> DebugOptions:
        """Give what an ORTModule is made with.

        Raises ValueError for an unknown log level, and for `save_onnx` without a prefix.
        """
        try:
            level = LogLevel[self.onnx_log_level.upper()]
        except KeyError:
            known = ", ".join(LogLevel.__members__)
            raise ValueError(
                f"onnx_log_level: got {self.onnx_log_level!r}, want one of {known}"
            ) from None
        return DebugOptions(level, self.save_onnx, self.onnx_prefix or "", self.output_dir or "")


@dataclass
class ORTTrainingArguments(_EngineArguments, TrainingArguments):
    """TrainingArguments, and what an ORTModule is made with."""


@dataclass
class ORTSeq2SeqTrainingArguments(_EngineArguments, Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments, and what an ORTModule is made with."""


class _WithLoss(ORTModule):
    """An ORTModule that computes a loss after the model, in one graph: `{"loss": ..., **outputs}`.

    `loss(outputs, labels, num_items_in_batch)` gives it, of calls that bring labels for it; other
    calls are the model's own.
    """

    def __init__(self, module: torch.nn.Module, debug: DebugOptions, loss: Loss) -> None:
        self.__dict__["_loss_of_trainer"] = loss
        super().__init__(module, debug)

    def _around(self, module: torch.nn.Module) -> Callable[..., Any]:
        return functools.partial(_run_with_loss, module, self._loss_of_trainer)


def _run_with_loss(module: torch.nn.Module, loss: Loss, /, **inputs: Any) -> Any:
    if _LABELS not in inputs:
        return module(**inputs)
    labels, count = inputs.pop(_LABELS), inputs.pop(_COUNT, None)
    outputs = module(**inputs)
    return {"loss": loss(outputs, labels, count), **outputs}


class _InEngine(Trainer):
    """What both trainers add to Hugging Face's."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        super().__init__(model, args, *others, **named)
        self.model = self.model_wrapped = self._in_engine(self.model)

    def call_model_init(self, *args: Any) -> torch.nn.Module:
        """Make a model by `model_init`, inside of an ORTModule."""
        return self._in_engine(super().call_model_init(*args))

    def _in_engine(self, model: torch.nn.Module) -> ORTModule:
        if isinstance(model, ORTModule):
            return model
        if not isinstance(self.args, _EngineArguments):
            return ORTModule(model)
        debug = self.args.debug_options()
        if self.args.use_module_with_loss:
            return _WithLoss(model, debug, self._loss_in_graph)
        return ORTModule(model, debug)

    def _loss_in_graph(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        given, smoother = self._losses
        if given is not None:
            return given(outputs, labels, num_items_in_batch=num_items_in_batch)
        adapted = getattr(self.model, "get_base_model", None)  # of PEFT
        name = (self.model if adapted is None else adapted())._get_name()
        shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=num_items_in_batch)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """See transformers.Trainer; with `use_module_with_loss` the model gives the loss."""
        losses = (self.compute_loss_func, self.label_smoother)
        has_own_loss = losses != (None, None)
        if not (isinstance(self.model, _WithLoss) and has_own_loss and "labels" in inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {**inputs, _COUNT: num_items_in_batch}
        inputs[_LABELS] = inputs.pop("labels")
        self._losses = losses
        # In the meantime the trainer has to take the model for one that computes its loss itself.
        before = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = before or self.compute_loss_func is not None
        self.compute_loss_func = self.label_smoother = None
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.compute_loss_func, self.label_smoother = losses
            self.model_accepts_loss_kwargs = before


class ORTTrainer(_InEngine):
    """A Trainer whose model runs inside of an ORTModule.

    Arguments are those of transformers.Trainer; `args` are best ORTTrainingArguments.
    `trainer.model` is the ORTModule, `trainer.model.module` the model that was given.
    """


class ORTSeq2SeqTrainer(_InEngine, Seq2SeqTrainer):
    """A Seq2SeqTrainer whose model runs inside of an ORTModule; see ORTTrainer."""


class ORTCallback(TrainerCallback):
    """Reports what the engine did in a training run, with ORTModule or torch.compile.

    `done` holds what `torch_ort.counters()` has gained since training began; a line with the most
    important of it is logged when training ends: graphs that were captured, calls that ran in the
    engine, and calls that fell back to eager PyTorch.
    """

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remember the counters from before training."""
        self._before = dict(counters())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Bring `done` up to date."""
        self.done = {name: count - self._before[name] for name, count in counters().items()}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Log the change of the counters."""
        self.on_step_end(args, state, control)
        done = self.done
        log.warning(
            "torch_ort: %d graphs captured, %d forward and %d backward runs in the engine, "
            "%d fallbacks to eager PyTorch, %d graph breaks",
            done["graphs_captured"], done["forward_runs"], done["backward_runs"],
            done["fallbacks"], done["graph_breaks"],
        )  # fmt: skip
