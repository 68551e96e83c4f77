"""Files with one node each, for tests of the functions that compute ONNX's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

# The opset of cases that ask for no other one.
OPSET = 22


@dataclass(frozen=True)
class Case:
    """A node by its inputs and attributes.

    Of inputs, numbers and lists of numbers are constants of the file, None is left out, and
    tensors are what they are. Sizes stand for random numbers, and a function and its arguments for
    what it makes.
    """

    inputs: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    num_outputs: int = 1
    opset: int = OPSET

    def made(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Make the inputs; `dtype` is that of all floating-point ones that are made."""
        return [_made(given, dtype) for given in self.inputs]


def _made(given: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(given, tuple):
        return given
    is_call = bool(given) and callable(given[0])
    found = given[0](*given[1:]) if is_call else torch.randn(given)
    return found.to(dtype) if found.is_floating_point() else found


def file_of(op: str, case: Case, inputs: Sequence[Any]) -> onnx.ModelProto:
    """Write a file with the node of a case."""
    names, values, constants = [], [], []
    for slot, given in enumerate(inputs):
        names.append("" if given is None else f"x{slot}")
        if isinstance(given, torch.Tensor):
            number = helper.np_dtype_to_tensor_dtype(given.detach().numpy().dtype)
            values.append(helper.make_tensor_value_info(names[-1], number, given.shape))
        elif given is not None:
            array = np.array(given)
            if not array.size or array.dtype == np.float64:
                array = array.astype(np.float32 if array.size else np.int64)
            constants.append(numpy_helper.from_array(array, names[-1]))
    attributes = {name: given for name, given in case.attributes.items() if given != []}
    outputs = [f"y{i}" for i in range(case.num_outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, **attributes)], "net", values,
        [onnx.ValueInfoProto(name=name) for name in outputs], constants,
    )  # fmt: skip
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=10
    )


def tensors_of(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Give the inputs that are no constants of the file."""
    return [each for each in inputs if isinstance(each, torch.Tensor)]


def by_session(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run a file in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {each.name: inputs[int(each.name[1:])].numpy() for each in model.graph.input}
    # numpy has two names for a dtype that torch knows by one.
    return [
        torch.from_numpy(np.asarray(each).astype(each.dtype.name))
        for each in session.run(None, given)
    ]


def distinct(*sizes: int) -> torch.Tensor:
    """Numbers in random order, no two nearer to each other, or to 0, than 0.1."""
    count = torch.Size(sizes).numel()
    return ((torch.randperm(count) - count // 2).double() / 5 + 0.1).view(sizes)


def integers(low: int, high: int, sizes: Sequence[int], dtype: torch.dtype = torch.int64):
    """Random integers of [low, high)."""
    return torch.randint(low, high, tuple(sizes)).to(dtype)
