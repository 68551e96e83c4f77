"""Graphs as the exporters of TensorFlow and scikit-learn write them, built by hand.

Such files have sizes without names, images with channels last, numbers that graphs compute from
shapes in int32, and opsets that have to be converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import by_onnxruntime
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort

pytestmark = pytest.mark.ort_only
STEPS = 20
FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


@dataclass
class Written:
    """A graph that is written node by node, with its weights and numbers."""

    opset: int
    weights: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def weight(self, name: str, *sizes: int) -> str:
        self.weights[name] = 0.4 * torch.randn(sizes)
        return name

    def number(self, given: Any, dtype: Any = np.int64) -> str:
        name = f"const__{len(self.numbers)}"
        self.numbers[name] = np.array(given, dtype)
        return name

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{op}__{len(self.nodes)}:0"
        self.nodes.append(
            helper.make_node(op, inputs, [name], name[:-2], domain=domain, **attributes)
        )
        return name

    def squeeze(self, x: str, *axes: int) -> str:
        if self.opset < 13:
            return self.add("Squeeze", x, axes=axes)
        return self.add("Squeeze", x, self.number(axes))

    def file(
        self, path: Path, x: tuple[int, list[int | None]], outputs: dict[str, tuple[int, str]]
    ) -> None:
        """Write the file; `outputs` have the element type and the value that they are."""
        for name, (_, value) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        arrays = {**{name: x.numpy() for name, x in self.weights.items()}, **self.numbers}
        graph = helper.make_graph(
            self.nodes, "net", [helper.make_tensor_value_info("x", *x)],
            [helper.make_tensor_value_info(name, t, None) for name, (t, _) in outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        )  # fmt: skip
        domains = [helper.make_opsetid("", self.opset), helper.make_opsetid("ai.onnx.ml", 2)]
        model = helper.make_model(graph, ir_version=8, opset_imports=domains)
        onnx.save(model, path)


class Source(nn.Module):
    """The same computation in PyTorch, with the weights of the file."""

    def __init__(self, weights: dict[str, Tensor], call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(x.clone()) for x in weights.values())
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.weights, x)


def images(path: Path, opset: int) -> tuple[Source, Tensor]:
    """Channels last outside, pads of one side, merged batch norms, swish, relu6."""
    g = Written(opset)
    h = g.add("Transpose", "x", perm=[0, 3, 1, 2])
    h = g.add("Conv", h, g.weight("net/conv/ReadVariableOp:0", 8, 3, 3, 3), strides=[2, 2],
              kernel_shape=[3, 3], auto_pad="SAME_UPPER")  # fmt: skip
    h = g.add("Mul", h, g.weight("net/norm/mul:0", 1, 8, 1, 1))
    h = g.add("Add", h, g.weight("net/norm/add:0", 1, 8, 1, 1))
    h = g.add("Clip", h, g.number(0, np.float32), g.number(6, np.float32))
    h = g.add("Conv", h, g.weight("net/depthwise:0", 8, 1, 3, 3), group=8, kernel_shape=[3, 3],
              pads=[1, 1, 1, 1])  # fmt: skip
    h = g.add("Mul", h, g.add("Sigmoid", h))
    h = g.add("Conv", h, g.weight("net/pixels:0", 12, 8, 1, 1), kernel_shape=[1, 1])
    h = g.add("LeakyRelu", h, alpha=0.2)
    h = g.add("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER")
    h = g.squeeze(g.add("GlobalAveragePool", h), 2, 3)
    h = g.add("MatMul", h, g.weight("net/dense:0", 12, 5))
    y = g.add("Softmax", h, axis=1)
    g.file(path, (FLOAT, [None, 18, 18, 3]), {"y": (FLOAT, y)})

    def call(w: Any, x: Tensor) -> Tensor:
        conv, scale, bias, depthwise, pixels, dense = w
        h = F.conv2d(F.pad(x.permute(0, 3, 1, 2), (0, 1, 0, 1)), conv, stride=2)
        h = F.silu(F.conv2d((h * scale + bias).clamp(0, 6), depthwise, padding=1, groups=8))
        h = F.leaky_relu(F.conv2d(h, pixels), 0.2)
        h = F.max_pool2d(F.pad(h, (0, 1, 0, 1), value=-torch.inf), 2)
        return (h.mean((2, 3)) @ dense).softmax(1)

    return Source(g.weights, call), torch.randn(4, 18, 18, 3)


def sentences(path: Path, opset: int) -> tuple[Source, Tensor]:
    """A recurrent layer in both directions, whose first state is as large as shapes say."""
    g = Written(opset)
    width, hidden = 6, 5
    words = g.add("Gather", g.weight("net/words:0", 30, width), "x")
    h = g.add("Transpose", words, perm=[1, 0, 2])
    sizes = g.add("Cast", g.add("Shape", words), to=INT32)
    batch = g.add("Slice", sizes, g.number([0]), g.number([1]), g.number([0]))
    packed = g.add("Concat", batch, g.number([hidden], np.int32), axis=0)
    zeros = g.add("Expand", g.number(0, np.float32), g.add("Cast", packed, to=INT64))
    if opset < 13:
        one = g.add("Unsqueeze", zeros, axes=[0])
    else:
        one = g.add("Unsqueeze", zeros, g.number([0]))
    state = g.add("Concat", one, one, axis=0)
    weights = [g.weight("W", 2, 4 * hidden, width), g.weight("R", 2, 4 * hidden, hidden),
               g.weight("B", 2, 8 * hidden)]  # fmt: skip
    h = g.add("LSTM", h, *weights, "", state, state, hidden_size=hidden, direction="bidirectional")
    parts = [
        g.squeeze(g.add("Slice", h, g.number([i]), g.number([i + 1]), g.number([1])), 1)
        for i in (0, 1)
    ]
    h = g.add("ReduceMean", g.add("Concat", *parts, axis=2), axes=[0], keepdims=0)
    y = g.add("MatMul", h, g.weight("net/dense:0", 2 * hidden, 3))
    g.file(path, (INT32, [None, None]), {"y": (FLOAT, y)})

    def gates(x: Tensor) -> Tensor:
        """Give PyTorch's order of gates, which is input, forget, cell, output."""
        i, o, f, c = x.chunk(4)
        return torch.cat([i, f, c, o])

    def call(w: Any, x: Tensor) -> Tensor:
        words, of_input, of_state, bias, dense = w
        flat = []
        for k in (0, 1):
            flat += [gates(of_input[k]), gates(of_state[k])]
            flat += [gates(part) for part in bias[k].chunk(2)]
        steps = words[x].transpose(0, 1)
        zeros = steps.new_zeros(2, x.shape[0], hidden)
        h, _, _ = torch.lstm(steps, (zeros, zeros), flat, True, 1, 0.0, False, True, False)
        return h.mean(0) @ dense

    return Source(g.weights, call), torch.randint(0, 30, (4, 7), dtype=torch.int32)


def attention(path: Path, opset: int) -> tuple[Source, Tensor]:
    """Products whose sizes are products, sums and maxima of parts of shapes."""
    g = Written(opset)
    heads, width = 2, 8
    sizes = g.add("Shape", "x")
    outer = g.add("Gather", sizes, g.number([0, 1]))
    rows = g.add("ReduceProd", outer, axes=[0], keepdims=1)
    flat = g.add("Reshape", "x", g.add("Concat", rows, g.number([width]), axis=0))

    def projected(name: str) -> str:
        h = g.add("Gemm", flat, g.weight(name, width, width), transB=1)
        split = g.add("Concat", outer, g.number([heads, width // heads]), axis=0)
        return g.add("Transpose", g.add("Reshape", h, split), perm=[0, 2, 1, 3])

    q, k, v = (projected(f"net/{name}:0") for name in "qkv")
    scores = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
    h = g.add("MatMul", g.add("Softmax", scores, axis=3), v)
    # The greater of 1 and the batch, twice.
    batch = g.add("Max", g.add("Gather", sizes, g.number([0])), g.number([1]), g.number([1]))
    whole = g.add("Concat", batch, g.number([-1, width]), axis=0)
    h = g.add("Reshape", g.add("Transpose", h, perm=[0, 2, 1, 3]), whole)
    y = g.add("Add", g.add("MatMul", h, g.weight("net/out:0", width, width)), "x")
    g.file(path, (FLOAT, [None, None, width]), {"y": (FLOAT, y)})

    def call(w: Any, x: Tensor) -> Tensor:
        *projections, out = w
        q, k, v = ((x @ each.T).unflatten(-1, (heads, -1)).transpose(1, 2) for each in projections)
        h = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return h.transpose(1, 2).flatten(2) @ out + x

    return Source(g.weights, call), torch.randn(3, 5, width)


def classifier(path: Path, opset: int) -> tuple[Source, Tensor]:
    """Scaled features through layers with biases (1, out), then labels by places of classes."""
    g = Written(opset)
    offset, scale = [0.1, -0.2, 0.3, 0.0], [2.0, 0.5, 1.0, 1.5]
    h = g.add("Scaler", "x", domain="ai.onnx.ml", offset=offset, scale=scale)
    h = g.add("Cast", h, to=FLOAT)
    for i, (inner, outer) in enumerate([(4, 16), (16, 3)]):
        h = g.add("MatMul", h, g.weight(f"coefficient{i}", inner, outer))
        h = g.add("Add", h, g.weight(f"intercepts{i}", 1, outer))
        h = g.add("Softmax", h, axis=1) if i else g.add("Relu", h)
    best = g.add("ArgMax", h, axis=1)
    label = g.add("ArrayFeatureExtractor", g.number([3, 5, 9]), best, domain="ai.onnx.ml")
    label = g.add("Reshape", g.add("Cast", label, to=INT64), g.number([-1]))
    g.file(path, (FLOAT, [None, 4]), {"y": (FLOAT, h), "label": (INT64, label)})

    def call(w: Any, x: Tensor) -> Tensor:
        first, first_bias, second, second_bias = w
        h = (x - torch.tensor(offset)) * torch.tensor(scale)
        return ((h @ first + first_bias).relu() @ second + second_bias).softmax(1)

    return Source(g.weights, call), torch.randn(8, 4)


FILES = {
    "images": (images, (11, 13)),
    "sentences": (sentences, (11, 13)),
    "attention": (attention, (13, 17)),
    "classifier": (classifier, (13,)),
}


def train(model: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = first(call(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def first(results: Any) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize(
    ("name", "opset"), [(name, opset) for name, (_, opsets) in FILES.items() for opset in opsets]
)
def test_there_and_back(name: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "net.onnx"
    source, x = FILES[name][0](path, opset)
    loaded = torch_ort.load_onnx(path)
    doubled = torch.cat([x, x])
    for given in (x, doubled):
        want = by_onnxruntime(path, True, x=given)
        got = loaded(given)
        for mine, theirs in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
            torch.testing.assert_close(mine.detach(), theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first(got), source(given), rtol=1e-4, atol=1e-5)
    losses = train(loaded, torch.compile(loaded, backend="ort"), x)
    assert losses == pytest.approx(train(source, source, x), rel=1e-3)
    assert torch_ort.counters()["fallbacks"] == 0
    torch_ort.export_onnx(loaded, tmp_path / "trained.onnx")
    got = by_onnxruntime(tmp_path / "trained.onnx", True, x=doubled)[0]
    torch.testing.assert_close(got, first(loaded(doubled)).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, source(doubled).detach(), rtol=1e-3, atol=1e-4)


def test_names_of_sizes_that_shape_inference_made_up_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _, x = sentences(path, 13)
    model = onnx.load(path)
    for name in ("Expand__7:0", "Concat__9:0"):
        value = helper.make_tensor_value_info(name, FLOAT, ["unk__0", "unk__1"])
        if name.startswith("Concat"):
            value = helper.make_tensor_value_info(name, FLOAT, [2, "unk__0", "unk__1"])
        model.graph.value_info.append(value)
    torch.testing.assert_close(
        torch_ort.load_onnx(model)(x), torch_ort.load_onnx(path)(x), rtol=0, atol=0
    )
