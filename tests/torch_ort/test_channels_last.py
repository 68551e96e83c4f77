"""Images between convolutions with their channels last: numbers, gradients, borders, choices."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from models import module_with
from torch import Tensor, nn

import torch_ort
from tests.comparison import counters_of_a_steady_step
from torch_ort import _C
from torch_ort.engine import program, watchers

pytestmark = pytest.mark.ort_only


class Residual(nn.Module):
    """Convolutions with a way past them, as residual networks have it."""

    def __init__(self, channels: int, **settings) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **settings)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.norm(self.first(x)).relu()) + x).relu()


class Gated(nn.Module):
    """Channels weighed by what they hold on the whole."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Skip(nn.Module):
    """A larger image made of a smaller one beside what was there before, as U-Nets have it."""

    def __init__(self, channels: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.norm = nn.GroupNorm(2, channels)
        self.inner = nn.Conv2d(channels, channels + 3, 3, padding=1)
        self.joined = nn.GroupNorm(1, 2 * channels + 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(nn.functional.silu(self.norm(x)))
        larger = nn.functional.interpolate(inner, scale_factor=2, mode=self.mode)
        before = nn.functional.interpolate(x, scale_factor=(2, 2), mode="nearest")
        return self.joined(torch.cat([larger, before], 1))


class Parts(nn.Module):
    """Parts of an image, each read in another way, and joined again along an axis."""

    def __init__(self, channels: int, axis: int, parts: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.parts, self.axis = parts, axis
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        first, second, *others = self.parts(x)
        pooled = nn.functional.avg_pool2d(second, 3, 1, padding=1)
        return torch.cat([first.tanh(), pooled, second, *others], self.axis)


class Cropped(nn.Module):
    """A kernel, work on elements, a sum, and the caller read parts of one image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=2)
        self.second = nn.Conv2d(channels - 1, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        inner = x[:, :, 1:-1, 1:-1]
        scale = x[:, :1, 1:-1].mean((2, 3), keepdim=True)
        return self.second(inner[:, 1:]) * scale + x[:, :, :-2, 2:].sigmoid()


class ByTheMean(nn.Module):
    """An image scaled by one number that is made of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean((1, 2, 3), keepdim=True)


def chain(*layers: nn.Module) -> nn.Module:
    """Layers between two convolutions, in the middle of plain images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.LazyConv2d(8, 3, padding=1), nn.Flatten(),
        nn.LazyLinear(5),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: chain(nn.BatchNorm2d(16), nn.ReLU()),
    "residual": lambda: chain(Residual(16), Residual(16)),
    "gate": lambda: chain(Gated(16)),
    "max_pool": lambda: chain(nn.MaxPool2d(3, 2, padding=1)),
    "max_pool_dilated": lambda: chain(nn.MaxPool2d(3, 1, dilation=2)),
    "average_pool": lambda: chain(nn.AvgPool2d(2, padding=1, count_include_pad=False)),
    "adaptive_pool": lambda: chain(nn.AdaptiveAvgPool2d((5, 3))),
    "strides": lambda: chain(nn.Conv2d(16, 24, 3, stride=2, bias=False)),
    "dilation": lambda: chain(nn.Conv2d(16, 12, 3, dilation=2)),
    "groups": lambda: chain(nn.Conv2d(16, 12, 3, groups=4, bias=False)),
    "depthwise": lambda: chain(nn.Conv2d(16, 32, 5, padding=2, groups=16), nn.Conv2d(32, 8, 1)),
    "one_channel": lambda: chain(nn.Conv2d(16, 1, 3), nn.ReLU()),
    "pointwise": lambda: chain(nn.Conv2d(16, 24, 1), nn.Hardswish(), nn.LeakyReLU(), nn.ReLU6()),
    "activations": lambda: chain(nn.SiLU(), nn.GELU(), nn.ELU(), nn.Hardsigmoid(), nn.Mish()),
    "transposed": lambda: chain(nn.ConvTranspose2d(16, 12, 4, stride=2, padding=1)),
    "transposed_groups": lambda: chain(
        nn.ConvTranspose2d(16, 8, 3, 2, output_padding=1, groups=2, bias=False)
    ),
    "group_norm": lambda: chain(nn.GroupNorm(4, 16), nn.ReLU()),
    "upsample": lambda: chain(nn.Upsample(scale_factor=2), nn.Upsample(size=(9, 7))),
    "shuffle": lambda: chain(nn.PixelShuffle(2)),
    "padding": lambda: chain(nn.ZeroPad2d((1, 2, 0, 1)), nn.ReflectionPad2d(1)),
    "constant_pad": lambda: chain(nn.ConstantPad2d((1, -1, 0, 2), 0.5), nn.Tanh()),
    "skip_nearest": lambda: chain(Skip(16, "nearest")),
    "skip_exact": lambda: chain(Skip(16, "nearest-exact")),
    "skip_bilinear": lambda: chain(Skip(16, "bilinear")),
    "corners": lambda: chain(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    "parts": lambda: chain(Parts(16, 1, lambda x: [x[:, :5], x[:, 5:6], x[:, 6:]])),
    "every_second": lambda: chain(Parts(16, 1, lambda x: [x[:, ::2], x[:, 1::3]])),
    "chunks": lambda: chain(Parts(16, 1, lambda x: list(x.chunk(3, 1)))),
    "rows": lambda: chain(Parts(16, 2, lambda x: [x[:, :, 1:], x[:, :, :-1]])),
    "images": lambda: chain(Parts(16, 0, lambda x: [x, x[:, :, 1:].tanh().sum(2, True) + x])),
    "cropped": lambda: chain(Cropped(16)),
    "group_norm_plain": lambda: chain(nn.GroupNorm(4, 16, affine=False), nn.Tanh()),
    "by_the_mean": lambda: chain(ByTheMean()),
    "norm_without_statistics": lambda: chain(nn.BatchNorm2d(16, track_running_stats=False)),
    "frozen_norm": lambda: chain(nn.BatchNorm2d(16).eval(), nn.Softplus()),
}


def make(name: str, size: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        model(torch.zeros(size))  # makes the lazy layers
    return model


def moved(graph: _C.Graph) -> int:
    """Count the nodes that the pass gives images with channels last."""
    return _C.run_pass("channels_last", graph.clone())


def steps(call: Callable, model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Train a step on each batch; give losses, gradients and what the model holds at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for x in batches:
        x = x.to(next(model.parameters()).dtype).clone().requires_grad_()
        optimizer.zero_grad()
        result = call(x)
        loss = result.square().sum() / 64 + result.sum() / 8
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        optimizer.step()
    return found + [value.clone() for value in model.state_dict().values()]


def distance(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        (a.double() - b.double()).abs().max().item() / max(b.double().abs().max().item(), 1e-3)
        for a, b in zip(got, exact, strict=True)
        if b.numel() > 0
    ]


@pytest.fixture(autouse=True)
def clean() -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()


def by_ort(model: nn.Module) -> Callable:
    return torch.compile(model, backend="ort", options={"check": 2})


def check(
    model: nn.Module, batches: list[Tensor], tolerance: float, wrap: Callable = by_ort
) -> None:
    exact = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    want = steps(exact, exact, batches)
    eager_off = distance(steps(eager, eager, batches), want)
    got_off = distance(steps(wrap(model), model, batches), want)
    # Single numbers are far off in eager too where a sign near zero turns with the last bit.
    for mine, theirs in zip(got_off, eager_off, strict=True):
        assert mine <= max(30 * tolerance, 3 * theirs)
    assert statistics.median(got_off) <= max(tolerance, 3 * statistics.median(eager_off))
    counters = torch_ort.counters()
    assert counters["fallbacks"] == 0


def models(default: str, names: Iterable[str] = MODELS) -> pytest.MarkDecorator:
    """Take each model, of which the default run has the given ones.

    All models are trained in float32 with other sizes: what is left are sizes and dtypes.
    """
    slow = {*names} - {*default.split()}
    params = [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]
    return pytest.mark.parametrize("name", params)


@pytest.mark.parametrize("name", MODELS)
def test_training_against_float64(name: str) -> None:
    size = (4, 3, 12, 12)
    with watchers.watching() as programs:
        check(make(name, size), [torch.randn(size) for _ in range(3)], 1e-4)
    (program,) = programs
    assert moved(program.captured) > 0


@models("residual strides adaptive_pool transposed skip_bilinear cropped images")
def test_one_image_of_odd_sizes(name: str) -> None:
    size = (1, 3, 13, 10)
    check(make(name, size), [torch.randn(size) for _ in range(3)], 1e-4)


@models(
    "residual gate max_pool adaptive_pool depthwise activations transposed group_norm upsample "
    "skip_bilinear parts cropped by_the_mean"
)
def test_bfloat16(name: str) -> None:
    size = (4, 3, 12, 12)
    model = make(name, size).bfloat16()
    check(model, [torch.randn(size).bfloat16().float() for _ in range(2)], 0.03)


def program_of(call: Callable, x: Tensor) -> program.Program:
    """Give what is captured of a training step."""
    with watchers.watching() as programs:
        call(x).sum().backward()
    (program,) = programs
    return program


def captured(model: nn.Module, x: Tensor) -> _C.Graph:
    """Give the graph of a training step as it is before the pass."""
    return program_of(torch.compile(model, backend="ort"), x).captured


def test_the_pass_can_be_left_out(monkeypatch) -> None:
    x = torch.randn(4, 3, 12, 12)
    model = make("residual", tuple(x.shape))

    def transposes() -> int:
        torch.compiler.reset()
        (graph,) = torch_ort.explain(model, x).graphs
        return graph.nodes["Transpose"]

    with_pass = transposes()
    monkeypatch.setenv("TORCH_ORT_DISABLE", "channels_last")
    assert transposes() < with_pass


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).double(),
        nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 3)).double(),
        # oneDNN's gradients of these weights are wrong where channels lie side by side.
        nn.Sequential(nn.Conv3d(3, 6, 7, 2, 3, groups=3), nn.ReLU()),
    ],
    ids=["1d", "float64", "3d of float64", "3d in groups with strides"],
)
def test_what_is_left_alone(model: nn.Module) -> None:
    rank = model[0].weight.dim()
    x = torch.randn(4, 3, *[12] * (rank - 2)).to(model[0].weight.dtype)
    assert moved(captured(model, x)) == 0
    torch.compiler.reset()
    check(model, [x], 1e-4)


def test_results_keep_the_strides_of_eager() -> None:
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = self.first(x).relu()
        last = self.second(inner)
        return last, inner * 2, last.flatten(2), last.mean((2, 3), keepdim=True)

    torch.manual_seed(0)
    model = module_with(forward, first=nn.Conv2d(3, 16, 3), second=nn.Conv2d(16, 8, 3))
    compiled = torch.compile(model, backend="ort")
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    for got, want in zip(compiled(x), model(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()
    sum(each.square().sum() for each in compiled(x)).backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    sum(each.square().sum() for each in model(x)).backward()
    for mine, want in zip(got, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3)
        assert mine.stride() == want.stride()


def test_a_model_that_is_channels_last_already() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    assert moved(captured(model, x)) == 0
    compiled = torch.compile(model, backend="ort")
    assert compiled(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_saved_files_keep_the_standard_layout(tmp_path) -> None:
    import onnx

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "images")}
    torch.compile(model, backend="ort", options=options)(torch.randn(4, 3, 12, 12)).sum().backward()
    (path,) = tmp_path.glob("*optimized.onnx")
    assert "Transpose" not in [node.op_type for node in onnx.load(path).graph.node]


# ---- volumes


class VolumeSkip(nn.Module):
    """A larger volume made of a smaller one, beside and without parts of what was there before."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.inner = nn.Conv3d(8, 5, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        larger = nn.functional.interpolate(self.inner(x).tanh(), x.shape[2:], mode=self.mode)
        joined = torch.cat([larger, x[:, 2:]], 1)
        return nn.functional.pad(joined[:, :, 1:], (0, 1, 2, 0, 1, 1)) * x[:, :1].mean()


class OfImages(nn.Module):
    """Volumes that are scaled by images, and images that are sums of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.last = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        images = self.images(x.mean(1)).sigmoid()  # (N, D, H, W) as channels
        volumes = x * images[:, :, None] + self.last(images[:1])
        return (
            volumes * volumes.amax((2, 3, 4), keepdim=True) + volumes.sum((3, 4))[..., None, None]
        )


def chain_of_volumes(*layers: nn.Module) -> nn.Module:
    """Layers between two convolutions, in the middle of plain volumes."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), *layers, nn.LazyConv3d(4, 3, padding=1),
        nn.AdaptiveAvgPool3d(2), nn.Flatten(),
    )  # fmt: skip


VOLUMES: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: chain_of_volumes(nn.BatchNorm3d(8), nn.ReLU()),
    "norm_without_statistics": lambda: chain_of_volumes(
        nn.BatchNorm3d(8, track_running_stats=False)
    ),
    "frozen_norm": lambda: chain_of_volumes(nn.BatchNorm3d(8).eval(), nn.SiLU()),
    "group_norm": lambda: chain_of_volumes(nn.GroupNorm(4, 8), nn.GELU()),
    "instance_norm": lambda: chain_of_volumes(nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()),
    "max_pool": lambda: chain_of_volumes(nn.MaxPool3d(3, 2, padding=1)),
    "average_pool": lambda: chain_of_volumes(nn.AvgPool3d(2), nn.Conv3d(8, 8, 1)),
    "adaptive_pool": lambda: chain_of_volumes(nn.AdaptiveAvgPool3d((3, 4, 5))),
    "strides": lambda: chain_of_volumes(nn.Conv3d(8, 12, 3, stride=(1, 2, 2), bias=False)),
    "dilation": lambda: chain_of_volumes(nn.Conv3d(8, 8, 3, dilation=2, padding=2, groups=2)),
    "pointwise": lambda: chain_of_volumes(nn.Conv3d(8, 16, 1), nn.Hardswish(), nn.Conv3d(16, 8, 1)),
    "winograd": lambda: chain_of_volumes(
        nn.Conv3d(8, 32, 3), nn.ReLU(), nn.Conv3d(32, 32, 3, padding=(0, 1, 2)), nn.ReLU()
    ),
    "transposed": lambda: chain_of_volumes(nn.ConvTranspose3d(8, 6, 2, 2)),
    "upsample": lambda: chain_of_volumes(nn.Upsample(scale_factor=2)),
    "skip_nearest": lambda: chain_of_volumes(VolumeSkip("nearest")),
    "skip_trilinear": lambda: chain_of_volumes(VolumeSkip("trilinear")),
    "one_channel": lambda: chain_of_volumes(nn.Conv3d(8, 1, 3), nn.ReLU()),
    "images": lambda: chain_of_volumes(OfImages()),
}
VOLUME = (2, 2, 6, 8, 9)


def make_volumes(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = VOLUMES[name]()
    with torch.no_grad():
        model(torch.zeros(VOLUME))
    return model


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_against_float64(name: str) -> None:
    check(make_volumes(name), [torch.randn(VOLUME) for _ in range(2)], 1e-4)


@models("norm instance_norm winograd skip_trilinear", sorted(VOLUMES.keys() - {"images"}))
def test_volumes_of_many_sizes(name: str) -> None:
    def wrap(model: nn.Module) -> Callable:
        return torch.compile(model, backend="ort", dynamic=True)

    sizes = VOLUME, (1, 2, 7, 9, 8), (3, 2, 5, 12, 7)
    check(make_volumes(name), [torch.randn(size) for size in sizes], 1e-4, wrap)


def test_volumes_are_channels_last_and_kept_for_the_caller() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(2, 24, 3, padding=1), nn.BatchNorm3d(24), nn.ReLU(),
        nn.Conv3d(24, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 4, 1),
    )  # fmt: skip
    x = torch.randn(2, 2, 8, 10, 10)
    nodes = torch_ort.explain(copy.deepcopy(model), x).graphs[0].nodes
    assert nodes["torch_ort.WinogradConvolution"] == 2
    assert nodes["torch_ort.WinogradWeightGrad"] == 1
    assert nodes["Conv"] == 1  # of two channels; the last one is a product
    torch.compiler.reset()
    result = by_ort(model)(x)
    assert result.stride() == model(x).stride()
    as_last = model.to(memory_format=torch.channels_last_3d)
    given = x.to(memory_format=torch.channels_last_3d)
    torch.compiler.reset()
    got, want = by_ort(as_last)(given), as_last(given)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- sizes as symbols

SIZES_OF_ONE_GRAPH = [(4, 3, 12, 12), (1, 3, 13, 10), (2, 3, 9, 17), (5, 3, 10, 10), (4, 3, 12, 12)]
# Images where strides of dims of one element say nothing.
THIN = [(4, 3, 1, 1), (3, 3, 1, 5), (2, 3, 6, 1)]
TAKES_THIN_IMAGES = {
    "norm", "residual", "gate", "max_pool", "average_pool", "adaptive_pool", "depthwise",
    "pointwise", "activations", "frozen_norm", "group_norm", "group_norm_plain", "parts",
    "every_second", "chunks", "skip_nearest", "skip_exact", "skip_bilinear", "corners",
    "by_the_mean",
}  # fmt: skip


def body(name: str) -> nn.Module:
    """Give a model for images of many sizes."""
    model = make(name, (4, 3, 12, 12))[:-2]  # its head knows one size
    model.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten()])
    for layer in model:
        if isinstance(layer, nn.Conv2d) and name in ("norm", "residual"):
            layer.bias = None  # in front of a norm it has no gradient but for rounding
    return model


OF_MANY_SIZES = sorted(MODELS.keys() - {"upsample"})  # factors are guards


@pytest.mark.parametrize("name", OF_MANY_SIZES)
def test_many_sizes_through_one_graph(name: str, monkeypatch) -> None:
    train_with_many_sizes(name, torch.float32, monkeypatch)


@models("residual average_pool group_norm skip_nearest chunks", OF_MANY_SIZES)
def test_many_sizes_in_bfloat16(name: str, monkeypatch) -> None:
    train_with_many_sizes(name, torch.bfloat16, monkeypatch)


def train_with_many_sizes(name: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    sizes = SIZES_OF_ONE_GRAPH + (THIN if name in TAKES_THIN_IMAGES else [])
    model = body(name).to(dtype)
    batches = [torch.randn(size).to(dtype).float() for size in sizes]
    check(model, batches, 1e-4 if dtype == torch.float32 else 0.03, torch_ort.ORTModule)
    counters = torch_ort.counters()
    assert counters["graphs_captured"] == 1
    assert counters["forward_runs"] == counters["backward_runs"] == len(sizes)


# With sizes as symbols, indexing makes other nodes: also slices of whole dims.
INDEXED = {"parts", "every_second", "rows", "images", "cropped"}
FACTORS = pytest.mark.hands_over("factors to a given size depend on the size")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[FACTORS] * (name == "upsample"))
        for name in sorted(MODELS.keys() - INDEXED)
    ],
)
def test_symbols_give_the_graph_of_known_sizes(name: str) -> None:
    model, x = body(name), torch.randn(4, 3, 12, 12)
    known = program_of(torch.compile(model, backend="ort"), x)
    symbolic = program_of(torch_ort.ORTModule(model), x)
    assert moved(symbolic.captured) == moved(known.captured)
    kinds = [Counter(node["op"] for node in each.graph.nodes()) for each in (known, symbolic)]
    for op in ("Conv", "ConvTranspose", "Region"):
        assert kinds[0][op] == kinds[1][op]
    # Copies between the two layouts, and those that a Dims node gives a size.
    assert kinds[1]["Identity"] == kinds[0]["Identity"]


@pytest.mark.hands_over("Dynamo gives the norm's momentum as a tensor")
def test_a_dynamic_graph_of_dynamo() -> None:
    model = body("residual")
    sizes = [(4, 3, 12, 11), (2, 3, 9, 17), (5, 3, 10, 8)]
    wrap = lambda module: torch.compile(module, backend="ort", dynamic=True)  # noqa: E731
    check(model, [torch.randn(size) for size in sizes], 1e-4, wrap)
    assert torch_ort.counters()["graphs_captured"] == 1
    torch.compiler.reset()
    program = program_of(wrap(model), torch.randn(4, 3, 12, 12))
    assert moved(program.captured) == moved(captured(model, torch.randn(4, 3, 12, 12))) > 0


@pytest.mark.parametrize("disabled", ["fuse_regions", "expand_composites,fuse_regions"])
@pytest.mark.parametrize("name", ["norm", "residual", "gate"])
def test_symbols_with_pytorchs_kernels(name: str, disabled: str, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_DISABLE", disabled)
    batches = [torch.randn(size) for size in SIZES_OF_ONE_GRAPH + THIN]
    check(body(name), batches, 1e-4, torch_ort.ORTModule)
    assert torch_ort.counters()["graphs_captured"] == 1


@pytest.mark.parametrize("size", [1, 3])
def test_weights_alone_are_channels_last(size: int) -> None:
    """Weights of one element in width and height also lie as others do: their strides tell."""
    layer = nn.Conv2d(3, 4, size).to(memory_format=torch.channels_last)
    ours, x = torch_ort.ORTModule(copy.deepcopy(layer)), torch.randn(2, 3, 6, 5)
    assert ours(x).stride() == layer(x).stride() == ours(x.abs()).stride()


def test_images_with_gaps_go_through_one_graph() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    ours = torch_ort.ORTModule(copy.deepcopy(model))
    for size in ((4, 3, 12, 12), (20, 3, 9, 17), (1, 3, 8, 8)):
        x = torch.randn(size)[:, :, 1:-1, 1:-1]
        got, want = ours(x), model(x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert torch_ort.counters()["graphs_captured"] == 1


def test_no_images_through_the_graph_of_some() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.AvgPool2d(2)
    )
    sizes = [(4, 3, 12, 12), (0, 3, 12, 12), (2, 3, 14, 10)]
    check(model, [torch.randn(size) for size in sizes], 1e-4, torch_ort.ORTModule)
    assert torch_ort.counters()["graphs_captured"] == 1


def test_what_no_call_weighs_stays_plain() -> None:
    graph = program_of(torch_ort.ORTModule(body("norm")), torch.randn(4, 3, 12, 12)).captured
    assert set(graph.size_hints.values()) == {4, 12}
    assert moved(graph) > 0
    for hints in ({}, dict.fromkeys(graph.size_hints, 0)):
        graph.size_hints = hints
        assert moved(graph) == 0


@pytest.mark.usefixtures("many_registers")
def test_weights_weigh_as_in_the_captured_call() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3))
    for size, is_moved in ((32, True), (4, False)):
        graph = program_of(torch_ort.ORTModule(model), torch.randn(2, 3, size, size)).captured
        assert (moved(graph) > 0) == is_moved


@pytest.mark.hands_over("unbacked sizes")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.compile_only("the recorder takes no sizes from data")
def test_sizes_that_data_tells_stay_plain() -> None:
    torch.manual_seed(0)
    model = module_with(
        lambda self, x: self.layers(x[x.mean((1, 2, 3)) > 0]),
        layers=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
    )
    x = torch.randn(6, 3, 12, 12)
    assert moved(captured(model, x)) == 0
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="ort")(x), model(x))


def test_steady_steps_of_several_sizes_copy_and_allocate_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip
    call = torch_ort.ORTModule(model)
    sizes = [(8, 3, 24, 24), (3, 3, 31, 20)]
    for size in sizes * 2:
        counters_of_a_steady_step(model, call, torch.randn(size), torch.randint(10, size[:1]))
    for size in sizes:
        x, y = torch.randn(size), torch.randint(10, size[:1])
        torch_ort.reset_counters()
        model.zero_grad()
        nn.functional.cross_entropy(call(x), y).backward()
        counters = torch_ort.counters()
        assert counters["results_copied"] == counters["arena_allocations"] == 0
        assert counters["plans"] == counters["graphs_captured"] == 0
        assert counters["steps_region"] > 10


# ---- random networks

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "conv3": lambda c: nn.Conv2d(c, c, 3, padding=1, bias=False),
    "conv1": lambda c: nn.Conv2d(c, c, 1),
    "depthwise": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
    "norm": nn.BatchNorm2d,
    "tanh": lambda c: nn.Tanh(),
    "silu": lambda c: nn.SiLU(),
    "average": lambda c: nn.AvgPool2d(3, 1, padding=1),
    "group_norm": lambda c: nn.GroupNorm(1, c),
}


class Network(nn.Module):
    """Layers, each of which may read the results of two that came before."""

    def __init__(self, channels: int, plan: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[kind](channels) for kind, _, _ in plan)
        self.reads = [(first, second) for _, first, second in plan]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for layer, (first, second) in zip(self.layers, self.reads, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(layer(a if first == second else a + 0.5 * b))
        return values[-1], values[len(values) // 2]


def trained(call: Callable, module: Network, images: Tensor) -> list[Tensor | None]:
    """Run a step; give its results, all gradients and the buffers after it."""
    images.requires_grad_()
    module.zero_grad()
    results = call(images)
    sum(each.square().mean() for each in results).backward()
    grads = [p.grad if p.grad is not None else torch.zeros(()) for p in module.parameters()]
    buffers = [value.clone() for value in module.buffers()]
    return [*(each.detach() for each in results), images.grad, *grads, *buffers]


@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(sorted(LAYERS)), st.integers(0, 7), st.integers(0, 7)),
        min_size=2,
        max_size=6,
    ),
    channels=st.integers(1, 9),
    sizes=st.lists(
        st.tuples(st.integers(2, 3), st.integers(1, 7), st.integers(1, 7)), min_size=2, max_size=3
    ),
)
def test_random_networks_through_one_graph(plan, channels, sizes) -> None:
    torch_ort.reset_counters()
    torch.manual_seed(0)
    model = Network(channels, [("conv1", 0, 0), *plan])  # a weight tells how many channels
    exact = copy.deepcopy(model).double()
    call = torch_ort.ORTModule(model)
    for batch, height, width in sizes:
        x = torch.randn(batch, channels, height, width, dtype=torch.float64)
        found = []
        for run, module, images in ((exact, exact, x.clone()), (call, model, x.float())):
            found.append(trained(run, module, images))
        # A gradient may be a sum of large numbers that is nearly zero.
        scale = max(1, *(want.double().abs().max().item() for want in found[0]))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=2e-3 * scale)
    # One channel of one pixel: PyTorch's own norms ask whether there is more than one number.
    assert torch_ort.counters()["graphs_captured"] <= (2 if channels == 1 else 1)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_norm_of_a_frozen_convolution_keeps_its_layout(dtype):
    """PyTorch's gradient with channels last crashes where that of the input is not asked for."""
    torch.manual_seed(0)
    model = chain(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16))
    x = torch.randn(4, 3, 12, 12)
    model(x)  # lazy layers get their sizes
    model = model.to(dtype)
    model[0].requires_grad_(False)
    eager = copy.deepcopy(model)
    eager(x.to(dtype)).float().pow(2).mean().backward()
    torch.compile(model, backend="ort")(x.to(dtype)).float().pow(2).mean().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


class PixelNorm(nn.LayerNorm):
    """Of the channels of each pixel, as in a ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_norm_of_pixels_gets_row_major_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager they have the strides of the transposed image, which no result depends on."""
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.manual_seed(0)
    model = chain(PixelNorm(16), nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), PixelNorm(16))
    model(torch.randn(4, 3, 12, 12))  # lazy layers get their sizes
    check(model, [torch.randn(4, 3, 12, 12) for _ in range(2)], 1e-5)


def test_an_operator_that_reads_memory_gets_the_strides_of_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    torch.manual_seed(0)
    conv, x = nn.Conv2d(16, 32, 3, padding=1), torch.randn(2, 16, 8, 8)

    def first_in_memory(x: Tensor) -> Tensor:
        return torch.as_strided_copy(conv(x).permute(0, 2, 3, 1), (64,), (1,))

    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(first_in_memory, backend="ort")(x), first_in_memory(x)
        )
