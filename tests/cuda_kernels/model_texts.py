# The texts of kernels that whole models ask for: of true width and vocabulary, since these decide
# what a kernel looks like, but with few layers and tokens.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort

DTYPES = (torch.float32, torch.bfloat16)
Step = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model and its loss.

    `narrow` is how many operands of its kernels may be taken by fewer than 16 bytes, and `because`
    says why they do not lie so that there could be more.
    """

    make: Callable[[], tuple[nn.Module, Step]]
    narrow: int
    because: str


def texts_of(model: Model, dtype: torch.dtype, folder: Path) -> dict[str, str]:
    """Train one step, and give the texts of its kernels by name."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, step = model.make()
    options = {"dump": "cuda", "dump_dir": str(folder), "exact_random": False}
    compiled = torch.compile(module.cuda(), backend="ort", options=options)
    before = torch_ort.counters()["fallbacks"]
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        loss = step(compiled)
    loss.backward()
    torch.cuda.synchronize()
    assert torch_ort.counters()["fallbacks"] == before
    return {path.stem: path.read_text() for path in folder.glob("*.cu")}


def tokens(words: int) -> torch.Tensor:
    return torch.randint(words, (2, 32), device="cuda")


def gpt2() -> tuple[nn.Module, Step]:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_positions=64))
    ids = tokens(50257)
    return model, lambda call: call(input_ids=ids, labels=ids).loss


def bert() -> tuple[nn.Module, Step]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(num_hidden_layers=1, max_position_embeddings=64)
    ids = tokens(config.vocab_size)
    mask = torch.ones_like(ids)
    model = transformers.BertForMaskedLM(config)
    return model, lambda call: call(input_ids=ids, attention_mask=mask, labels=ids).loss


def llama() -> tuple[nn.Module, Step]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=2048, intermediate_size=5632, vocab_size=32000,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    ids = tokens(config.vocab_size)
    model = transformers.LlamaForCausalLM(config)
    return model, lambda call: call(input_ids=ids, labels=ids, use_cache=False).loss


class Gated(nn.Module):
    """A layer of Llama without its attention, with the norms of torch.nn."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def gated() -> tuple[nn.Module, Step]:
    width, words = 2048, 32000
    model = nn.Sequential(
        nn.Embedding(words, width), Gated(width, 5632), Gated(width, 5632), nn.RMSNorm(width),
        nn.Linear(width, words, bias=False),
    )  # fmt: skip
    ids = tokens(words)
    return model, lambda call: F.cross_entropy(call(ids).flatten(0, 1), ids.flatten())


def vit() -> tuple[nn.Module, Step]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_dropout_prob=0.1, num_labels=1000, image_size=96
    )
    images, labels = torch.randn(2, 3, 96, 96).cuda(), torch.tensor([3, 999]).cuda()
    model = transformers.ViTForImageClassification(config)
    return model, lambda call: call(pixel_values=images, labels=labels).loss


class Bottleneck(nn.Module):
    def __init__(self, channels: int, results: int, stride: int = 1) -> None:
        super().__init__()
        width = results // 4
        sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, results, 1, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, size, step, size // 2, bias=False) for a, b, size, step in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.shortcut = nn.Identity()
        if channels != results:
            shortcut = nn.Conv2d(channels, results, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(results))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            y = norm(conv(y)).relu()
        return (self.norms[-1](self.convs[-1](y)) + self.shortcut(x)).relu()


def resnet() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Bottleneck(64, 256), Bottleneck(256, 256), Bottleneck(256, 512, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    )  # fmt: skip
    images, labels = torch.randn(2, 3, 64, 64).cuda(), torch.tensor([3, 999]).cuda()
    return model, lambda call: F.cross_entropy(call(images), labels)


class Recommender(nn.Module):
    """Embeddings of what is named, features of what is measured, and their products by pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1000, 64), nn.Embedding(500, 64)
        self.measured = nn.Sequential(
            nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64)
        )
        self.top = nn.Sequential(
            nn.Linear(4 * 64 + 6, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, measured, user, item, seen) -> torch.Tensor:
        known = [self.users(user), self.items(item), self.items(seen).sum(1)]
        parts = torch.stack([self.measured(measured), *known], 1)
        rows, columns = torch.tril_indices(4, 4, -1, device=measured.device)
        pairs = torch.bmm(parts, parts.mT)[:, rows, columns]
        return self.top(torch.cat([parts.flatten(1), pairs], 1)).squeeze(1)


def recommender() -> tuple[nn.Module, Step]:
    count = 128
    given = [torch.randn(count, 13).cuda(), torch.randint(1000, (count,)).cuda()]
    given += [torch.randint(500, (count,)).cuda(), torch.randint(500, (count, 5)).cuda()]
    wanted = torch.rand(count).cuda()
    return Recommender(), lambda call: F.binary_cross_entropy_with_logits(call(*given), wanted)


MODELS = {
    # 50,257 and 30,522 classes are no whole vectors, which is no reason.
    "gpt2": Model(gpt2, 0, ""),
    "bert": Model(bert, 0, ""),
    "llama": Model(llama, 4, "halves of heads are read by a place that is stretched"),
    "gated": Model(gated, 0, ""),
    "vit": Model(vit, 0, ""),
    "resnet": Model(resnet, 8, "numbers of an image and channel are spread over its pixels"),
    "recommender": Model(recommender, 4, "rows of 262 columns, and of 13"),
}
