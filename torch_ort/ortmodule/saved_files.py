"""The five ONNX files that an ORTModule saves, from the captured graph to the one that runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import onnx

from torch_ort import _C
from torch_ort.engine import onnx_files
from torch_ort.engine.passes import disabled_in_files
from torch_ort.engine.program import Program
from torch_ort.options import Options

Sources = Mapping[str, onnx_files.Source]


class SavedFiles:
    """Writes `<prefix>_<kind>_<mode>.onnx` into a folder; a later capture replaces the files."""

    def __init__(self, folder: str, prefix: str) -> None:
        self._start = os.path.join(folder, prefix)

    def write_compiled(
        self, program: Program, prepared: _C.Graph, options: Options, sources: Sources
    ) -> None:
        """Write the files that are known once a graph is compiled: all but the execution model.

        `prepared` is the captured graph after passes of the user's own.
        """
        engine_only = disabled_in_files(options)
        moves_border = [each.name for each in _C.passes() if each.moves_border]
        exported, spelled_out = program.captured.clone(), prepared.clone()
        _C.spell_out(spelled_out, options.opset)
        graphs = {"torch_exported": exported, "post_processed": spelled_out}
        for kind, disabled in (
            ("optimized_pre_grad", [*engine_only, *moves_border]),
            ("optimized", engine_only),
        ):
            graphs[kind] = prepared.clone()
            _C.run_pipeline(graphs[kind], disabled, options.bisect)
        for kind, graph in graphs.items():
            is_standard = kind != "torch_exported"
            path = self._path(kind, program)
            onnx_files.save(graph, path, program, options, sources, standard=is_standard)

    def write_run(self, program: Program, options: Options) -> None:
        """Write the graph that runs, with the place in memory of each value as its doc string."""
        graph = program.graph
        model = onnx.load_from_string(graph.to_onnx(_C.required_opset(graph)))
        _lower_axes(model, options.opset)
        rows = {row["name"]: row for row in program.session.plan_table()}
        for info in (*model.graph.input, *model.graph.value_info, *model.graph.output):
            if info.name in rows:
                info.doc_string = _place(rows[info.name])
        described = {info.name for info in model.graph.value_info}
        for node in model.graph.node:
            for name in node.output:
                if name in rows and name not in described:
                    model.graph.value_info.add(name=name, doc_string=_place(rows[name]))
        onnx.save_model(model, self._path("execution_model", program))

    def _path(self, kind: str, program: Program) -> str:
        mode = "training" if program.is_training else "inference"
        return f"{self._start}_{kind}_{mode}.onnx"


# The standard opset in which axes of an operator have become an input.
_AXES_ARE_AN_INPUT_SINCE = {
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), 13),
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
         "ReduceProd"), 18,
    ),
}  # fmt: skip


def _lower_axes(model: onnx.ModelProto, opset: int) -> None:
    """Let a model stay within an opset: inside of regions, passes write axes as inputs."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _lower_axes_of(attribute.g, opset)
    lowered = _C.Graph.from_onnx(model.SerializeToString(), allow=["*"])
    for imported in model.opset_import:
        if imported.domain == "":
            imported.version = _C.required_opset(lowered)


def _lower_axes_of(region: onnx.GraphProto, opset: int) -> None:
    constants = {constant.name: constant for constant in region.initializer}
    for node in region.node:
        is_newer = _AXES_ARE_AN_INPUT_SINCE.get(node.op_type, 0) > opset and node.domain == ""
        if is_newer and len(node.input) == 2 and node.input[1] in constants:
            axes = onnx.numpy_helper.to_array(constants[node.input[1]])
            node.attribute.append(onnx.helper.make_attribute("axes", axes.ravel().tolist()))
            del node.input[1]
    read = {name for node in region.node for name in node.input}
    for name in constants.keys() - read:
        region.initializer.remove(constants[name])


def _place(row: Mapping[str, object]) -> str:
    """`scratch in forward at 512, 2048 bytes, steps 3 to 9, in place of x`."""
    parts = [str(row["kind"])]
    if row["area"] != "none":
        parts[0] += f" in {row['area']} at {row['offset']}"
    parts.append(f"{row['bytes']} bytes")
    if row["first_step"] is not None:
        parts.append(f"steps {row['first_step']} to {row['last_step']}")
    if row["in_place_of"]:
        parts.append(f"in place of {row['in_place_of']}")
    elif row["shares"]:
        parts.append(f"memory of {row['shares']}")
    return ", ".join(parts)
