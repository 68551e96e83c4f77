"""The five ONNX files of an ORTModule's graph, from what was captured to what runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import onnx

from torch_ort import _C
from torch_ort.engine import onnx_files
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
        """Write what is known when a graph has been compiled.

        `prepared` is the captured graph after passes of the user's own.
        """
        engine_only = onnx_files.disabled_passes(options)
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

    def write_run(self, program: Program) -> None:
        """Write the graph that runs, with the place in memory of each value as its doc string."""
        graph = program.graph
        model = onnx.load_from_string(graph.to_onnx(_C.required_opset(graph)))
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
