"""ORTMODULE_ENABLE_COMPUTE_OPTIMIZER=0: losses and gradients have eager PyTorch's own bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort import _C, DebugOptions, ORTModule
from torch_ort.core.switches import OWN_KERNELS
from torch_ort.engine import watchers

pytestmark = [pytest.mark.ort_only, pytest.mark.compile_only("switches of both roads")]

BATCH, LENGTH, WIDTH, HEADS, WORDS = 3, 7, 16, 2, 23
OFF = {"enable_compute_optimizer": False}
ROADS = {
    "compile": lambda module: torch.compile(module, backend="ort", options=OFF),
    "ortmodule": lambda module: ORTModule(module, DebugOptions(config=OFF)),
}


class Written(nn.Module):
    """A block of which everything is rewritten else, with attention by an operator or in words."""

    def __init__(self, by_operator: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.3)
        self.classes = nn.Linear(WIDTH, WORDS)
        self.by_operator = by_operator

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if self.by_operator:
            return F.scaled_dot_product_attention(query, key, value, mask)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.dropout(scores.softmax(-1)) @ value

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words)
        packed = self.project(x).view(*words.shape, 3, HEADS, WIDTH // HEADS)
        mixed = self.attend(*packed.permute(2, 0, 3, 1, 4).unbind(0), (words != 0)[:, None, None])
        x = self.norm(x + self.dropout(mixed.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.feed(x) * torch.sigmoid(x))
        return F.cross_entropy(self.classes(x).flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    words = torch.randint(1, WORDS, (BATCH, LENGTH))
    words[0, 4:] = words[2, 2:] = 0
    return words, torch.where(torch.rand(words.shape) < 0.4, words, -100)


def results(model: nn.Module, run: Callable, steps: int = 2) -> list[Tensor]:
    """Train with SGD; give losses and gradients of all steps."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        words, labels = batch()
        model.zero_grad()
        loss = run(words, labels)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return found


@pytest.mark.parametrize("by_operator", [True, False], ids=["operator", "words"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("road", ROADS)
def test_bits(road: str, dtype: torch.dtype, by_operator: bool) -> None:
    torch.manual_seed(0)
    model = Written(by_operator).to(dtype)
    ours = copy.deepcopy(model)
    want = results(model, model)
    got = results(ours, ROADS[road](ours))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch_ort.counters()["fallbacks"] == 0


OPERATORS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "gelu": F.gelu,
    "gated": lambda x: x * torch.sigmoid(x) + F.silu(x),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(0),
    "norms": lambda x: F.rms_norm(F.layer_norm(x, x.shape[1:]), x.shape[1:]),
    "written out": lambda x: (x - x.mean(-1, keepdim=True)) * x.var(-1, keepdim=True).rsqrt(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "losses": lambda x: F.mse_loss(x, 2 * x.detach()) + F.smooth_l1_loss(x, x.detach() + 1),
    "smoothed": lambda x: F.cross_entropy(x, torch.arange(len(x)), label_smoothing=0.1),
    "table": lambda x: F.embedding(torch.tensor([0, 1, 1, 2, 0]), x),
    "parts": lambda x: torch.cat([x.cumsum(-1), x[:, :3].exp()], -1) / 3,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_of_operators(name: str, dtype: torch.dtype) -> None:
    function = OPERATORS[name]
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH).to(dtype)
    found = []
    for run in (function, ROADS["compile"](function)):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        result = run(given)
        torch.manual_seed(2)
        result.backward(torch.randn(result.shape).to(dtype))
        found.append((result.detach(), given.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.ConvTranspose2d(8, 4, 2, 2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


LIBRARY = {
    "images": (images, (4, 3, 16, 16)),
    "a layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 7, 16)),
    "wide": (lambda: nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 9)), (64, 512)),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", LIBRARY)
def test_bits_of_layers(name: str, road: str) -> None:
    make, shape = LIBRARY[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    ours = copy.deepcopy(model)
    found = []
    for each, run in ((model, model), (ours, ROADS[road](ours))):
        torch.manual_seed(1)
        result = run(x)
        result.square().mean().backward()
        gradients = [p.grad for p in each.parameters()]
        found.append([result.detach(), *gradients, *each.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("road", ROADS)
def test_bits_under_autocast(road: str) -> None:
    torch.manual_seed(0)
    model = Written(True)
    ours = copy.deepcopy(model)

    def cast(run: Callable) -> Callable:
        def step(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):  # keeps its casts of parameters
                return run(*inputs)

        return step

    want = results(model, cast(model))
    got = results(ours, cast(ROADS[road](ours)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_by_the_environment(road: str, monkeypatch) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "0")
    torch.manual_seed(0)
    model = Written(True)
    ours = copy.deepcopy(model)
    run = torch.compile(ours, backend="ort") if road == "compile" else ORTModule(ours)
    with watchers.watching() as programs:
        got = results(ours, run)
    assert all(torch.equal(a, b) for a, b in zip(got, results(model, model), strict=True))
    ran = {name for program in programs for name, _, _ in program.passes}
    assert ran
    assert not ran & {*OWN_KERNELS}
    assert not ran & {each.name for each in _C.passes() if each.not_with}


def test_what_options_of_numerics_switch_off_rounds_elsewhere() -> None:
    for each in _C.passes():
        assert each.not_with is None or {each.name, each.only_with} & {*OWN_KERNELS}, each.name
