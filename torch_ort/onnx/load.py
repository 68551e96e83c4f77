"""Reads an ONNX file as a module that can be trained."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor
from torch import fx, nn

from torch_ort import _C
from torch_ort.onnx.calls import VALUE_NAME, Program, write_graph
from torch_ort.onnx.functions import linear
from torch_ort.onnx.functions.table import BY_MODE, TABLE
from torch_ort.onnx.functions.types import FUNCTION_DOMAIN
from torch_ort.onnx.prepare import prepared
from torch_ort.onnx.weights import without_weights

Trainable = bool | str | Iterable[str] | Callable[[str, torch.Tensor], bool]

# Where a node that a value goes through says which one it is.
_WATCHES = "onnx_watched"

# Inputs that are statistics or weights of classes, and are not trained, by operator and position.
_STATISTICS = {
    "BatchNormalization": (3, 4),
    "NegativeLogLikelihoodLoss": (2,),
    "SoftmaxCrossEntropyLoss": (2,),
}
# Domains of standard operators, of which functions have some (prepare.py).
_STANDARD = ("", FUNCTION_DOMAIN, f"{FUNCTION_DOMAIN}.{BY_MODE}")


class OnnxModule(fx.GraphModule):
    """A model that `load_onnx` has read.

    Attributes:
        onnx_names: The names of initializers in the file, by their names in `state_dict`.
        onnx_file: The file without the data of these initializers, for `export_onnx`.
    """

    onnx_names: dict[str, str]
    onnx_file: bytes

    def __init__(self, root: nn.Module, graph: fx.Graph, names: Mapping[str, str] | None = None):
        """Take of `root` what the graph reads. torch.fx, which copies modules, gives no names."""
        super().__init__(root, graph, "OnnxModule")
        link_linear(self)
        kept = self.state_dict()
        self.onnx_names = {path: name for path, name in (names or {}).items() if path in kept}

    @property
    def value_names(self) -> list[str]:
        """The names of the values of the file that `value` finds, in the order of the graph."""
        found = (node.meta.get(VALUE_NAME) for node in self.graph.nodes)
        return [name for name in found if name is not None]

    def value(self, name: str) -> nn.Module:
        """Give a module that a value goes through, for hooks: `register_forward_hook` and others.

        What a hook gives takes the place of the value. Ask before the module is compiled.

        Raises UserError if no node gives the value, as where it was a constant, or two nodes of the
        file became one call.
        """
        node = next((n for n in self.graph.nodes if n.meta.get(VALUE_NAME) == name), None)
        if node is None:
            raise _C.UserError(f"value: got '{name}', want one of value_names")
        for user in node.users:
            if user.op == "call_module" and user.meta.get(_WATCHES) == name:
                return self.get_submodule(str(user.target))
        count = sum(each.startswith("value_") for each in self._modules)
        while hasattr(self, f"value_{count}"):
            count += 1
        self.add_module(f"value_{count}", nn.Identity())
        # Inputs stay in front of all else, where torch.fx puts them when it reads a pickle.
        inputs = [each for each in self.graph.nodes if each.op == "placeholder"]
        with self.graph.inserting_after(inputs[-1] if node in inputs else node):
            through = self.graph.call_module(f"value_{count}", (node,))
        through.meta[_WATCHES] = name
        node.replace_all_uses_with(through, lambda user: user is not through)
        self.recompile()
        return self.get_submodule(f"value_{count}")

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        """Copy also what torch.fx does not know of."""
        copied = super().__deepcopy__(memo)
        copied.onnx_names = dict(self.onnx_names)
        copied.onnx_file = self.onnx_file
        link_linear(copied)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as torch.fx does, which makes a GraphModule of it, and the rest."""
        # torch.fx keeps the nodes and their order, but not what is said of them.
        said = [
            {key: node.meta[key] for key in (VALUE_NAME, _WATCHES) if key in node.meta}
            for node in self.graph.nodes
        ]
        return _unpickle, (super().__reduce__(), self.onnx_names, self.onnx_file, said)


def is_of_file(module: nn.Module) -> bool:
    """Tell whether a module is one that `load_onnx` makes of a node, or `value` of a value."""
    is_row = any(type(module) is row.function for row in TABLE.values())
    return is_row or type(module) is nn.Identity


def link_linear(module: fx.GraphModule) -> None:
    """Tell linear modules which parameters their calls pass."""
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        called = module.get_submodule(node.target)
        called = getattr(called, "base_layer", called)  # PEFT keeps it there
        if linear.is_linear(called):
            called.link(*(_place(module, each) for each in node.args[1:]))


def _place(module: nn.Module, node: Any) -> tuple[nn.Module, str]:
    """Give the module that has the tensor of a node, and its name there."""
    parent, _, last = str(node.target).rpartition(".")
    return module.get_submodule(parent), last


def _unpickle(
    reduced: tuple[Any, ...], names: dict[str, str], file: bytes, said: list[dict[str, str]]
) -> OnnxModule:
    make, arguments = reduced
    module = make(*arguments)
    for node, of_node in zip(module.graph.nodes, said, strict=True):
        node.meta |= of_node
    unpickled = OnnxModule(module, module.graph, names)
    unpickled.onnx_file = file
    return unpickled


def load_onnx(
    model: str | os.PathLike[str] | bytes | Any, trainable: Trainable = True
) -> OnnxModule:
    """Read an ONNX model of inference as a module, to be trained further or to be run.

    The module is an ordinary one, and calls PyTorch's operators: eager PyTorch runs it,
    `torch.compile` and `ORTModule` take it whole, it can be copied, pickled, cast and moved. Its
    forward takes the inputs of the model, by position or by name, and returns its output, or a
    tuple of several. Sizes that the model names are those of the inputs of each call.

    Initializers of floating point with at least one dim are parameters if they are trainable, and
    all others are buffers. A name with dots becomes a parameter of submodules, as PyTorch's
    exporters name them, so that `state_dict` has the names of the file. Where an attribute cannot
    have the name, it is another one: `module.onnx_names` has the names in the file by those in
    `state_dict`. Initializers that nothing reads as a tensor, such as sizes and single numbers, are
    no attributes.

    The module is given in the mode of evaluation, in which it computes what the file says. After
    `train()`, dropout drops, and batch norms use the statistics of the batch and move those of the
    file, but for nodes of which the file says whether they train.

    Args:
        model: A path, the bytes of a file, or a `ModelProto` of the onnx package. External data is
            read from the folder of the path; bytes and protos have none.
        trainable: All weights (True), none (False), those whose name matches one of some patterns
            (as in file names: `"encoder.*"`), or those of which a function of name and tensor says
            so. Running statistics of batch norms are never parameters.

    Raises:
        UserError: The file is damaged or wrong, its data is missing, a pattern matches no weight,
            or two initializers need one name.
        Unsupported: An operator has no calls that compute it, or the graph is a training graph.
        OSError: The file cannot be read.
    """
    graph, file, folder = _read(model)
    program = Program.of(graph)
    weights = _weights(graph, program)
    chosen = _chosen(trainable, weights)
    root = nn.Module()
    paths: dict[int, str] = {}
    names: dict[str, str] = {}
    for number, name in program.initializers.items():
        path = _attribute_path(name)
        tensor = program.tensors[number]
        _register(root, path, nn.Parameter(tensor) if name in chosen else tensor, name)
        paths[number] = path
        names[path] = name
    for number in program.tensors.keys() - program.initializers.keys():
        paths[number] = f"constant_{number}"
        root.register_buffer(paths[number], program.tensors[number], persistent=False)
    module = OnnxModule(root, write_graph(program, paths, root), names)
    held = set(module.onnx_names.values())
    for tensor in file.graph.initializer:
        # What the module does not hold, such as sizes. The engine has read it from there already.
        if tensor.name not in held and tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, folder)
    module.onnx_file = without_weights(file, held)
    return module.eval()


def _read(model: Any) -> tuple[_C.Graph, onnx.ModelProto, str]:
    """Read the graph, the file without its external data, and the folder of that."""
    if isinstance(model, bytes):
        data, folder = model, ""
    elif isinstance(model, str | os.PathLike):
        path = Path(model)
        data, folder = path.read_bytes(), str(path.parent)
    elif hasattr(model, "SerializeToString"):
        data, folder = model.SerializeToString(), ""
    else:
        raise TypeError(
            f"load_onnx: model: got {type(model).__name__}, want a path, bytes or a ModelProto"
        )
    try:
        file = onnx.load_model_from_string(data)
    except DecodeError:
        _C.Graph.from_onnx(data)  # says in words what is wrong
        raise
    data = prepared(file).SerializeToString()
    return _C.Graph.from_onnx(data, directory=folder), file, folder


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Give the initializers of a model that `load_onnx` can make parameters, by their names."""
    graph, _, _ = _read(model)
    return _weights(graph, Program.of(graph))


def _weights(graph: _C.Graph, program: Program) -> dict[str, torch.Tensor]:
    """Give the initializers that can be parameters."""
    statistics = {
        node["inputs"][i]
        for node in graph.nodes()
        for i in _STATISTICS.get(node["op"], ())
        if i < len(node["inputs"]) and node["domain"] in _STANDARD
    }
    tensors = {name: program.tensors[number] for number, name in program.initializers.items()}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
        and tensor.ndim > 0
        and name not in statistics
    }


def _chosen(trainable: Trainable, weights: dict[str, torch.Tensor]) -> set[str]:
    if isinstance(trainable, bool):
        return set(weights) if trainable else set()
    if callable(trainable):
        return {name for name, tensor in weights.items() if trainable(name, tensor)}
    chosen: set[str] = set()
    for pattern in [trainable] if isinstance(trainable, str) else trainable:
        matching = fnmatch.filter(weights, pattern)
        if not matching:
            raise _C.UserError(
                f"load_onnx: trainable: '{pattern}' matches no weight; there are "
                f"{', '.join(sorted(weights)) or 'none'}"
            )
        chosen.update(matching)
    return chosen


def _attribute_path(name: str) -> str:
    """Give the path of a new attribute: the name, where modules have no attributes of its parts."""
    parts = [part or "_" for part in name.split(".")]
    return ".".join(f"{part}_" if part in _TAKEN else part for part in parts)


# Attributes that each module has of its own.
_TAKEN = frozenset(
    {*dir(fx.GraphModule(nn.Module(), fx.Graph())), *dir(OnnxModule), *OnnxModule.__annotations__}
)


def _register(root: nn.Module, path: str, tensor: torch.Tensor, name: str) -> None:
    *parents, last = path.split(".")
    module = root
    for parent in parents:
        if parent not in module._modules:
            if hasattr(module, parent):
                raise _collision(name, path)
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if hasattr(module, last):
        raise _collision(name, path)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _collision(name: str, path: str) -> _C.UserError:
    return _C.UserError(
        f"load_onnx: initializer '{name}': another one needs the attribute '{path}' or a part of it"
    )
