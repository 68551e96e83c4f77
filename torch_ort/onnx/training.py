"""Training by the files of `torch_ort.onnx.artifacts`, in a loop without PyTorch.

Arrays go in and come out; the names are those of `onnxruntime.training.api`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.utils import Extractor

from torch_ort import _C
from torch_ort.onnx.artifacts import OPTIMIZER_KEY, OptimType
from torch_ort.onnx.checkpoint import CheckpointState as CheckpointState
from torch_ort.onnx.graphs import inputs_of
from torch_ort.onnx.load import OnnxModule, load_onnx
from torch_ort.onnx.weights import with_weights
from torch_ort.ortmodule import ORTModule

_LEARNING_RATE = 1e-3


class Module:
    """A model with its loss, and the parameters of a checkpoint.

    Args:
        train_model_uri: The training model of `generate_artifacts`.
        state: Its checkpoint, whose parameters are those of the module from then on.
        eval_model_uri: The model for evaluation; without one there is no evaluation.
        device: "cpu" or "cuda", where everything is computed.
        session_options: Accepted for scripts of ONNX Runtime Training, and not read.
    """

    training: bool

    def __init__(
        self, train_model_uri: str | os.PathLike[str], state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None, device: str = "cpu",
        session_options: object = None,
    ) -> None:  # fmt: skip
        self.training = True
        self._state = state
        self._device = torch.device(device)
        self._train = _Run(Path(train_model_uri), state, self._device)
        self._eval: _Run | None = None
        if eval_model_uri is not None:
            self._eval = _Run(Path(eval_model_uri), state, self._device)
        self._is_reset = False
        # Both share the tensors of the state.
        for name, parameter in state.parameters.items():
            if not self._train.has(name):  # the loss does not need it
                continue
            parameter.tensor = self._train.weight(name)
            if self._eval is not None:
                self._eval.share(name, parameter.tensor)

    def __call__(self, *user_inputs: Any) -> Any:
        """Compute the loss and additional outputs of arrays: an array, or a tuple of several.

        In training, gradients are added to those of the parameters, unless they were reset.
        """
        run = self._chosen()
        tensors = [torch.from_numpy(np.asarray(x)).to(self._device) for x in user_inputs]
        if self.training and self._is_reset:
            for parameter in self._state.parameters.values():
                parameter.tensor.grad = None
            self._is_reset = False
        with torch.set_grad_enabled(self.training):
            given = run.call(*tensors)
        outputs = given if isinstance(given, tuple) else (given,)
        if self.training:
            outputs[0].backward()
        arrays = tuple(each.detach().cpu().numpy() for each in outputs)
        return arrays if len(arrays) > 1 else arrays[0]

    def train(self, mode: bool = True) -> Module:
        """Compute by the training model from now on, or by that for evaluation."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Compute by the model for evaluation from now on."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Begin new gradients with the next call in training."""
        self._is_reset = True

    def input_names(self) -> list[str]:
        """Give the names of the inputs of the model of the current mode."""
        return [value.name for value in self._chosen().inputs()]

    def output_names(self) -> list[str]:
        """Give the names of the outputs of the model of the current mode."""
        return [value.name for value in self._chosen().file.graph.output]

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Give the number of numbers in the parameters."""
        return sum(each.numel() for each in self._tensors(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> np.ndarray:
        """Give the parameters behind each other, float32."""
        tensors = [each.detach().float().flatten() for each in self._tensors(trainable_only)]
        return torch.cat(tensors).cpu().numpy() if tensors else np.zeros(0, np.float32)

    def copy_buffer_to_parameters(self, buffer: np.ndarray, trainable_only: bool = True) -> None:
        """Write parameters that stand behind each other. Raises UserError for another number."""
        wanted = self.get_parameters_size(trainable_only)
        if np.size(buffer) != wanted:
            raise _C.UserError(f"copy_buffer_to_parameters: got {np.size(buffer)}, want {wanted}")
        flat, start = torch.from_numpy(np.array(buffer)).flatten(), 0
        with torch.no_grad():
            for each in self._tensors(trainable_only):
                each.copy_(flat[start : start + each.numel()].view(each.shape))
                start += each.numel()

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write the part of the model for evaluation that gives some values, with weights of now.

        Raises UserError without such a model, and for a name of no value.
        """
        if self._eval is None:
            raise _C.UserError("export_model_for_inferencing: the module has no eval_model_uri")
        model = onnx.shape_inference.infer_shapes(self._eval.with_weights())
        made = {name for node in model.graph.node for name in node.output}
        unknown = [name for name in graph_output_names if name not in made]
        if unknown:
            raise _C.UserError(
                f"export_model_for_inferencing: got {', '.join(unknown)}, want names of values"
            )
        inputs = _inputs_behind(model.graph, graph_output_names)
        onnx.save_model(
            Extractor(model).extract_model(inputs, list(graph_output_names)), inference_model_uri
        )

    def _chosen(self) -> _Run:
        if self.training:
            return self._train
        if self._eval is None:
            raise _C.UserError("Module: the module has no eval_model_uri, which evaluation needs")
        return self._eval

    def _tensors(self, trainable_only: bool) -> list[torch.Tensor]:
        found = self._state.parameters.values()
        return [each.tensor for each in found if each.requires_grad or not trainable_only]


class _Run:
    """One of the two models of a module."""

    def __init__(self, path: Path, state: CheckpointState, device: torch.device) -> None:
        data = path.read_bytes()
        tensors = {name: each.tensor for name, each in state.parameters.items()}
        self.file = with_weights(data, tensors)
        trained = {name for name, each in state.parameters.items() if each.requires_grad}
        self._module: OnnxModule = load_onnx(
            self.file, lambda name, tensor: name in trained
        ).to(device)  # fmt: skip
        self._paths = {name: path for path, name in self._module.onnx_names.items()}
        self.call = ORTModule(self._module)

    def inputs(self) -> list[onnx.ValueInfoProto]:
        return inputs_of(self.file.graph)

    def has(self, name: str) -> bool:
        """Tell whether the model reads a weight."""
        return name in self._paths

    def weight(self, name: str) -> torch.Tensor:
        """Give a weight."""
        owner, last = self._owner(name)
        return getattr(owner, last)

    def share(self, name: str, tensor: torch.Tensor) -> None:
        """Take the tensor of another module for a weight."""
        if name in self._paths:
            owner, last = self._owner(name)
            setattr(owner, last, tensor)

    def with_weights(self) -> onnx.ModelProto:
        """Give the file with the weights of now."""
        state = self._module.state_dict()
        weights = {name: state[path] for name, path in self._paths.items()}
        return with_weights(self._module.onnx_file, weights)

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        parent, _, last = self._paths[name].rpartition(".")
        return self._module.get_submodule(parent), last


def _inputs_behind(graph: onnx.GraphProto, outputs: list[str]) -> list[str]:
    """Give the inputs of a graph that some values depend on."""
    makers = {name: node for node in graph.node for name in node.output}
    found, left = set(), list(outputs)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        if name in makers:
            left += makers[name].input
    return [value.name for value in inputs_of(graph) if value.name in found]


class Optimizer:
    """Updates the trained parameters of a module by their gradients.

    Args:
        optimizer_uri: The optimizer model of `generate_artifacts`.
        module: The module. State that its checkpoint has of the optimizer is gone on from.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        kind = _kind_of(Path(optimizer_uri))
        self._state = module._state
        self._trained = [each for each in self._state.parameters.values() if each.requires_grad]
        tensors = [each.tensor for each in self._trained]
        self._optimizer: torch.optim.Optimizer
        if kind is OptimType.AdamW:
            self._optimizer = torch.optim.AdamW(
                tensors, lr=_LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2
            )
        else:
            self._optimizer = torch.optim.SGD(tensors, lr=_LEARNING_RATE)
        for parameter in self._trained:
            if parameter.states:
                of = self._optimizer.state[parameter.tensor]
                of["step"] = torch.tensor(float(self._state.step))
                of.update({k: v.to(parameter.tensor.device) for k, v in parameter.states.items()})

    def step(self) -> None:
        """Update the parameters once."""
        self._optimizer.step()
        self._state.step += 1
        for parameter in self._trained:
            found = self._optimizer.state.get(parameter.tensor, {})
            parameter.states = {
                name: each for name, each in found.items()
                if name != "step" and isinstance(each, torch.Tensor)
            }  # fmt: skip

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def get_learning_rate(self) -> float:
        """Give the learning rate."""
        return self._optimizer.param_groups[0]["lr"]


def _kind_of(path: Path) -> OptimType:
    model = onnx.load(path)
    kinds = {each.key: each.value for each in model.metadata_props}
    name = kinds.get(OPTIMIZER_KEY, "")
    if name not in OptimType.__members__:
        known = ", ".join(OptimType.__members__)
        raise _C.UserError(f"{path}: optimizer: got '{name}', want one of {known}")
    return OptimType[name]


class LRScheduler:
    """Sets the learning rate of an optimizer step by step; a subclass says to what."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._count = 0

    def step(self) -> None:
        """Set the learning rate of the next step."""
        self._count += 1
        self._optimizer.set_learning_rate(self.learning_rate(self._count))

    def learning_rate(self, step: int) -> float:
        """Give the learning rate after some steps."""
        raise NotImplementedError


class LinearLRScheduler(LRScheduler):
    """Rises to the first learning rate over the warm-up, and falls to 0 until the last step."""

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int,
        initial_lr: float,
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        self._warmup, self._total, self._lr = warmup_step_count, total_step_count, initial_lr
        optimizer.set_learning_rate(self.learning_rate(0))

    def learning_rate(self, step: int) -> float:
        """Give the learning rate after some steps."""
        if step < self._warmup:
            return self._lr * step / self._warmup
        left = (self._total - step) / max(1, self._total - self._warmup)
        return self._lr * max(0.0, left)
