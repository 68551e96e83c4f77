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
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import torch_ort

# The opset of cases that ask for no other one.
OPSET = 22
# Dtypes of cases that take all kinds of numbers.
NUMBERS = (torch.float32, torch.float64, torch.int32, torch.int64)

# A case as a tuple: the arguments of `Case`.
Given = tuple[Any, ...]


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
        if isinstance(given, Tensor):
            number = helper.np_dtype_to_tensor_dtype(given.detach().numpy().dtype)
            values.append(helper.make_tensor_value_info(names[-1], number, given.shape))
        elif given is not None:
            array = np.array(given)
            if array.dtype == np.float64:
                array = array.astype(np.float32)
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


def tensors_of(inputs: Sequence[Any]) -> list[Tensor]:
    """Give the inputs that are no constants of the file."""
    return [each for each in inputs if isinstance(each, Tensor)]


def by_session(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Tensor]:
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


def distinct(*sizes: int) -> Tensor:
    """Numbers in random order, no two nearer to each other, or to 0, than 0.1."""
    count = torch.Size(sizes).numel()
    return ((torch.randperm(count) - count // 2).double() / 5 + 0.1).view(sizes)


def integers(low: int, high: int, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Random integers of [low, high)."""
    return torch.randint(low, high, tuple(sizes)).to(dtype)


def uniform(*sizes: int) -> Tensor:
    return torch.rand(*sizes)


def places(*sizes: int) -> Tensor:
    """Places in grids, some outside of the image."""
    return torch.rand(*sizes) * 2.6 - 1.3


def bytes_of(sizes: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """All integers of a dtype."""
    info = torch.iinfo(dtype)
    return integers(info.min, info.max + 1, sizes, dtype)


def few(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers many of which are equal."""
    return integers(-2, 3, sizes, dtype)


def results(op: str, case: Case, inputs: Sequence[Any]) -> tuple[onnx.ModelProto, list[Tensor]]:
    """Run a case as a module; gives its file, too."""
    model = file_of(op, case, inputs)
    got = torch_ort.load_onnx(model)(*tensors_of(inputs))
    return model, [each.detach() for each in (got if isinstance(got, tuple) else (got,))]


def assert_same(
    got: Sequence[Tensor], want: Sequence[Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert len(got) == len(want)
    for mine, expected in zip(got, want, strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(
            mine.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True
        )


def compare(name: str, given: Given, **tolerances: float) -> None:
    """Compare a case of the operator that its name begins with."""
    case = Case(*given)
    inputs = case.made()
    model, got = results(name.partition(":")[0], case, inputs)
    assert_same(got, by_session(model, inputs), **tolerances)


def by_reference(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Tensor]:
    """Run a file in onnx's own evaluator."""
    given = {each.name: inputs[int(each.name[1:])].numpy() for each in model.graph.input}
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, given)
    return [torch.from_numpy(np.asarray(each, order="C").copy()) for each in found]
