"""Writes a trained model as an ONNX file."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.version_converter
import torch
from torch import nn

from torch_ort import _C
from torch_ort.core.open_sizes import only_open
from torch_ort.core.policy import ORTModuleFallbackException
from torch_ort.onnx.capture import captured_model, name_sizes, name_values
from torch_ort.onnx.graphs import Names, nodes_of
from torch_ort.onnx.load import OnnxModule, is_of_file
from torch_ort.onnx.taken_apart import PARTS
from torch_ort.onnx.weights import save, with_weights
from torch_ort.ortmodule import ORTModule
from torch_ort.pytorch.dispatch_compat import operators_taken_apart

# Of files, unless the caller names one.
_OPSET = 20
_OPSET_OF_BFLOAT16 = 13

# Sizes that vary, by input and dim; True: all of them.
Dynamic = Mapping[str, Mapping[int, str]] | bool


def export_onnx(
    module: nn.Module,
    path: str | os.PathLike[str],
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic = False,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    private: bool = False,
) -> None:
    """Write a model of inference, with the weights of now.

    A module that `load_onnx` gave becomes the file that it was: nodes, names, opsets and metadata
    are those of the file that was read, and so are the dtypes of the weights. If that file had
    external data, its large tensors stand in `<path>.data` beside the new one.

    Any other module is captured as it evaluates, in one call with `inputs`, and written in standard
    ONNX. Its inputs have the names of the parameters of its forward, its weights those of its
    `state_dict`. Weights of more than a GiB stand in `<path>.data`.

    Files of these names are overwritten.

    Args:
        module: The module, or what `torch.compile` or `ORTModule` made of it.
        path: Where to write.
        inputs: Arguments of a call, by position or by name; not for a module of `load_onnx`.
        dynamic: Sizes that may be others than those of `inputs`, by input, dim and the name that it
            gets: `{"x": {0: "batch"}}`. True: all sizes that the graph leaves open.
        output_names: Names for the outputs, in their order, and "output", "output_1", ... else.
        opset: The newest opset whose operators may be used. It is 20 unless given, since runtimes
            lack forms of operators that came later, such as attention with a broadcast mask.
        private: Whether operators of PyTorch that ONNX has not may stand in the file, which only
            this package reads.

    Raises:
        TypeError: The module is none, or has not been given what it needs.
        Unsupported: The module cannot be captured whole, or calls operators that ONNX has not.
        UserError: A weight of a loaded module has other sizes than in the file, or a layer of it
            was replaced, as by an adapter that is not merged. A name in `dynamic` is no input, or
            names a size that the model has fixed, or two that differ; two names are given to one
            size. The name of an output is taken.
        OSError: The file cannot be written.
    """
    module = _inner(module)
    if isinstance(module, OnnxModule):
        given = (inputs is not None, dynamic, output_names, opset, private)
        if any(given):
            raise TypeError("export_onnx: a module of load_onnx is written as it was read, want no "
                            "inputs, dynamic, output_names, opset or private")  # fmt: skip
        _save_loaded(module, Path(path))
        return
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_onnx: module: got {type(module).__name__}, want a torch.nn.Module")
    if inputs is None:
        raise TypeError("export_onnx: inputs: got none, want arguments of a call to capture")
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence | Mapping):
        raise TypeError(
            f"export_onnx: inputs: got {type(inputs).__name__}, want a tuple of arguments, or "
            "arguments by name"
        )
    if output_names is not None and not all(
        isinstance(name, str) and name for name in output_names
    ):
        raise TypeError(f"export_onnx: output_names: got {list(output_names)}, want texts")
    _check_dynamic(dynamic)
    save(_exported(module, inputs, dynamic, output_names, opset, private), Path(path))


def _check_dynamic(dynamic: Any) -> None:
    """Raise TypeError unless names are given by input and dim."""
    want = "want True, or names by input and dim, such as {'x': {0: 'batch'}}"
    if isinstance(dynamic, bool) or dynamic is None:
        return
    if not isinstance(dynamic, Mapping):
        raise TypeError(f"export_onnx: dynamic: got {type(dynamic).__name__}, {want}")
    for name, named in dynamic.items():
        is_right = isinstance(named, Mapping) and all(
            type(dim) is int and isinstance(word, str) for dim, word in named.items()
        )
        if not is_right:
            raise TypeError(f"export_onnx: dynamic of {name!r}: got {named!r}, {want}")


def _inner(module: Any) -> Any:
    """Give the module that torch.compile or an ORTModule was given."""
    if isinstance(module, ORTModule):
        return module.module
    return getattr(module, "_orig_mod", module)


def _check_unchanged(module: OnnxModule) -> None:
    """Raise UserError if others have put modules of their own in the place of those of the file."""
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called is not None and not is_of_file(called):
            raise _C.UserError(
                f"export_onnx: module '{node.target}': got {type(called).__name__}, want what "
                "load_onnx made; merge adapters first"
            )


def _save_loaded(module: OnnxModule, path: Path) -> None:
    _check_unchanged(module)
    state = module.state_dict()
    model = with_weights(
        module.onnx_file, {name: state[key] for key, name in module.onnx_names.items()}
    )
    has_external = any(
        tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer
    )
    for tensor in model.graph.initializer:
        tensor.ClearField("data_location")
    data = path.with_name(path.name + ".data")
    if has_external:
        data.unlink(missing_ok=True)  # onnx would append to it
    onnx.save_model(model, path, save_as_external_data=has_external, location=data.name)


def _exported(
    module: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], dynamic: Dynamic,
    output_names: Sequence[str] | None, opset: int | None, private: bool,
) -> onnx.ModelProto:  # fmt: skip
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    captures: list[Any] = []

    def run(call: ORTModule) -> None:
        call(*args, **kwargs)
        captures.extend(call.captures_for(args, kwargs))

    try:
        with torch.no_grad():
            # Casts of the model to a shorter dtype and back stay in the file.
            config = {"strict": True, "opset": opset or _OPSET, "emulate_eager_casts": True}
            # ONNX has more operators for sizes that are numbers.
            sizes = None if dynamic is True else dynamic or {}
            with operators_taken_apart(PARTS), only_open(sizes):
                model = captured_model(module, run, config)
    except ORTModuleFallbackException as error:
        raise _C.Unsupported(f"export_onnx: {error}") from error
    finally:
        for each, is_training in modes:
            each.training = is_training
    if model is None:
        raise _C.Unsupported("export_onnx: the module computes nothing that can be captured")
    for capture, flat in captures:
        _check_conditions(capture, flat, dynamic)
    graph = model.graph
    if not private:
        _refuse_private(graph)
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    for value in graph.input:
        if re.split(r"\W", value.name)[0] not in _names_of(arguments):
            raise _C.UserError(
                "export_onnx: inputs: got a number, which would become an input of the file; want "
                "tensors, and numbers as attributes of the module"
            )
    names = {value.name: re.sub(r"\W+", "_", value.name).rstrip("_") for value in graph.input}
    inner = Names(graph)
    if output_names is None:
        words = [f"output_{i}" if i else "output" for i in range(len(graph.output))]
        output_names = [inner.new(word) for word in words]
    taken = {*names.values(), *(each.name for each in graph.initializer)} & set(output_names)
    if taken or len(set(output_names)) < len(output_names):
        raise _C.UserError(
            f"export_onnx: output_names: got {', '.join(output_names)}, want names of their own"
        )
    if len(output_names) != len(graph.output):
        raise _C.UserError(
            f"export_onnx: output_names: got {len(output_names)}, want {len(graph.output)}"
        )
    name_values(graph, names, list(output_names))
    model = _with_enough_opset(model)
    graph = model.graph
    if dynamic is not True:
        _settle_sizes(graph, dynamic or {}, _tensors(module, args, kwargs))
    return model


# Sizes for which a graph that is right for all sizes has to be right.
_SIZES = (*range(1, 65), 100, 127, 128, 500, 1000, 1024)


def _check_conditions(capture: Any, flat: list[Any], dynamic: Dynamic) -> None:
    """Raise UserError where the model computes something else for some of the sizes with a name.

    The conditions on sizes are those of the program, in Python (`if x.size(0) % 2`). Most that fail
    for small sizes alone are those of windows, for which the model itself fails: a warning says
    from which size on the file is right. So it does where the caller names no sizes, but wants all.
    """
    if not capture.conditions or not dynamic:
        return
    places: dict[str, list[tuple[str, int]]] = {}  # by the word that names them
    for (name, dim), symbol in capture.open_sizes.items():
        word = symbol if dynamic is True else dynamic.get(name, {}).get(dim)
        if word is not None:
            places.setdefault(word, []).append((name, dim))
    for word, named in places.items():
        symbols = {capture.open_sizes[place] for place in named}
        right = [size for size in _SIZES if capture.holds_for(flat, dict.fromkeys(symbols, size))]
        # What the model fixes, or has as large as another size, is so in the file.
        if len(right) <= 1 or right == [*_SIZES]:
            continue
        (name, dim), *_ = named
        place = f"dim {dim} of '{name}'"
        is_small = right == [size for size in _SIZES if size >= right[0]]
        if not is_small and dynamic is not True:
            raise _C.UserError(
                f"export_onnx: dynamic: {place}: got '{word}', but the model computes something "
                f"else for some sizes: want {capture.conditions}"
            )
        which = f"from {right[0]} on" if is_small else "with the call's conditions"
        warnings.warn(
            f"export_onnx: {place}: the file is right for sizes {which}, since the model asks for "
            f"{capture.conditions}", stacklevel=4,
        )  # fmt: skip


def _with_enough_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the model in an opset that has Identity for the dtypes of its outputs."""
    is_short = any(
        value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
        for value in model.graph.output
    )
    (standard,) = [each for each in model.opset_import if each.domain in ("", "ai.onnx")]
    if not is_short or standard.version >= _OPSET_OF_BFLOAT16:
        return model
    return onnx.version_converter.convert_version(model, _OPSET_OF_BFLOAT16)


def _names_of(arguments: Mapping[str, Any]) -> set[str]:
    """Give the names that inputs may begin with: of arguments, but for numbers."""
    names = {name for name, given in arguments.items() if not isinstance(given, int | float)}
    for given in arguments.values():
        if isinstance(given, Mapping):  # keywords that forward does not name
            names |= {str(name) for name in given}
    return names


def _tensors(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Give the tensors among the arguments of a call, by the names of parameters."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return {name: x for name, x in bound.arguments.items() if isinstance(x, torch.Tensor)}


def _refuse_private(graph: onnx.GraphProto) -> None:
    found = sorted(set(_private(graph)))
    if found:
        raise _C.Unsupported(
            f"export_onnx: operators: got {', '.join(found)}, want those of ONNX; private=True "
            "writes them, for this package alone"
        )


def _private(graph: onnx.GraphProto) -> list[str]:
    found = []
    for node in nodes_of(graph):
        if node.domain not in ("", "ai.onnx"):
            operator = [each.s.decode() for each in node.attribute if each.name == "operator"]
            found.append(operator[0] if operator else f"{node.domain}.{node.op_type}")
    return found


def _settle_sizes(
    graph: onnx.GraphProto, dynamic: Mapping[str, Mapping[int, str]],
    tensors: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Name the sizes that vary, and declare all others as they are in the call."""
    unknown = sorted(dynamic.keys() - {value.name for value in graph.input})
    if unknown:
        there = ", ".join(value.name for value in graph.input)
        raise _C.UserError(f"export_onnx: dynamic: got {', '.join(unknown)}, want some of {there}")
    places = {
        (value.name, place): dim.dim_param
        for value in graph.input
        for place, dim in enumerate(value.type.tensor_type.shape.dim)
    }
    wanted = _wanted_symbols(dynamic, places, tensors)
    fixed = {
        symbol: tensors[name].shape[place]
        for (name, place), symbol in places.items()
        if symbol.isidentifier() and symbol not in wanted and name in tensors
    }
    name_sizes(graph, wanted | fixed)


def _wanted_symbols(
    dynamic: Mapping[str, Mapping[int, str]], places: Mapping[tuple[str, int], str],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, str]:  # fmt: skip
    """Give the name of each symbol that is to get one."""
    wanted: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, named in dynamic.items():
        for place, word in named.items():
            dim = f"export_onnx: dynamic: dim {place} of '{name}'"
            if (name, place) not in places:
                most = max((p for n, p in places if n == name), default=-1)
                raise _C.UserError(
                    f"export_onnx: dynamic: dim of '{name}': got {place}, want 0 to {most}"
                )
            if not word.isidentifier() or word in ("min", "max"):  # words of expressions
                raise _C.UserError(f"{dim}: got {word!r}, want a name of letters and digits")
            symbol = places[name, place]
            if not symbol.isidentifier():
                raise _C.UserError(
                    f"{dim}: got '{word}', but the model could only be captured for "
                    f"{f'a size of {symbol}' if symbol else 'the size of the call'}; want no name"
                )
            if wanted.setdefault(symbol, word) != word:
                raise _C.UserError(
                    f"{dim}: got '{word}', but it is always as large as '{wanted[symbol]}'; want "
                    "one name for both"
                )
            if name in tensors:
                size = tensors[name].shape[place]
                if sizes.setdefault(word, size) != size:
                    raise _C.UserError(
                        f"{dim}: got '{word}' for a size of {size}, which names one of "
                        f"{sizes[word]}, too; want a name for each"
                    )
    return wanted
