"""Batch norm of whole images in fused regions, against eager PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from regions import ISAS
from torch import nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.ort_only


class Layer(nn.Module):
    """A norm between what regions join it with."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * 1.5).relu()


def make_norm(rank: int, channels: int, **settings) -> nn.Module:
    torch.manual_seed(0)
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank]
    norm = kind(channels, **settings)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


PLAIN, LAST = torch.contiguous_format, torch.channels_last


def train(
    call, model: nn.Module, shape: tuple[int, ...], offset: float = 0, layout=PLAIN
) -> list[torch.Tensor]:
    """Run three steps; give results, gradients of inputs and parameters, and buffers."""
    dtype = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0)).dtype
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(3):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).add(offset).to(dtype)
        x = x.to(memory_format=layout).requires_grad_()
        model.zero_grad()
        result = call(x)
        assert result.is_contiguous(memory_format=layout)
        tangent = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        result.backward(tangent.to(memory_format=layout))
        found += [result.detach(), x.grad, *(p.grad for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def check(
    model: nn.Module, shape: tuple[int, ...], offset: float = 0, loosen: float = 1, layout=PLAIN
) -> None:
    exact = copy.deepcopy(model).double()
    want = train(exact, exact, shape, offset, layout)
    got = train(torch.compile(model, backend="ort"), model, shape, offset, layout)
    for mine, double in zip(got, want, strict=True):
        tolerance = loosen * (1e-5 if mine.dtype == torch.float32 else 1e-13)
        scale = max(double.abs().max().item(), 1)
        torch.testing.assert_close(
            mine.double(), double.double(), rtol=0, atol=tolerance * scale, equal_nan=True
        )


def kinds(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    (graph,) = torch_ort.explain(model, x).graphs
    return graph.aten


SHAPES = [(2, 3, 5), (4, 3, 8, 8), (1, 5, 3, 2), (3, 40, 4, 4), (2, 3, 2, 3, 4), (6, 2, 33, 31)]


KEPT = pytest.mark.parametrize(
    "kept", [True, False], ids=["statistics", "no statistics"]
)  # whether the norm keeps statistics over batches


@KEPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_against_eager(shape, dtype, kept):
    check(Layer(make_norm(len(shape), shape[1], track_running_stats=kept)).to(dtype), shape)


IMAGES = [
    (4, 3, 8, 8), (1, 5, 3, 2), (3, 40, 4, 4), (17, 2, 5, 1), (33, 70, 3, 2), (2, 16, 33, 31)
]  # fmt: skip


@KEPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_training_with_channels_last(shape, dtype, kept):
    norm = make_norm(4, shape[1], track_running_stats=kept)
    check(Layer(norm).to(dtype), shape, layout=LAST)


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_with_channels_last(monkeypatch, isa):
    monkeypatch.setenv("TORCH_ORT_ISA", isa)
    check(Layer(make_norm(4, 21)), (5, 21, 6, 7), layout=LAST)


def test_bfloat16_with_channels_last():
    # Statistics and sums are taken in float32, so that results are as far off as a few roundings.
    # Without a relu, whose sign would turn with the last bit.
    model = make_norm(4, 8).bfloat16()
    exact = copy.deepcopy(model).double()
    want = train(exact, exact, (4, 8, 9, 9), layout=LAST)
    got = train(torch.compile(model, backend="ort"), model, (4, 8, 9, 9), layout=LAST)
    for mine, double in zip(got, want, strict=True):
        scale = max(double.abs().max().item(), 1)
        torch.testing.assert_close(mine.double(), double.double(), rtol=0, atol=0.03 * scale)


READ_IN_OTHER_LAYOUTS = {
    "pooled": lambda y: y.mean((2, 3)),
    "flat": lambda y: y.flatten(1).sin(),
    "row-major": lambda y: y.contiguous().sin(),
    "channels last": lambda y: y.contiguous(memory_format=LAST).sin(),
    "transposed": lambda y: y.permute(0, 2, 3, 1).contiguous().sin(),
}


@KEPT
@pytest.mark.parametrize("read", READ_IN_OTHER_LAYOUTS)
@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_that_come_in_another_layout(dtype, channels, layout, read, kept):
    # Then the gradient of the norm may stay PyTorch's, which wants statistics of the norm's dtype.
    norm = make_norm(4, channels, track_running_stats=kept).to(dtype)
    exact = copy.deepcopy(norm).double()
    x = torch.randn(2, channels, 4, 4).to(dtype).to(memory_format=layout)
    found = []
    for model, given in ((norm, x), (exact, x.double())):
        given = given.detach().requires_grad_()
        call = torch.compile(
            lambda x, model=model: READ_IN_OTHER_LAYOUTS[read](model(x)),
            backend="ort" if model is norm else "eager",
        )
        call(given).square().sum().backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    for mine, double in zip(*found, strict=True):
        scale = max(double.abs().max().item(), 1)
        within = (0.06 if dtype is torch.bfloat16 else 2e-5) * scale
        torch.testing.assert_close(mine.double(), double, rtol=0, atol=within)


@pytest.mark.parametrize("shape", [(64, 5, 3), (4, 3, 8, 8), (8, 3, 50, 50)], ids=str)
def test_the_variance_of_images_far_from_zero(shape):
    x = torch.randn(shape) + 1e5
    norm = make_norm(len(shape), shape[1], momentum=1.0, affine=False)
    exact = copy.deepcopy(norm).double()
    torch.compile(norm, backend="ort")(x)
    exact(x.double())
    for mine, double in zip(norm.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), double.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.9}, {"eps": 0.5}],
    ids=str,
)
def test_settings(settings, layout):
    check(Layer(make_norm(4, 3, **settings)), (4, 3, 5, 5), layout=layout)


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
def test_a_large_mean_does_not_drown_the_variance(layout):
    check(Layer(make_norm(4, 3)), (4, 3, 16, 16), offset=1000, loosen=200, layout=layout)


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
@pytest.mark.parametrize("odd", [0, 9], ids=["the first image", "another image"])
def test_an_image_far_from_the_others(odd, layout):
    # The first images of a batch stand for all of it where distances are taken from.
    x = torch.randn(32, 3, 4, 4, dtype=torch.float64)
    x[odd] += 1e4
    norm = make_norm(4, 3, affine=False)
    exact = copy.deepcopy(norm).double()
    got = torch.compile(norm, backend="ort")(x.float().to(memory_format=layout))
    torch.testing.assert_close(got.double(), exact(x), rtol=0, atol=2e-5)
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=2e-5, atol=0)


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
def test_channels_that_do_not_vary(layout):
    model = Layer(make_norm(4, 3))
    x = torch.full((2, 3, 4, 4), 7.0).to(memory_format=layout)
    got = torch.compile(model, backend="ort")(x)
    torch.testing.assert_close(got, model(x), rtol=0, atol=1e-3)  # rstd is 300


@KEPT
@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
def test_nothing_is_left_to_pytorch(layout, kept):
    x = torch.randn(2, 3, 4, 4).to(memory_format=layout).requires_grad_()
    model = Layer(make_norm(4, 3, track_running_stats=kept))
    assert not any("batch_norm" in name for name in kinds(model, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 4, 2), (1, 17, 3, 5, 6), (5, 8, 2, 9, 7)], ids=str)
def test_volumes_with_channels_last(shape, dtype):
    layout = torch.channels_last_3d
    model = Layer(make_norm(5, shape[1])).to(dtype)
    check(model, shape, layout=layout)
    x = torch.randn(shape, dtype=dtype).to(memory_format=layout).requires_grad_()
    assert not any("batch_norm" in name for name in kinds(model, x))


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 3, 1), torch.randn(2, 3, 4, 5).transpose(2, 3)],
    ids=["one number a channel", "pixels in another order"],
)
def test_what_stays_with_pytorch(x):
    model = Layer(make_norm(x.dim(), 3))
    assert any("batch_norm" in name for name in kinds(model, x.requires_grad_()))


def test_frozen_statistics_between_steps():
    model = Layer(make_norm(4, 3))
    exact = copy.deepcopy(model).double()
    call = torch.compile(model, backend="ort")
    for training in (True, False, True):
        for each in (model, exact):
            each.train(training)
        torch.manual_seed(3)
        x = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(call(x), exact(x.double()).float())
    torch.testing.assert_close(model.norm.running_var, exact.norm.running_var.float())


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
def test_any_number_of_threads_gives_the_same_bits(layout):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            model = Layer(make_norm(4, 16))
            call = torch.compile(model, backend="ort")
            results.append(train(call, model, (16, 16, 24, 24), layout=layout))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


# ---- sizes as symbols

SIZES_OF_ONE_GRAPH = {
    3: [(2, 3, 5), (1, 3, 2), (7, 3, 1), (40, 3, 9)],
    4: [(4, 3, 8, 8), (1, 3, 3, 2), (17, 3, 5, 1), (33, 3, 3, 4)],
    5: [(2, 3, 2, 3, 4), (5, 3, 1, 1, 2), (1, 3, 3, 3, 3)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rank", "layout"), [(3, PLAIN), (4, PLAIN), (4, LAST), (5, PLAIN)], ids=str
)
def test_many_sizes_through_one_graph(rank, layout, dtype):
    # The weight tells how many channels there are.
    convolution = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[rank](3, 3, 1, bias=False)
    model = nn.Sequential(convolution, Layer(make_norm(rank, 3))).to(dtype)
    exact = copy.deepcopy(model).double()
    torch_ort.reset_counters()
    call = torch_ort.ORTModule(model)
    for shape in SIZES_OF_ONE_GRAPH[rank]:
        want = train(exact, exact, shape, layout=layout)
        got = train(call, model, shape, layout=layout)
        for mine, double in zip(got, want, strict=True):
            scale = max(double.abs().max().item(), 1)
            off = scale * (1e-4 if mine.dtype == torch.float32 else 1e-12)
            torch.testing.assert_close(mine.double(), double.double(), rtol=0, atol=off)
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 1
    assert counters["fallbacks"] == 0
    assert counters["steps_region"] >= 3 * counters["forward_runs"]


@pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)
def test_symbols_leave_nothing_to_pytorch(layout):
    x = torch.randn(2, 3, 4, 4).to(memory_format=layout).requires_grad_()
    model = Layer(make_norm(4, 3))
    with watchers.watching() as programs:
        torch_ort.ORTModule(model)(x).sum().backward()
    (program,) = programs
    operators = {node["attrs"].get("operator", "") for node in program.graph.nodes()}
    assert not any("batch_norm" in name for name in operators)
