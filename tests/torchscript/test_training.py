# Scripted and traced modules through ORTModule, trained against the modules they were made from.
from __future__ import annotations

import copy
import io
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.record import recorder


def rows(step: int) -> Tensor:
    return torch.randn(3 + step, 8)


def images(step: int) -> Tensor:
    return torch.randn(2 + step, 3, 8, 8)


def sentences(step: int) -> Tensor:
    return torch.randn(2 + step, 5 + step, 16)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 5),
    )  # fmt: skip


class Block(nn.Module):
    """A block of a transformer, of plain tensor operations."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = self.split(q), self.split(k), self.split(v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """A residual block as torchvision has them."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Residual(4, 4, 1), Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(words))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def words(step: int) -> tuple[Tensor, Tensor]:
    return torch.randint(10, (2 + step, 3)), torch.randint(10, (2 + step, 3))


MODELS = {
    "mlp": (mlp, rows),
    "cnn": (cnn, images),
    "transformer": (Transformer, sentences),
    "residual": (residual_net, images),
    "tied": (Tied, words),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_scripted_module_trains_as_the_plain_one(compare, name):
    make_model, make_inputs = MODELS[name]
    compare(make_model, make_inputs)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "tied"])
def test_a_traced_module_trains_as_the_plain_one(compare, traced, name):
    make_model, make_inputs = MODELS[name]
    example = make_inputs(0)
    example = example if isinstance(example, tuple) else (example,)
    compare(make_model, make_inputs, traced(*example))


def test_a_traced_convolution_is_the_one_of_a_plain_module(monkeypatch):
    """Its operator, which has flags of cuDNN, asks tensors for their bytes on a GPU."""
    called, form = [], recorder._Mode.form
    monkeypatch.setattr(
        recorder._Mode,
        "form",
        lambda self, func, *rest: called.append(func) or form(self, func, *rest),
    )
    x = images(0)
    module = torch.jit.trace(cnn(), x)
    assert any(node.kind() == "aten::_convolution" for node in module.inlined_graph.nodes())
    ORTModule(module)(x)
    aten = torch.ops.aten
    assert aten.convolution.default in called
    assert aten._convolution.default not in called


def test_encoder_layers_of_torch(compare):
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    compare(encoder, sentences)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def test_buffers_are_written_and_assigned(compare):
    _, got = compare(Counting, rows, steps=4)
    assert got.model.calls == 4


def test_dropout_follows_the_mode(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    ours = ORTModule(torch.jit.script(copy.deepcopy(model)))
    x = torch.randn(4, 8)
    for mode in (True, False, True, False):
        model.train(mode)
        ours.train(mode)
        torch.manual_seed(3)
        want = model(x)
        torch.manual_seed(3)
        torch.testing.assert_close(ours(x), want)
    assert torch_ort.counters()["graphs_captured"] == 2
    assert torch_ort.counters()["fallbacks"] == 0


def test_inference_needs_no_gradient():
    model = cnn().eval()
    ours = ORTModule(torch.jit.script(copy.deepcopy(model)))
    x = images(0)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        assert not ours(x).requires_grad
    assert ours(x).requires_grad
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_scripted_part_of_a_plain_module(compare):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.outer = nn.Linear(8, 8), mlp(), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            # What Python reads of a script's parameters is the graph's as well.
            y = self.inner(self.first(x)) + self.first.weight.sum()
            return self.outer(torch.relu(y)) * self.scale

    def script_parts(module: nn.Module) -> nn.Module:
        module.first = torch.jit.script(module.first)
        module.inner = torch.jit.script(module.inner)
        return module

    compare(Plain, rows, script_parts)


@torch.jit.script
def scripted_loss(prediction: Tensor, label: Tensor, weight: float = 2.0) -> Tensor:
    if prediction.dim() != label.dim():
        raise ValueError("dims differ")
    return weight * ((prediction - label) ** 2).mean()


def test_a_scripted_loss_in_a_plain_module(compare):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return scripted_loss(self.model(x), x) + scripted_loss(x, label=self.model(x), weight=3)

    compare(WithLoss, rows, lambda module: module)


def test_saved_and_loaded(compare, tmp_path):
    def through_a_file(module: nn.Module) -> nn.Module:
        path = tmp_path / "model.pt"
        torch.jit.script(module).save(path)
        return torch.jit.load(path)

    compare(Transformer, sentences, through_a_file)


def test_state_dict_and_checkpoint_are_those_of_the_script():
    scripted = torch.jit.script(mlp())
    ours = ORTModule(scripted)
    assert list(ours.state_dict()) == list(scripted.state_dict())
    ours(rows(0)).sum().backward()
    other = ORTModule(torch.jit.script(mlp()))
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other(rows(0) * 0 + 1), ours(rows(0) * 0 + 1))
    buffer = io.BytesIO()
    torch.jit.save(ours.module, buffer)
    buffer.seek(0)
    loaded = ORTModule(torch.jit.load(buffer))
    torch.testing.assert_close(loaded(rows(0) * 0 + 1), ours(rows(0) * 0 + 1))
    assert torch_ort.counters()["fallbacks"] == 0


def test_copies_train_apart():
    ours = ORTModule(torch.jit.script(mlp()))
    x = rows(0)
    before = ours(x).detach()
    with torch.no_grad():  # else PyTorch makes copies of parameters that are no leaves
        copied = copy.deepcopy(ours)
    torch.testing.assert_close(copied(x), before)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    torch.testing.assert_close(ours(x), before)
    assert not torch.equal(copied(x), before)


class Exports(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_exported_methods_are_the_scripts(compare):
    compare(Exports, rows)
    ours = ORTModule(torch.jit.script(Exports()))
    x = rows(0)
    torch.testing.assert_close(ours.encode(x) * 2, ours(x))


def test_a_script_gives_the_graph_of_the_plain_module(monkeypatch):
    # A graph names the user's lines, and lines of several statements are counted differently.
    monkeypatch.setattr(recorder, "_line", lambda frame: None)
    plain = Transformer().eval()
    x = sentences(0)
    for module in (plain, torch.jit.script(plain)):
        ORTModule(module)(x).sum().backward()
    assert torch_ort.counters()["graphs_captured"] == 2
    assert torch_ort.counters()["graphs_compiled"] == 1  # equal graphs share a session


def test_autocast_around_a_script():
    model = mlp()
    scripted = torch.jit.script(copy.deepcopy(model))
    ours, x = ORTModule(scripted), rows(0)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(x), ours(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.hands_over("numbers read from tensors")
def test_parts_run_in_the_engine_where_the_whole_cannot(monkeypatch):
    class ByData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(mlp())

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(x if float(x.sum()) > 0 else -x)

    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = ByData()
    ours = torch_ort.ortmodule.HierarchicalORTModule(model)
    for step in range(3):
        ours(rows(step)).sum().backward()
    assert torch_ort.counters()["forward_runs"] == 2  # the first call says what cannot be
    x = rows(0)
    torch.testing.assert_close(ours(x), model(x))


def test_two_threads_share_a_script():
    ours = ORTModule(torch.jit.script(mlp()).eval())
    x = rows(0)
    want = ours.module(x)
    got: list[Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(ours(x).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for value in got:
        torch.testing.assert_close(value, want.detach())
