"""Models that PyTorch exports, and graphs by hand, that tests of this folder share."""

from __future__ import annotations

import io
import warnings

import onnx
import onnx.parser
import onnxruntime
import torch
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        return self.head(self.norm(F.gelu(self.inner(self.embed(ids)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        heads = (*x.shape[:2], 2, 8)
        query, key, value = (
            part.reshape(heads).transpose(1, 2) for part in self.into(x).chunk(3, -1)
        )
        weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
        return x + self.out((weights @ value).transpose(1, 2).flatten(2))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip


# The model, an input, and the dims of it that have names.
MODELS = {
    "tagger": (Tagger, lambda: torch.randint(0, 50, (3, 7)), {0: "batch", 1: "length"}),
    "attention": (Attention, lambda: torch.randn(2, 5, 16), {0: "batch", 1: "length"}),
    "images": (images, lambda: torch.randn(2, 3, 12, 14), {0: "batch"}),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
        lambda: torch.randn(4, 6),
        {},
    ),
}


def export(model: nn.Module, x: torch.Tensor, names: dict[int, str], opset: int) -> bytes:
    """Export the model as it evaluates, with other numbers in all weights than PyTorch starts with.

    The exporter makes one initializer of equal ones.
    """
    file = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        torch.onnx.export(
            model.eval(), (x,), file, dynamo=False, opset_version=opset, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": names}, do_constant_folding=False,
        )  # fmt: skip
    return file.getvalue()


def by_onnxruntime(data: bytes, all_results: bool = False, **inputs: torch.Tensor):
    """Run the file in onnxruntime; gives its one result, or a list of all."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    results = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    tensors = [torch.from_numpy(result) for result in results]
    if all_results:
        return tensors
    (result,) = tensors
    return result


def model_of(
    nodes: str, header: str = "float[N, 3] x", domains: str = '"" : 20'
) -> onnx.ModelProto:
    """Parse a graph by hand; `first__weight` stands for `first.weight`, which is no word there."""
    text = f"<ir_version: 10, opset_import: [{domains}]> net ({header}) => {nodes}"
    model = onnx.parser.parse_model(text)
    graph = model.graph
    for named in (*graph.input, *graph.output, *graph.initializer):
        named.name = named.name.replace("__", ".")
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("__", ".") for name in names]
    return model


TWO_LAYERS = """(float[N, 2] y)
<float[3, 4] first__weight = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2},
 float[4, 2] second__weight = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] second__bias = {1, 2},
 float factor = {2}, int64[2] shape = {-1, 2}> {
  h = MatMul(x, first__weight)
  scaled = Mul(h, factor)
  g = Gemm(scaled, second__weight, second__bias)
  y = Reshape(g, shape)
}"""
