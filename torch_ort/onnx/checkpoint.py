"""The state of a training: parameters, state of the optimizer, and properties of the user's.

A checkpoint is an ONNX model without nodes: its initializers are the tensors, and its metadata
says which are trained. Reading it runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from torch_ort import _C
from torch_ort.core.dtypes import dtype_number
from torch_ort.onnx.weights import save

_TRAINED_KEY = "torch_ort.trained"
_PROPERTY = "torch_ort.property."
# Between the name of a parameter and that of a state of it.
_OF_OPTIMIZER = "\n"
Property = int | float | str


class Parameter:
    """A parameter of a checkpoint, which a module shares once it has the state.

    Attributes:
        name: Its name in the model.
        tensor: The numbers.
        requires_grad: Whether it is trained.
        states: Those that the optimizer has of it, by name.
    """

    def __init__(self, name: str, tensor: torch.Tensor, requires_grad: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.requires_grad = requires_grad
        self.states: dict[str, torch.Tensor] = {}

    @property
    def data(self) -> np.ndarray:
        """A copy of the numbers; may be assigned."""
        return self.tensor.detach().cpu().numpy().copy()

    @data.setter
    def data(self, array: np.ndarray) -> None:
        given = torch.from_numpy(np.array(array))
        if given.shape != self.tensor.shape or given.dtype != self.tensor.dtype:
            raise _C.UserError(
                f"parameter '{self.name}': got {tuple(given.shape)} of {given.dtype}, want "
                f"{tuple(self.tensor.shape)} of {self.tensor.dtype}"
            )
        with torch.no_grad():
            self.tensor.copy_(given)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the gradient; None before there is one."""
        grad = self.tensor.grad
        return None if grad is None else grad.detach().cpu().numpy().copy()


class Parameters(Mapping[str, Parameter]):
    """Parameters by name; assigning an array to a name writes its numbers."""

    def __init__(self, found: Mapping[str, Parameter]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Parameter:
        return self._found[name]

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self._found[name].data = array

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class CheckpointState:
    """Parameters, and properties such as the number of an epoch: integers, floats or texts.

    Attributes:
        parameters: The parameters, by name.
        properties: Whatever the user keeps with them.
        step: How many steps the optimizer has made.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = Parameters(parameters)
        self.properties: dict[str, Property] = {}
        self.step = 0

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Read a checkpoint. Raises UserError for another file."""
        path = Path(checkpoint_uri)
        data = path.read_bytes()
        try:
            model = onnx.load_model_from_string(data)
            onnx.load_external_data_for_model(model, str(path.parent))
            return cls._read(model)
        except Exception as error:  # of protobuf, onnx, numpy and JSON
            raise _C.UserError(f"{path}: got no checkpoint: {error}") from error

    @classmethod
    def _read(cls, model: onnx.ModelProto) -> CheckpointState:
        metadata = {each.key: each.value for each in model.metadata_props}
        if _TRAINED_KEY not in metadata:
            raise ValueError("another model")
        trained = set(json.loads(metadata[_TRAINED_KEY]))
        tensors = {each.name: _tensor(each) for each in model.graph.initializer}
        parameters = {
            name: Parameter(name, tensor, name in trained)
            for name, tensor in tensors.items()
            if _OF_OPTIMIZER not in name
        }
        for name, tensor in tensors.items():
            if _OF_OPTIMIZER in name:
                of, _, state = name.partition(_OF_OPTIMIZER)
                parameters[of].states[state] = tensor
        found = cls(parameters)
        for key, value in metadata.items():
            if key.startswith(_PROPERTY):
                found.properties[key.removeprefix(_PROPERTY)] = json.loads(value)
        found.step = int(found.properties.pop("", 0))
        return found

    @staticmethod
    def save_checkpoint(
        state: CheckpointState, checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
    ) -> None:  # fmt: skip
        """Write a checkpoint; tensors of more than a GiB stand in `<path>.data` beside it."""
        graph = helper.make_graph([], "checkpoint", [], [])
        trained = []
        for name, parameter in state.parameters.items():
            graph.initializer.append(_proto(name, parameter.tensor))
            if parameter.requires_grad:
                trained.append(name)
            for kind, tensor in parameter.states.items() if include_optimizer_state else ():
                graph.initializer.append(_proto(f"{name}{_OF_OPTIMIZER}{kind}", tensor))
        model = helper.make_model(graph, producer_name="torch_ort")
        model.metadata_props.add(key=_TRAINED_KEY, value=json.dumps(trained))
        properties = dict(state.properties)
        if include_optimizer_state:
            properties[""] = state.step
        for key, value in properties.items():
            if not isinstance(value, int | float | str):
                raise _C.UserError(
                    f"property '{key}': got {type(value).__name__}, want int, float or str"
                )
            model.metadata_props.add(key=_PROPERTY + key, value=json.dumps(value))
        save(model, Path(checkpoint_uri))


def _proto(name: str, tensor: torch.Tensor) -> onnx.TensorProto:
    row_major = tensor.detach().cpu().contiguous()
    raw = row_major.reshape(-1).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, dtype_number(tensor.dtype), tensor.shape, raw, raw=True)


def _tensor(proto: onnx.TensorProto) -> torch.Tensor:
    array = np.array(numpy_helper.to_array(proto))
    if array.dtype.name.startswith(("bfloat16", "float8")):  # numpy knows them by another package
        bits = np.uint8 if array.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)
