"""Files of `save_onnx`: graphs as ONNX models that other programs can read.

A graph without gradients takes what the user gives and nothing else: parameters and buffers are
initializers, sizes are read from the shapes of the inputs, and what standard nodes can say is said
by them. A training graph keeps its parameters as inputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_ort import _C
from torch_ort.engine.passes import disabled_in_files
from torch_ort.pytorch.trace_compat import FakeTensor, real_tensors

if TYPE_CHECKING:
    from torch_ort.engine.program import Program
    from torch_ort.options import Options

# Above this number of bytes, initializers go into a separate file, because a file of a model is
# limited to 2 GiB.
EXTERNAL_LIMIT = 2**30

# Types whose tensors have their elements in one block of memory, which subclasses need not have.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_SOURCE = re.compile(r"^[LG]((?:\['[^']*'\]|\[\d+\]|\.\w+)+)$")
_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_NO_PARTS = {"_modules", "_parameters", "_buffers", "__closure__", "cell_contents", "__dict__"}


@dataclass(frozen=True)
class Source:
    """Where an input of a graph comes from: its name there, and the tensor if a module holds it."""

    name: str
    tensor: torch.Tensor | None = None


def sources_of(placeholders: Iterable[torch.fx.Node]) -> list[Source | None]:
    """Tell where Dynamo takes its inputs from; None for what has no name in the user's program."""
    found = [(_path(node), _module_tensor(node)) for node in placeholders]
    # Names leave out the variable that holds the module, as long as they stay unique.
    short = [path[1:] if tensor is not None and len(path) > 1 else path for path, tensor in found]
    counts = Counter(map(tuple, short))
    return [
        Source(".".join(brief if counts[tuple(brief)] == 1 else path), tensor) if path else None
        for (path, tensor), brief in zip(found, short, strict=True)
    ]


def _path(node: torch.fx.Node) -> list[str]:
    """`L['self']._modules['0']._parameters['weight']` as ["self", "0", "weight"]."""
    argument = node.meta.get("grapharg")
    match = _SOURCE.match(argument.source.name) if argument is not None else None
    if match is None:
        return []
    parts = ["".join(groups) for groups in _PART.findall(match[1])]
    return [part for part in parts if part not in _NO_PARTS]


def _module_tensor(node: torch.fx.Node) -> torch.Tensor | None:
    is_static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    argument = node.meta.get("grapharg") if is_static else None
    tensor = argument.example if argument is not None else None
    return tensor if type(tensor) in _PLAIN and not isinstance(tensor, FakeTensor) else None


def write(program: Program, options: Options, sources: dict[str, Source]) -> None:
    """Write a graph as it was captured and as it was optimized. Raises UserError if it cannot.

    `sources` are those of the inputs and symbols, by the names that they have in the graph.
    """
    optimized = program.captured.clone()
    _C.run_pipeline(optimized, disabled_in_files(options), options.bisect)
    for kind, graph in (("captured", program.captured.clone()), ("optimized", optimized)):
        path = f"{options.onnx_prefix}_{program.number}_{kind}.onnx"
        save(graph, path, program, options, sources)


def save(
    graph: _C.Graph, path: str, program: Program, options: Options, sources: Mapping[str, Source],
    standard: bool = True,
) -> None:  # fmt: skip
    """Write a graph of a program, with parameters inside and names of the user's; changes it.

    A graph without gradients says with standard nodes what they can say, if `standard`.
    """
    held: dict[str, Any] = dict(program.constants)
    if not program.is_training:
        held |= {
            name: source.tensor for name, source in sources.items() if source.tensor is not None
        }
    names = {*graph.input_names, *graph.initializer_names}
    with real_tensors():
        _C.give_data(graph, {name: tensor for name, tensor in held.items() if name in names})
    if standard and not program.is_training:
        _C.spell_out(graph, options.opset)
        _C.expand_sizes(graph)
        _C.run_pass("remove_dead", graph)
        _C.separate_names(graph)
    names = {name: source.name for name, source in sources.items()}
    _C.take_names(graph, names | _gradient_names(graph, program, names))
    graph.save(path, _C.required_opset(graph), EXTERNAL_LIMIT)


def _gradient_names(graph: _C.Graph, program: Program, names: Mapping[str, str]) -> dict[str, str]:
    """Call the gradients of a training graph as ONNX Runtime Training does: `encoder.weight_grad`.

    `names` are the user's names of the inputs. What comes in from outside keeps its name: the
    gradient of an input may be a gradient that the caller gives. Of two inputs that share a
    gradient, the first names it.
    """
    inputs = program.captured.input_names
    outside = {*graph.input_names, *graph.initializer_names}
    for node in graph.nodes():
        if node["op"] == "YieldOp":
            outside.update(node["outputs"])
    found: dict[str, str] = {}
    for output, position in zip(graph.output_names, program.gradient_inputs, strict=False):
        if position >= 0 and output not in outside:
            name = inputs[position]
            found.setdefault(output, f"{names.get(name, name)}_grad")
    return found
