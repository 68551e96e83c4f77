"""Models that files are mutated from: what the engine saves, what ONNX tests its ops with, ours."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import tempfile
import warnings
from collections.abc import Iterator

import case_files
import numpy as np
import onnx
import onnx.parser
import torch
from files_texts import INPUTS, TEXTS
from models import MODELS
from torch import nn

from torch_ort import _C

# Of the ops that ONNX tests, those with more bytes in a file than this are the same again.
MOST_BYTES = 20_000


Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Model:
    """A file, inputs that it runs with, and its outputs where somebody else has computed them."""

    data: bytes
    inputs: Tensors
    outputs: Tensors | None = None

    def proto(self) -> onnx.ModelProto:
        return onnx.load_model_from_string(self.data)


def build(path: pathlib.Path) -> None:
    """Write all models into one file."""
    torch.manual_seed(0)
    made = (*_saved(), *_texts(), *_cases_of_passes(), *_cases_of_onnx())
    torch.save(dict(made), path)


def load(path: pathlib.Path) -> dict[str, Model]:
    """Give the models by name, in a fixed order."""
    return dict(sorted(torch.load(path, weights_only=False).items()))


class _Classifier(nn.Module):
    """Dropout, an embedding, a loss, a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.table(ids)).sigmoid())
        return nn.functional.cross_entropy(self.head(x), labels)


class _Pieces(nn.Module):
    """Views, slices, concatenations, reductions and indices of many kinds."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = torch.cat([x[:, 1:], x[:, :1].flip(1), x.roll(1, 0)], 1)
        table = parts.t().index_select(0, index)
        values, places = parts.topk(2, dim=1)
        packed = parts.gather(1, places).cumsum(0).softmax(-1)
        triangle = (x @ x.t()).tril().clamp(-1, 1).norm(dim=-1)
        return table.logsumexp(1), values * packed, triangle, parts.unfold(1, 2, 1).mean((0, 2))


_TRAINED = {
    "classifier": (_Classifier, (torch.tensor([1, 3, 0, 7]), torch.tensor([0, 4, 2, 2]))),
    "pieces": (_Pieces, (torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 5]))),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (torch.randn(2, 3),)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4),
        nn.ELU(), nn.AvgPool1d(2)), (torch.randn(2, 2, 6), )),
} | {name: (factory, (x,)) for name, (factory, x) in MODELS.items()}  # fmt: skip


def _saved() -> Iterator[tuple[str, Model]]:
    """What the engine saves of models, trained and not, with known sizes and with symbols."""
    for name, (factory, inputs) in _TRAINED.items():
        for trains in (False, True):
            torch.manual_seed(0)
            model = factory().train(trains)
            for number, read in enumerate(_files_of(model, inputs, trains)):
                kind = "train" if trains else "infer"
                yield f"saved_{name.replace(' ', '_')}_{kind}_{number}", _model(read)


def _files_of(model: nn.Module, inputs: tuple, trains: bool) -> list[onnx.ModelProto]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        options = {"save_onnx": True, "onnx_prefix": f"{folder}/m", "strict": True}
        compiled = torch.compile(model, backend="ort", options=options, dynamic=trains)
        with torch.set_grad_enabled(trains):
            results = compiled(*inputs)
        if trains:
            results = results if isinstance(results, tuple) else (results,)
            sum(r.float().sum() for r in results if r.requires_grad).backward()
        return [onnx.load(path) for path in sorted(pathlib.Path(folder).glob("*.onnx"))]


def _texts() -> Iterator[tuple[str, Model]]:
    """Graphs of ours with the types of all values, as they are and after the passes."""
    for name, text in TEXTS.items():
        read = onnx.parser.parse_model(text)
        passes = ("replay_views",), ("close_bodies", "replay_views", "expand_composites")
        for number, some in enumerate(passes):
            graph = _C.Graph.from_onnx(read.SerializeToString())
            _C.infer_types(graph)
            for each in (*some, "fuse_regions")[: len(some) + number]:
                _C.run_pass(each, graph)
            inputs = {
                key: torch.randn(sizes) if isinstance(sizes, tuple) else torch.tensor(sizes)
                for key, sizes in INPUTS[name].items()
            }
            yield f"text_{name}_{number}", Model(graph.to_onnx(), inputs)


def _cases_of_passes() -> Iterator[tuple[str, Model]]:
    for path in sorted(case_files.FOLDER.glob("*.onnxtxt")):
        for number, case in enumerate(case_files.read_cases(path)[1]):
            yield f"pass_{path.stem}_{number}", _model(onnx.parser.parse_model(case.before))


def _cases_of_onnx() -> Iterator[tuple[str, Model]]:
    """One file for each case that ONNX tests an op of ours with."""
    from onnx.backend.test.case.node import collect_testcases

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    known = {fact["name"] for fact in _C.testing.op_facts() if fact["domain"] == ""}
    for case in cases:
        ops = {node.op_type for node in case.model.graph.node}
        if not ops <= known or case.model.ByteSize() > MOST_BYTES:
            continue
        with contextlib.suppress(TypeError, ValueError):  # sequences, and types that torch has not
            inputs, outputs = (
                {
                    value.name: torch.from_numpy(np.asarray(array))
                    for value, array in zip(values, arrays, strict=True)
                }
                for values, arrays in zip(
                    (case.model.graph.input, case.model.graph.output),
                    case.data_sets[0],
                    strict=True,
                )
            )
            yield f"onnx_{case.name}", Model(case.model.SerializeToString(), inputs, outputs)


def _model(proto: onnx.ModelProto) -> Model:
    """Give a model tensors for its inputs, for its symbols and for the results of its YieldOp."""
    sizes: dict[str, int] = {"N": 3, "M": 2}
    graph = proto.graph
    values = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    names = [value.name for value in graph.input]
    names += [name for node in graph.node if node.op_type == "YieldOp" for name in node.output]
    inputs = {name: _like(values[name], sizes) for name in names if name in values}
    for entry in graph.metadata_props:
        if entry.key == "symbol_inputs":
            for symbol in entry.value.split(","):
                inputs.setdefault(symbol, torch.tensor(sizes.setdefault(symbol, 4)))
    return Model(proto.SerializeToString(), inputs)


def _like(value: onnx.ValueInfoProto, sizes: dict[str, int]) -> torch.Tensor:
    kind = value.type.tensor_type
    shape = [
        dim.dim_value if dim.HasField("dim_value") else sizes.setdefault(dim.dim_param, 4)
        for dim in kind.shape.dim
    ]
    name = onnx.TensorProto.DataType.Name(kind.elem_type or onnx.TensorProto.FLOAT).lower()
    dtype = getattr(
        torch, {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(name, name)
    )
    return torch.rand(shape).to(dtype)
