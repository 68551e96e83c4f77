"""Regions on a GPU beside those of the CPU, and what their texts become as machine code. What they
compute is tested by tests/cpu, whose tests of all instruction sets -m cuda runs on a GPU.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import regions
import torch
from emulated.cuda_driver import ORDERS
from gate import compile_texts, faults
from torch import nn
from torch.nn import functional as F

import torch_ort
from torch_ort import _C
from torch_ort.engine.cuda import configure

pytestmark = pytest.mark.cuda


class Block(nn.Module):
    """A layer of a transformer without its attention, and a classifier."""

    def __init__(self, width: int = 64, classes: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last, self.head = nn.RMSNorm(width), nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


def data(rows: int = 3, length: int = 17, classes: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids, labels = torch.randint(0, classes, (2, rows, length), generator=generator)
    labels[0, :5] = -100
    return ids, labels


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_step(dtype):
    torch.manual_seed(0)
    model = Block().cuda()
    wide = copy.deepcopy(model).double().cpu()
    compiled = torch.compile(model, backend="ort")
    before = torch_ort.counters()
    for rows in (3, 5):
        ids, labels = data(rows)  # a second number of rows makes it a symbol
        for each in (model, wide):
            each.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = compiled(ids.cuda(), labels.cuda())
        loss.backward()
        want = wide(ids, labels)
        want.backward()
        near = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(loss.double().cpu(), want, rtol=near, atol=near)
        for name, gradient in gradients(model).items():
            expected = gradients(wide)[name]
            torch.testing.assert_close(
                gradient, expected, rtol=near, atol=near * expected.abs().max().item()
            )
    after = torch_ort.counters()
    assert after["steps_region"] - before["steps_region"] >= 8
    assert after["fallbacks"] == before["fallbacks"]


@pytest.mark.parametrize("order", ORDERS)
def test_bits_do_not_depend_on_the_order_of_threads(order, monkeypatch):
    torch.manual_seed(0)
    model = Block().cuda()
    compiled = torch.compile(model, backend="ort")
    ids, labels = (x.cuda() for x in data())

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = compiled(ids, labels)
        loss.backward()
        torch.cuda.synchronize()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    first = step()
    monkeypatch.setenv("EMULATED_CUDA_ORDER", order)
    for got, want in zip(step(), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(8, 64), (5, 7), (3, 1), (1, 1030)], ids=str)
def test_masks_are_those_of_the_cpu(shape):
    configure()
    x, seed = torch.ones(shape), torch.tensor([1234567890123])
    graph = _mask_graph()
    (on_cpu,) = _C.run(graph, {"x": x, "seed": seed}).values()
    for start in (0, 1):  # behind the beginning of memory each element is drawn by itself
        there = torch.ones(x.numel() + 1, device="cuda")[start : start + x.numel()].view(shape)
        session = _C.Session.compile(regions.on_cuda(graph), {})
        (on_cuda,) = session.run({"x": there, "seed": seed.cuda()}).values()
        assert torch.equal(on_cuda.cpu(), on_cpu)
    assert 0 < on_cpu.count_nonzero() <= on_cpu.numel()


def _mask_graph() -> _C.Graph:
    graph = regions.read(
        {"x": "float[N,C]", "seed": "int64[1]"},
        [
            "mask = torch_ort.PhiloxMask <keep = 0.7, stream = 5> (seed)",
            "kept = Cast <to = 1> (mask)",
            "y = Mul (x, kept)",
        ],
        ["y"],
        types={"mask": "bool[N,C]"},
    )
    return regions.fused(graph)


def test_texts_are_few_and_good_machine_code(tmp_path):
    """Twelve layers have the kernels of one, and no size asks for another."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(12)))
    model = nn.Sequential(layers, nn.GELU(), nn.Linear(64, 64)).cuda()
    options = {"dump": "cuda", "dump_dir": str(tmp_path)}
    compiled = torch.compile(model, backend="ort", options=options)
    texts = []
    for rows in (300, 500, 1000):
        x = torch.randn(rows, 64, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x).square().mean()
        loss.backward()
        torch.cuda.synchronize()
        texts.append(sorted(path.name for path in tmp_path.glob("*.cu")))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) <= 8, Counter(texts[0])
    for built in compile_texts({path.stem: path.read_text() for path in tmp_path.glob("*.cu")}):
        assert faults(built, wide_loads=1) == []


@pytest.mark.parametrize(
    "options", [{"check": 2}, {"check": 3}, {"disable": "region_kernels"}], ids=str
)
def test_kernels_beside_their_nodes(options):
    """Node by node, constants must not lie on the host where kernels of a GPU read them."""
    torch.manual_seed(0)
    model = Block().cuda()
    ids, labels = (x.cuda() for x in data())
    want = model(ids, labels)
    got = torch.compile(model, backend="ort", options=options)(ids, labels)
    got.backward()
    torch.testing.assert_close(got, want)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("check", [0, 2])
def test_label_out_of_bounds(check):
    """Nobody waits for the kernel that finds it, unless each step is waited for."""
    logits = torch.randn(6, 8, device="cuda", requires_grad=True)
    good, bad = torch.tensor([1, 2, 7, 0, 3, -100]), torch.tensor([1, 2, 8, 0, 3, -100])
    words = "Target is out of bounds"

    @torch.compile(backend="ort", options={"check": check})
    def loss(logits, labels):
        return F.cross_entropy(logits.tanh(), labels)

    want = F.cross_entropy(logits.tanh(), good.cuda())
    torch.testing.assert_close(loss(logits, good.cuda()), want)
    if check == 0:
        assert loss(logits, bad.cuda()).isnan()
        torch.cuda.synchronize()
    with pytest.raises(IndexError, match=words):
        loss(logits, good.cuda() if check == 0 else bad.cuda())
    torch.testing.assert_close(loss(logits, good.cuda()), want)


def test_sines_of_all_sizes():
    """Large numbers too, which lose nothing of their place in a turn."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-30, 128).repeat_interleave(20)
    x = (1 + torch.rand(len(exponents), generator=generator)).ldexp(exponents)
    quarters = torch.arange(1, 5000).double().mul(torch.pi / 2).float()  # as near as floats come
    x = torch.cat([x, -x, quarters, torch.tensor([0.0, -0.0, torch.inf, torch.nan])])
    graph = regions.read(
        {"x": "float[N]"}, ["s = Sin (x)", "c = Cos (x)", "y = Add (s, c)"], ["s", "c", "y"]
    )
    got = regions.run_by_name(regions.fused(graph), {"x": x}, regions.CUDA)
    for name, function in (("s", torch.sin), ("c", torch.cos)):
        want = function(x.double())
        torch.testing.assert_close(got[name].double(), want, rtol=3e-7, atol=0, equal_nan=True)
    zeros = got["s"][x == 0]
    assert zeros.signbit().tolist() == [False, True]
