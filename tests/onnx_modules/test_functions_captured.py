"""Modules of files whose operators are functions, captured whole: eager PyTorch's values and
gradients at several sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from onnx_cases import model_of
from torch import Tensor, nn

import torch_ort

pytestmark = pytest.mark.ort_only


def weight(name: str, *sizes: int) -> str:
    """Write an initializer of random numbers, as ONNX's parser reads it."""
    generator = torch.Generator().manual_seed(len(name) + sum(sizes))
    numbers = torch.randn(sizes, generator=generator).flatten() * 0.4
    dims = ", ".join(map(str, sizes))
    return f"float[{dims}] {name} = {{{', '.join(f'{x:.3f}' for x in numbers)}}}"


def lengths(length: int, batch: int) -> Tensor:
    return torch.arange(batch, dtype=torch.int32) % length + 1


def regions(count: int) -> Tensor:
    return torch.rand(count, 4) * 3 + torch.tensor([0, 0, 3, 3])


def classes(*sizes: int) -> Tensor:
    return torch.randint(0, 3, sizes)


# Of a file: its inputs, its graph, its opset, and inputs of calls.
MODELS: dict[str, tuple[str, str, int, Callable[[int, int], Sequence[Tensor]]]] = {
    "LSTM": (
        "float[L, N, 3] x",
        f"""(float[L, 2, N, 4] y, float[2, N, 4] h, float[2, N, 4] c)
        <{weight('w', 2, 16, 3)}, {weight('r', 2, 16, 4)}, {weight('b', 2, 32)}> {{
          y, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r, b)
        }}""",
        22, lambda n, m: [torch.randn(m, n, 3)],
    ),
    "GRU with lengths": (
        "float[5, N, 3] x, int32[N] lens",
        f"""(float[5, 1, N, 4] y, float[1, N, 4] h)
        <{weight('w', 1, 12, 3)}, {weight('r', 1, 12, 4)}> {{
          y, h = GRU <hidden_size = 4, direction = "reverse"> (x, w, r, , lens)
        }}""",
        22, lambda n, m: [torch.randn(5, n, 3), lengths(5, n)],
    ),
    "RNN step by step": (
        "float[L, N, 3] x",
        f"""(float[N, 4] y)
        <{weight('w', 1, 4, 3)}, {weight('r', 1, 4, 4)}, int64[1] zero = {{0}}> {{
          all, last = RNN <hidden_size = 4, activations = ["Softsign"], clip = 0.9> (x, w, r)
          y = Squeeze(last, zero)
        }}""",
        22, lambda n, m: [torch.randn(m, n, 3)],
    ),
    "Resize to computed sizes": (
        "float[N, 2, H, W] x, float[N, 2, P, Q] other",
        f"""(float[N, 2, P, Q] y) <{weight('w', 2, 2, 1, 1)}> {{
          h = Conv(x, w)
          size = Shape(other)
          large = Resize <mode = "linear", coordinate_transformation_mode = "align_corners">
            (h, , , size)
          y = Add(large, other)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, m, 5), torch.randn(n, 2, m + 3, 4)],
    ),
    "Resize with weights": (
        "float[N, 2, H, W] x",
        f"""(float[N, 2, P, Q] y) <{weight('w', 2, 2, 1, 1)}, float[4] by = {{1, 1, 2, 0.5}}> {{
          h = Conv(x, w)
          y = Resize <mode = "cubic", antialias = 1> (h, , by)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, m, 6)],
    ),
    "Attention": (
        "float[N, L, 8] x",
        f"""(float[N, L, 8] y) <{weight('q', 8, 8)}, {weight('k', 8, 4)}, {weight('v', 8, 4)}> {{
          a = MatMul(x, q) b = MatMul(x, k) c = MatMul(x, v)
          y = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2> (a, b, c)
        }}""",
        23, lambda n, m: [torch.randn(n, m, 8)],
    ),
    "Attention with a cap and a past": (
        "float[N, 2, L, 4] x, bool[L, T] mask, float[N, 2, P, 4] pk, float[N, 2, P, 4] pv",
        f"""(float[N, 2, L, 4] y, float[N, 2, T, 4] keys, float[N, 2, T, 4] values)
        <{weight('w', 4, 4)}> {{
          k = MatMul(x, w)
          y, keys, values = Attention <softcap = 2.0> (x, k, x, mask, pk, pv)
        }}""",
        23, lambda n, m: [torch.randn(n, 2, m, 4), torch.rand(m, m + 3) < 0.8,
                          torch.randn(n, 2, 3, 4), torch.randn(n, 2, 3, 4)],
    ),
    "GridSample at an affine grid": (
        "float[N, 2, H, W] x, float[N, 2, 3] theta",
        f"""(float[N, 2, H, W] y) <{weight('w', 2, 2, 1, 1)}> {{
          h = Conv(x, w)
          size = Shape(x)
          grid = AffineGrid(theta, size)
          y = GridSample <mode = "linear"> (h, grid)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, m, 5), 0.4 * torch.randn(n, 2, 3)],
    ),
    "a loss": (
        "float[N, L, 4] x, int64[N, L] labels",
        f"""(float loss, float[N, 3, L] p) <{weight('w', 4, 3)}, {weight('shares', 3)}> {{
          h = MatMul(x, w)
          t = Transpose <perm = [0, 2, 1]> (h)
          loss, p = SoftmaxCrossEntropyLoss <ignore_index = 1> (t, labels, shares)
        }}""",
        22, lambda n, m: [torch.randn(n, m, 4), classes(n, m)],
    ),
    "ScatterND": (
        "float[N, 3] x, int64[M, 1] at, float[M, 3] updates",
        f"""(float[N, 3] y, float[N, 3] z) <{weight('w', 3, 3)}> {{
          h = MatMul(x, w)
          y = ScatterND <reduction = "add"> (h, at, updates)
          z = ScatterND <reduction = "max"> (h, at, updates)
        }}""",
        22, lambda n, m: [torch.randn(n, 3), torch.randint(-n, n, (m, 1)), torch.randn(m, 3)],
    ),
    "pools": (
        "float[N, 2, H, W] x",
        f"""(float[N, 3, P, Q] y) <{weight('w', 3, 2, 3, 3)}, {weight('b', 3)}> {{
          c = Conv <auto_pad = "SAME_UPPER", strides = [2, 1]> (x, w, b)
          m = MaxPool <kernel_shape = [2, 2], auto_pad = "SAME_LOWER"> (c)
          y = AveragePool <kernel_shape = [3, 2], strides = [2, 2], ceil_mode = 1> (m)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, 2 * m + 3, 7)],
    ),
    "norms": (
        "float[N, 4, L] x",
        f"""(float[N, 4, L] y) <{weight('w', 4)}, {weight('b', 4)}> {{
          i = InstanceNormalization(x, w, b)
          l = LRN <size = 3> (i)
          m = MeanVarianceNormalization <axes = [0, 2]> (l)
          y = LpNormalization <axis = 1> (m)
        }}""",
        22, lambda n, m: [torch.randn(n, 4, m)],
    ),
    "a spectrum": (
        "float[N, L, 1] x",
        f"""(float y) <int64 step = {{2}}, {weight('window', 4)}> {{
          s = STFT(x, step, window)
          q = ReduceSumSquare <keepdims = 0> (s)
          y = Celu(q)
        }}""",
        17, lambda n, m: [torch.randn(n, 2 * m + 4, 1)],
    ),
    "linear attention": (
        "float[N, 4, 8] x, float[N, 4, 2] decay, float[N, 4, 2] rate",
        f"""(float[N, 4, 8] y, float[N, 2, 4, 4] state) <{weight('q', 8, 8)}> {{
          h = MatMul(x, q)
          y, state = LinearAttention <q_num_heads = 2, kv_num_heads = 2> (h, x, x, , decay, rate)
        }}""",
        27, lambda n, m: [torch.randn(n, 4, 8), -torch.rand(n, 4, 2), torch.rand(n, 4, 2)],
    ),
    "regions": (
        "float[N, 2, H, W] x, float[R, 4] rois, int64[R] images",
        f"""(float[R, 2, 2, 3] y) <{weight('w', 2, 2, 1, 1)}> {{
          h = Conv(x, w)
          y = RoiAlign <sampling_ratio = 2, output_height = 2, output_width = 3> (h, rois, images)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, m, 6), regions(m), torch.arange(m) % n],
    ),
    "deformed windows": (
        "float[N, 2, 4, 5] x",
        f"""(float[N, 3, 3, 4] y) <{weight('w', 3, 2, 2, 2)}, {weight('o', 8, 2, 2, 2)}> {{
          offset = Conv(x, o)
          y = DeformConv(x, w, offset)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, 4, 5)],
    ),
    "a batch norm that trains": (
        "float[N, 3, L] x, float[3] mean, float[3] var",
        f"""(float[N, 3, L] y, float[3] m, float[3] v) <{weight('w', 3)}, {weight('b', 3)}> {{
          y, m, v = BatchNormalization <training_mode = 1> (x, w, b, mean, var)
        }}""",
        22, lambda n, m: [torch.randn(n, 3, m), torch.zeros(3), torch.ones(3)],
    ),
    "a transposed convolution": (
        "float[N, 2, L] x",
        f"""(float[N, 3, M] y) <{weight('w', 2, 3, 4)}, {weight('b', 3)}> {{
          y = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2]> (x, w, b)
        }}""",
        22, lambda n, m: [torch.randn(n, 2, m)],
    ),
    "numbers in rows": (
        "float[N, 6] x, float[N, 6] y",
        """(float[N, 6] sums, float[N, 2] best, int64[N, 2] places, float[N, N] products)
        <int64 one = {1}, int64[1] two = {2}> {
          h = Celu(x)
          sums = CumSum <reverse = 1, exclusive = 1> (h, one)
          best, places = TopK(h, two)
          products = Einsum <equation = "ij,kj->ik"> (h, y)
        }""",
        22, lambda n, m: [torch.randn(n, 6), torch.randn(n, 6)],
    ),
}  # fmt: skip


def run(module: nn.Module, call: Callable, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Give results, and gradients of weights and of inputs."""
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    results = call(*given)
    results = results if isinstance(results, tuple) else (results,)
    module.zero_grad()
    losses = [each.square().sum() for each in results if each.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    leaves = [*module.parameters(), *given]
    return [*(each.detach() for each in results), *(each.grad for each in leaves)]


def captured(module: nn.Module, road: str) -> Any:
    if road == "ortmodule":
        return torch_ort.ORTModule(module)
    return torch.compile(module, backend="ort", fullgraph=True)


def on_roads() -> list[Any]:
    """Give each model on either road; by default the roads take turns, as both trace all of it."""
    roads, slow = ("ort", "ortmodule"), pytest.mark.slow
    return [
        pytest.param(name, road, marks=() if (i + j) % 2 == 0 else slow)
        for i, name in enumerate(MODELS)
        for j, road in enumerate(roads)
    ]


@pytest.mark.parametrize(("name", "road"), on_roads())
def test_captured_whole(name: str, road: str) -> None:
    header, graph, opset, sample = MODELS[name]
    loaded = torch_ort.load_onnx(model_of(graph, header, f'"" : {opset}'))
    eager = copy.deepcopy(loaded)
    call = captured(loaded, road)
    for n, m in ((2, 4), (3, 6), (5, 3)):
        inputs = sample(n, m)
        got, want = run(loaded, call, inputs), run(eager, eager, inputs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    counters = torch_ort.counters()
    assert counters["fallbacks"] == counters["calls_left_to_eager"] == 0
    assert counters["forward_runs"] == 3
    assert counters["backward_runs"] == 3


# Files whose results have sizes, or whose steps are some, that only numbers tell: Dynamo ends a
# graph there and begins another.
IN_PARTS: dict[str, tuple[str, str, int, Callable[[int, int], Sequence[Tensor]]]] = {
    "Unique": (
        "float[N] x",
        """(float[M] y, int64[N] places) <float two = {2}> {
          h = Mul(x, two)
          r = Round(h)
          y, first, places = Unique(r)
        }""",
        22, lambda n, m: [torch.randn(3 * n)],
    ),
    "NonMaxSuppression": (
        "float[1, N, 4] boxes, float[1, 2, N] scores",
        """(int64[M, 3] picked) <int64 most = {3}, float overlap = {0.5}> {
          s = Sigmoid(scores)
          picked = NonMaxSuppression(boxes, s, most, overlap)
        }""",
        22, lambda n, m: [torch.rand(1, 4 * n, 4), torch.randn(1, 2, 4 * n)],
    ),
    "NonZero and GatherND": (
        "float[N, 4] x",
        """(float[M] y) <float two = {2}> {
          h = Relu(x)
          at = NonZero(h)
          rows = Transpose <perm = [1, 0]> (at)
          picked = GatherND(h, rows)
          y = Mul(picked, two)
        }""",
        22, lambda n, m: [torch.randn(n, 4)],
    ),
    "Compress": (
        "float[N, 4] x, bool[N] which",
        """(float[M, 4] y) {
          h = Tanh(x)
          y = Compress <axis = 0> (h, which)
        }""",
        22, lambda n, m: [torch.randn(n, 4), torch.arange(n) % 2 == 0],
    ),
    "regions with counts of their own": (
        "float[1, 2, H, W] x, float[R, 4] rois, int64[R] images",
        """(float[R, 2, 2, 2] y) {
          h = Tanh(x)
          y = RoiAlign <output_height = 2, output_width = 2> (h, rois, images)
        }""",
        22, lambda n, m: [torch.randn(1, 2, m, 6), regions(n), torch.zeros(n, dtype=torch.int64)],
    ),
    "a branch": (
        "float[N, 3] x",
        """(float[N, 3] y) <float zero = {0}> {
          total = ReduceSum <keepdims = 0> (x)
          which = Greater(total, zero)
          h = Celu(x)
          y = If (which) <
            then_branch = t () => (float[N, 3] a) { a = Tanh(h) },
            else_branch = e () => (float[N, 3] b) { b = Neg(h) } >
        }""",
        22, lambda n, m: [torch.randn(n, 3)],
    ),
    "a loop": (
        "float[N, 3] x, int64 count",
        """(float[N, 3] y) {
          y = Loop (count, , x) <body = b (int64 i, bool go, float[N, 3] h)
            => (bool more, float[N, 3] next) { next = Tanh(h) more = Identity(go) }>
        }""",
        22, lambda n, m: [torch.randn(n, 3), torch.tensor(m)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PARTS)
def test_captured_in_parts(name: str) -> None:
    header, graph, opset, sample = IN_PARTS[name]
    loaded = torch_ort.load_onnx(model_of(graph, header, f'"" : {opset}'))
    eager = copy.deepcopy(loaded)
    call = torch.compile(loaded, backend="ort")
    for n, m in ((2, 4), (3, 6)):
        inputs = sample(n, m)
        torch.testing.assert_close(run(loaded, call, inputs), run(eager, eager, inputs))
    assert torch_ort.counters()["fallbacks"] == 0
