"""The models that every benchmark trains, each with its batches.

A model takes its batch and returns the loss, so that a compiler sees the loss as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

DROPOUT = 0.1
IGNORED = -100
# More than one batch, so that training does not sink into one batch and its vanishing gradients.
NUM_BATCHES = 4

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model and the batches it is trained on, in turn."""

    model: nn.Module
    batches: list[Batch]


class Mlp(nn.Module):
    """A classifier of vectors: 512-1024-1024-10."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, 1024),
            nn.GELU(),
            nn.LayerNorm(1024),
            nn.Linear(1024, 1024),
            nn.SiLU(),
            nn.Linear(1024, 10),
        )

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of vectors [batch, 512] against labels [batch]."""
        return functional.cross_entropy(self.layers(vectors), labels)


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Return [batch, length, width]; mask broadcasts to [batch, heads, length, length]."""
        batch, length, width = hidden.shape
        packed = self.project_in(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal
        )
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class DecoderBlock(nn.Module):
    """A causal block with its norms before the sublayers, as GPT-2 has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = feed_forward(width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden [batch, length, width] to the same shape."""
        attended = self.attention(self.norm_attention(hidden), None, causal=True)
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.feed(self.norm_feed(hidden)))


class LanguageModel(nn.Module):
    """A decoder-only language model."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting targets from tokens, both int64 [batch, length]."""
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EncoderBlock(nn.Module):
    """A bidirectional block with its norms after the sublayers, as BERT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_attention = nn.LayerNorm(width)
        self.feed = feed_forward(width)
        self.norm_feed = nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Map hidden [batch, length, width] to the same shape; mask is true where a key counts."""
        attended = self.attention(hidden, mask, causal=False)
        hidden = self.norm_attention(hidden + self.dropout(attended))
        return self.norm_feed(hidden + self.dropout(self.feed(hidden)))


class MaskedLanguageModel(nn.Module):
    """An encoder with padding, segment embeddings and a tied decoder, in the manner of BERT."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)
        # Embeddings start at the scale that suits the tied decoder.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.decoder.weight = self.tokens.weight
        self.register_buffer("position_ids", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        """Return the loss over labelled tokens; all three are int64 [batch, length].

        Token 0 is padding; a label of IGNORED asks for no prediction.
        """
        mask = (tokens != 0)[:, None, None, :]
        places = self.positions(self.position_ids[: tokens.shape[1]])
        hidden = self.tokens(tokens) + places + self.segments(segments)
        hidden = self.dropout(self.norm(hidden))
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits = self.decoder(self.head(hidden))
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


class Cnn(nn.Module):
    """A classifier of 32x32 images: five convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in (
            (3, 32, 1),
            (32, 64, 2),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
        ):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, 32, 32] against labels [batch]."""
        return functional.cross_entropy(self.layers(images), labels)


def make_mlp() -> Workload:
    return Workload(Mlp(), [(torch.randn(64, 512), torch.randint(10, (64,))) for _ in batches()])


def make_lm_d64() -> Workload:
    return language_workload(vocabulary=1000, width=64, depth=2, length=32, batch=4)


def make_lm_d256() -> Workload:
    return language_workload(vocabulary=8000, width=256, depth=4, length=128, batch=8)


def make_cnn() -> Workload:
    return Workload(
        Cnn(), [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in batches()]
    )


def make_bert() -> Workload:
    vocabulary, length, batch = 4000, 64, 8
    model = MaskedLanguageModel(vocabulary, width=256, heads=4, depth=4, length=length)

    def masked_batch() -> Batch:
        tokens = torch.randint(1, vocabulary, (batch, length))
        ends = torch.randint(length // 2, length + 1, (batch, 1))
        padding = torch.arange(length) >= ends
        tokens[padding] = 0
        segments = (torch.arange(length) >= ends // 2).long()
        # BERT asks for 15% of the tokens; the first one is always asked for, so none is empty.
        asked = torch.rand(batch, length) < 0.15
        asked[:, 0] = True
        labels = torch.where(asked & ~padding, tokens, IGNORED)
        return tokens, segments, labels

    return Workload(model, [masked_batch() for _ in batches()])


def language_workload(
    *, vocabulary: int, width: int, depth: int, length: int, batch: int
) -> Workload:
    def next_token_batch() -> Batch:
        text = torch.randint(vocabulary, (batch, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    model = LanguageModel(vocabulary, width, heads=4, depth=depth, length=length)
    return Workload(model, [next_token_batch() for _ in batches()])


def batches() -> range:
    return range(NUM_BATCHES)


MODELS: dict[str, Callable[[], Workload]] = {
    "mlp": make_mlp,
    "lm_d64": make_lm_d64,
    "lm_d256": make_lm_d256,
    "cnn": make_cnn,
    "bert": make_bert,
}


def build(name: str, device: str, seed: int = 0) -> Workload:
    """Build a workload in training mode on a device; equal seeds give equal numbers.

    Raises KeyError if there is no such model.
    """
    torch.manual_seed(seed)
    workload = MODELS[name]()
    # Made on the CPU and then moved, so that every device starts from the same numbers.
    model = workload.model.to(device).train()
    moved = [tuple(tensor.to(device) for tensor in batch) for batch in workload.batches]
    return Workload(model, moved)
