"""Files for training on a device: a model with its loss, a checkpoint, an optimizer.

They are ONNX models, which other programs can look at. `torch_ort.onnx.training` runs them, by the
gradients that this package makes; no file has gradients in it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from torch_ort import _C
from torch_ort.onnx.checkpoint import CheckpointState, Parameter
from torch_ort.onnx.graphs import Names, nodes_of
from torch_ort.onnx.load import weights_of
from torch_ort.onnx.prepare import at_least
from torch_ort.onnx.weights import without_weights

# What a model of an optimizer says of itself.
OPTIMIZER_KEY = "torch_ort.optimizer"
# SoftmaxCrossEntropyLoss, and means without axes as an input.
_OLDEST_OPSET = 13


class LossType(enum.IntEnum):
    """A loss of the first output and a target."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.IntEnum):
    """An optimizer, with the defaults of ONNX Runtime Training."""

    AdamW = 1
    SGD = 2


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | None = None,
    optimizer: OptimType | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
) -> None:
    """Write the files for training a model: `training_model.onnx`, `eval_model.onnx`, `checkpoint`.

    With an optimizer, `optimizer_model.onnx` is written as well. In the model for evaluation,
    dropout and batch norms that train do not. The training model takes the inputs of the model and
    a target, "labels" for CrossEntropyLoss (int64 classes, without the dim of classes) and "target"
    for others (as the output is). It gives the loss, and the additional outputs.

    Args:
        model: A model of inference, or its path.
        requires_grad: Names of the weights that are trained; None: all but the frozen ones.
        frozen_params: Names of weights that are not trained.
        loss: The loss; None: the first output of the model is the loss.
        optimizer: The optimizer; None: none is written.
        artifact_directory: Where to write; None: the working directory.
        prefix: What the names of the files begin with.
        ort_format: Not supported: a format of ONNX Runtime's own.
        custom_op_library: Not supported: operators of other libraries have no gradients here.
        additional_output_names: Outputs of the model that are given beside the loss.
        nominal_checkpoint: Not supported: a checkpoint without data.
        loss_input_names: Which outputs the loss is of; the first one unless given.

    Raises:
        UserError: A name is no weight or output, or one is both trained and frozen.
        Unsupported: An option that is not supported is given, or a loss of another kind.
        OSError: A file cannot be read or written.
    """
    for name, given in (
        ("ort_format", ort_format),
        ("custom_op_library", custom_op_library),
        ("nominal_checkpoint", nominal_checkpoint),
    ):
        if given:
            raise _C.Unsupported(f"generate_artifacts: {name}: got {given}, want it left out")
    read = onnx.load(model) if not isinstance(model, onnx.ModelProto) else model
    read = at_least(read, _OLDEST_OPSET)
    training = onnx.ModelProto()
    training.CopyFrom(read)
    weights = weights_of(read)
    trained = _trained(list(weights), requires_grad, frozen_params)
    _add_loss(training.graph, loss, loss_input_names, additional_output_names or ())
    onnx.checker.check_model(training)
    folder = Path(artifact_directory or ".")
    folder.mkdir(parents=True, exist_ok=True)
    state = CheckpointState(
        {name: Parameter(name, tensor, name in trained) for name, tensor in weights.items()}
    )
    CheckpointState.save_checkpoint(state, folder / f"{prefix}checkpoint")
    (folder / f"{prefix}training_model.onnx").write_bytes(without_weights(training, set(weights)))
    _evaluate(training.graph)
    (folder / f"{prefix}eval_model.onnx").write_bytes(training.SerializeToString())
    if optimizer is not None:
        onnx.save_model(_optimizer(optimizer), folder / f"{prefix}optimizer_model.onnx")


def _evaluate(graph: onnx.GraphProto) -> None:
    """Let nodes of a graph evaluate that say of themselves that they train."""
    for node in nodes_of(graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout":
            del node.input[2:]
        if node.op_type == "BatchNormalization":
            kept = [each for each in node.attribute if each.name != "training_mode"]
            del node.attribute[:], node.output[1:]
            node.attribute.extend(kept)


def _trained(
    weights: Sequence[str], requires_grad: Sequence[str] | None, frozen: Sequence[str] | None
) -> set[str]:
    for name, given in (("requires_grad", requires_grad), ("frozen_params", frozen)):
        unknown = sorted(set(given or ()) - set(weights))
        if unknown:
            raise _C.UserError(
                f"generate_artifacts: {name}: got {', '.join(unknown)}, want some of "
                f"{', '.join(weights)}"
            )
    both = sorted(set(requires_grad or ()) & set(frozen or ()))
    if both:
        raise _C.UserError(
            f"generate_artifacts: {', '.join(both)}: got it in requires_grad and frozen_params"
        )
    return set(weights if requires_grad is None else requires_grad) - set(frozen or ())


def _optimizer(kind: OptimType) -> onnx.ModelProto:
    graph = helper.make_graph([], "optimizer", [], [])
    model = helper.make_model(graph, producer_name="torch_ort")
    model.metadata_props.add(key=OPTIMIZER_KEY, value=OptimType(kind).name)
    return model


# ---- losses


def _add_loss(
    graph: onnx.GraphProto, loss: LossType | None, of: Sequence[str] | None,
    additional: Sequence[str],
) -> None:  # fmt: skip
    """Append a loss to the graph, which becomes its first output."""
    outputs = {value.name: value for value in graph.output}
    for name, given in (("loss_input_names", of or ()), ("additional_output_names", additional)):
        unknown = [each for each in given if each not in outputs]
        if unknown:
            raise _C.UserError(
                f"generate_artifacts: {name}: got {', '.join(unknown)}, want some of "
                f"{', '.join(outputs)}"
            )
    values = [outputs[name] for name in of] if of else [graph.output[0]]
    if loss is None:
        result = values[0]
    elif loss in _LOSSES:
        if len(values) != 1:
            raise _C.UserError(f"generate_artifacts: loss_input_names: got {len(values)}, want 1")
        result = _LOSSES[LossType(loss)](_Writer(graph), values[0])
    else:
        kinds = ", ".join(each.name for each in LossType)
        raise _C.Unsupported(
            f"generate_artifacts: loss: got {type(loss).__name__}, want one of {kinds}"
        )
    kept = {value.name: value for value in (result, *(outputs[name] for name in additional))}
    graph.value_info.extend(value for name, value in outputs.items() if name not in kept)
    # Copies, because the values belong to the list that is cleared.
    copies = [onnx.ValueInfoProto.FromString(each.SerializeToString()) for each in kept.values()]
    del graph.output[:]
    graph.output.extend(copies)


class _Writer:
    """Appends nodes to a graph, under names that it does not have."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._names = Names(graph)

    def target(self, name: str, elem_type: int, like: onnx.ValueInfoProto, drop: int | None) -> str:
        """Add an input of the sizes of another value, less a dim."""
        dims = [
            dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None)
            for i, dim in enumerate(like.type.tensor_type.shape.dim)
            if i != drop
        ]
        name = self._names.new(name)
        self._graph.input.append(helper.make_tensor_value_info(name, elem_type, dims))
        return name

    def make(self, op: str, *inputs: str, name: str = "", **attributes: object) -> str:
        """Append a node; gives the name of its result."""
        result = self._names.new(name or op.lower())
        self._graph.node.append(helper.make_node(op, inputs, [result], **attributes))
        return result


def _scalar(name: str, like: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, like.type.tensor_type.elem_type, [])


def _mean(write: _Writer, of: str, like: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    return _scalar(write.make("ReduceMean", of, name="loss", keepdims=0), like)


def _mse(write: _Writer, output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    target = write.target("target", output.type.tensor_type.elem_type, output, None)
    difference = write.make("Sub", output.name, target)
    return _mean(write, write.make("Mul", difference, difference), output)


def _l1(write: _Writer, output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    target = write.target("target", output.type.tensor_type.elem_type, output, None)
    return _mean(write, write.make("Abs", write.make("Sub", output.name, target)), output)


def _cross_entropy(write: _Writer, output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    labels = write.target("labels", TensorProto.INT64, output, 1)
    name = write.make("SoftmaxCrossEntropyLoss", output.name, labels, name="loss")
    return _scalar(name, output)


def _binary_cross_entropy(write: _Writer, output: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """max(x, 0) - x t + log(1 + exp(-|x|)), whose exponential never overflows."""
    x = output.name
    target = write.target("target", output.type.tensor_type.elem_type, output, None)
    far = write.make("Neg", write.make("Abs", x))
    rest = write.make("Softplus", far)
    linear = write.make("Sub", write.make("Relu", x), write.make("Mul", x, target))
    return _mean(write, write.make("Add", linear, rest), output)


_LOSSES: dict[LossType, Callable[[_Writer, onnx.ValueInfoProto], onnx.ValueInfoProto]] = {
    LossType.MSELoss: _mse,
    LossType.CrossEntropyLoss: _cross_entropy,
    LossType.BCEWithLogitsLoss: _binary_cross_entropy,
    LossType.L1Loss: _l1,
}
