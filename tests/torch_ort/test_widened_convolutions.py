"""Convolutions of one dim run as those of images with one row, against eager PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_ort
from tests.cpu.gradients import compare_at_sizes, compare_gradients
from tests.cpu.regions import assert_near


class Residual(nn.Module):
    """Dilated convolutions with batch norms, as of temporal convolutional networks."""

    def __init__(self, channels: int = 20) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, channels, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(channels, channels, 3, padding=step, dilation=step),
                nn.BatchNorm1d(channels), nn.ReLU(), nn.Conv1d(channels, channels, 1),
            )
            for step in (1, 4)
        )  # fmt: skip
        self.last = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.last(x.mean(-1))


class Pooled(nn.Module):
    """Strides, a pooling, an instance norm, a transposed convolution, and padding of one side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halve = nn.Conv1d(3, 32, 3), nn.Conv1d(32, 24, 3, stride=2, padding=1)
        self.norm, self.pool = nn.InstanceNorm1d(24, affine=True), nn.MaxPool1d(2)
        self.up = nn.ConvTranspose1d(24, 32, 4, stride=2, padding=1)
        self.last = nn.Conv1d(32, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.halve(self.first(x).relu())).sigmoid())
        return self.last(functional.pad(self.up(x).tanh(), (2, 0)))


class Module(nn.Module):
    """The convolutions of a Conformer, which transposes them out of the layout of its tokens."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.wide = nn.Conv1d(width, 2 * width, 1)
        self.each = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.norm, self.down = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.glu(self.wide(self.before(x).transpose(1, 2)), 1)
        y = self.down(functional.silu(self.norm(self.each(y))))
        return x + y.transpose(1, 2)


class Causal(nn.Module):
    """A convolution of each channel that sees the past alone, as Mamba's, and joined parts."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, width, 1)
        self.each = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.mix = nn.Conv1d(2 * width, width, 3, padding=1, bias=False)
        self.last = nn.Conv1d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = functional.silu(self.each(x)[..., : x.shape[-1]])
        return self.last(self.mix(torch.cat([x, y * self.each.weight[:, 0, :1]], 1)).cos())


class Kept(nn.Module):
    """Point-wise operations of a transposed tensor keep its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(16, 24, 3, padding=1), nn.Conv1d(24, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).sin()
        return (x * self.last(self.first(x).relu())).transpose(1, 2)


MODELS = {
    "residual": (Residual, (3, 3, 19)),
    "pooled": (Pooled, (2, 3, 26)),
    "module": (Module, (3, 11, 16)),
    "causal": (Causal, (2, 3, 13)),
    "kept": (Kept, (2, 9, 16)),
}
# The kernels of the engine in each, forward and back.
KERNELS = {
    "residual": {"Convolution": 4},
    "pooled": {"Convolution": 4},
    "module": {"DepthwiseConvolution": 2},
    "causal": {"Convolution": 2, "DepthwiseConvolution": 2},
    "kept": {"Convolution": 0},  # copies would take longer
}


@pytest.fixture(autouse=True)
def clean(few_registers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")
    torch.compiler.reset()


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind, size = MODELS[name]
    return kind(), torch.randn(size)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    model, x = make(name)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.05) for each in (model, exact))
    for step in range(3):
        inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
        y, want = compiled(inputs[0]), exact(inputs[1])
        assert_near(y.detach(), want.detach(), atol=1e-5 * (step + 1))
        y.square().mean().backward()
        want.square().mean().backward()
        compare_gradients(model, exact, 4e-6 * (step + 1))
        assert_near(inputs[0].grad, inputs[1].grad, atol=4e-6 * (step + 1))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(model.buffers(), exact.buffers(), strict=True):
        assert_near(got, want, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_they_have_kernels_of_the_engine(name: str) -> None:
    model, x = make(name)
    graph = torch_ort.explain(copy.deepcopy(model), x).graphs[0]
    found = {op: graph.nodes[f"torch_ort.{op}"] for op in KERNELS[name]}
    assert found == KERNELS[name]
    # Others have three channels on either side.
    assert graph.nodes["Conv"] <= {"pooled": 2, "kept": 2}.get(name, 1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("residual", [(3, 3, 19), (1, 3, 12), (5, 3, 30)]),
        ("pooled", [(2, 3, 26), (3, 3, 17), (1, 3, 40)]),
        ("module", [(3, 11, 16), (2, 5, 16), (4, 20, 16)]),
        ("causal", [(2, 3, 13), (1, 3, 6), (3, 3, 21)]),
        ("kept", [(2, 9, 16), (1, 5, 16), (3, 14, 16)]),
    ],
)
def test_other_lengths_and_batches(name: str, sizes: list[tuple[int, ...]]) -> None:
    model, _ = make(name)
    compare_at_sizes(model, sizes, 5e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(name: str, mode: type) -> None:
    model, x = make(name)
    model.eval()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort")
    with mode():
        for _ in range(2):
            assert_near(compiled(x), exact(x.double()), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_an_ortmodule_and_two_calls_alive_at_once(name: str) -> None:
    model, x = make(name)
    exact = copy.deepcopy(model).double()
    call = torch_ort.ORTModule(model)
    for run, to in ((call, torch.float32), (exact, torch.float64)):
        results = [run(each.to(to)).square().mean() for each in (x, 2 * x)]
        for result in reversed(results):
            result.backward()
    compare_gradients(model, exact, 1e-5)


def test_results_have_eagers_strides() -> None:
    layers = nn.Sequential(nn.Conv1d(16, 24, 3), nn.ReLU(), nn.Conv1d(24, 16, 3))
    x = torch.randn(2, 16, 13)
    y = torch.compile(layers, backend="ort")(x)
    assert y.stride() == layers(x).stride()


@pytest.mark.hands_over
def test_a_convolution_whose_image_a_branch_reads() -> None:
    def run(x: Tensor, weight: Tensor, more: Tensor) -> Tensor:
        y = functional.conv1d(x, weight, padding=1)
        return torch.cond(more.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))

    x, weight = torch.randn(2, 16, 9), torch.randn(16, 16, 3)
    compiled = torch.compile(run, backend="ort")
    for sign in (1.0, -1.0):
        more = torch.tensor([sign])
        with torch.no_grad():
            want = run(x.double(), weight.double(), more)
            assert_near(compiled(x, weight, more), want, atol=2e-5)


def test_cuts_at_expressions_of_sizes() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(16, 16, 3, requires_grad=True) for _ in range(2)]
    exact = [each.detach().double().requires_grad_() for each in weights]

    def run(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = functional.conv1d(x, first).relu()[:, :, : x.shape[2] // 2 + 1]
        return functional.conv1d(y, second)[..., 1::2]

    compiled = torch.compile(run, backend="ort", dynamic=True)
    for length in (19, 12, 30):
        x = torch.randn(2, 16, length)
        results = [(compiled, x, weights), (run, x.double(), exact)]
        for call, image, given in results:
            call(image, *given).square().mean().backward()
        for got, want in zip(weights, exact, strict=True):
            assert_near(got.grad, want.grad, rtol=1e-5, atol=1e-5 * float(want.grad.abs().max()))


def test_eagers_bits_without_own_kernels() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 200, 64), torch.randn(64, 64, 3)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv1d(x.transpose(1, 2), weight, padding=1).relu()

    given = [[each.clone().requires_grad_() for each in (x, weight)] for _ in range(2)]
    compiled = torch.compile(run, backend="ort", options={"enable_compute_optimizer": False})
    got, want = compiled(*given[0]), run(*given[1])
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(*given, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Masked(nn.Module):
    """Attention and convolutions of one text, with one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.first, self.last = nn.Conv1d(16, 24, 3, padding=1), nn.Conv1d(24, 16, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.mT * 0.25).masked_fill(mask == 0, -1e9)
        x = (x + scores.softmax(-1) @ v).transpose(1, 2)
        return self.last(self.first(x).relu().masked_fill(mask == 0, 0.0))


def test_a_mask_that_attention_shares() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 12, 16)
    mask = (torch.arange(12) < torch.tensor([[9], [12]])).view(2, 1, 12)
    exact = copy.deepcopy(model).double()
    nodes = torch_ort.explain(copy.deepcopy(model), x, mask).graphs[0].nodes
    assert (nodes["torch_ort.Attention"], nodes["torch_ort.AttentionGrad"]) == (1, 1)
    torch.compile(model, backend="ort")(x, mask).square().mean().backward()
    exact(x.double(), mask).square().mean().backward()
    compare_gradients(model, exact, 4e-6)


def test_short_floats_stay_as_they_are() -> None:
    model = Residual().bfloat16()
    graph = torch_ort.explain(model, torch.randn(3, 3, 19, dtype=torch.bfloat16)).graphs[0]
    assert graph.nodes["Unsqueeze"] <= 1
    assert graph.nodes["torch_ort.Convolution"] == 0
