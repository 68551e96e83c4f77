"""The models that every benchmark trains, each with its batches.

A model takes its batch and returns the loss, so that a compiler sees the loss as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import small_models
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


class PreNormBlock(nn.Module):
    """The parts of a block with its norms before the sublayers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = feed_forward(width)


class DecoderBlock(PreNormBlock):
    """A causal block with its norms before the sublayers, as GPT-2 has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
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


class Encoder(nn.Module):
    """Blocks over tokens with padding and segments, in the manner of BERT."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.register_buffer("position_ids", torch.arange(length), persistent=False)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Return [batch, length, width] of int64 [batch, length]; token 0 is padding."""
        mask = (tokens != 0)[:, None, None, :]
        places = self.positions(self.position_ids[: tokens.shape[1]])
        hidden = self.tokens(tokens) + places + self.segments(segments)
        hidden = self.dropout(self.norm(hidden))
        for block in self.blocks:
            hidden = block(hidden, mask)
        return hidden


class Classifier(nn.Module):
    """A classifier of padded texts by their first token, as BERT is tuned on GLUE."""

    def __init__(self, encoder: Encoder, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(DROPOUT))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of texts, int64 [batch, length], against labels [batch]."""
        first = self.encoder(tokens, segments)[:, 0]
        return functional.cross_entropy(self.head(self.pooler(first)), labels)


class MaskedLanguageModel(nn.Module):
    """An encoder with padding, segment embeddings and a tied decoder, in the manner of BERT."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, width, heads, depth, length)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)
        # Embeddings start at the scale that suits the tied decoder.
        nn.init.normal_(self.encoder.tokens.weight, std=0.02)
        self.decoder.weight = self.encoder.tokens.weight

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        """Return the loss over labelled tokens; all three are int64 [batch, length].

        Token 0 is padding; a label of IGNORED asks for no prediction.
        """
        logits = self.decoder(self.head(self.encoder(tokens, segments)))
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


class ResidualBlock(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_first = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_second = nn.BatchNorm2d(outputs)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, inputs, H, W] to [batch, outputs, H / stride, W / stride]."""
        hidden = self.norm_first(self.first(images)).relu()
        return (self.norm_second(self.second(hidden)) + self.past(images)).relu()


class ResNet(nn.Module):
    """A classifier of 32x32 images, as deep as ResNet-18, with a small first convolution."""

    def __init__(self) -> None:
        super().__init__()
        stages = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        blocks = [
            block
            for inputs, outputs, stride in stages
            for block in (
                ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)
            )
        ]  # fmt: skip
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, 32, 32] against labels [batch]."""
        return functional.cross_entropy(self.layers(images), labels)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1 that narrow and widen, and what goes past them."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, inputs, H, W] to [batch, 4 * inner, H / stride, W / stride]."""
        return (self.layers(images) + self.past(images)).relu()


class ResNet50(nn.Module):
    """ResNet-50, for images of 224x224; `depths` are the blocks of its four stages."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        blocks, width = [], 64
        for stage, depth in enumerate(depths):
            inner = 64 << stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(width, inner, stride))
                width = 4 * inner
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, H, W] against labels [batch]."""
        return functional.cross_entropy(self.layers(images), labels)


class NormedBlock(nn.Module):
    """Two convolutions, each after a norm of groups of channels, with a way past them."""

    GROUPS = 8

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm_first = nn.GroupNorm(self.GROUPS, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm_second = nn.GroupNorm(self.GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.past = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, inputs, H, W] to [batch, outputs, H, W]."""
        hidden = self.first(functional.silu(self.norm_first(images)))
        return self.second(functional.silu(self.norm_second(hidden))) + self.past(images)


class UNet(nn.Module):
    """Maps images to images: down to smaller ones, and up again beside what was there before."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        narrow, wide = widths[:-1], widths[1:]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.first = NormedBlock(widths[0], widths[0])
        self.down = nn.ModuleList(NormedBlock(*pair) for pair in zip(narrow, wide, strict=True))
        self.up = nn.ModuleList(
            NormedBlock(above + below, above) for above, below in zip(narrow, wide, strict=True)
        )
        self.norm = nn.GroupNorm(NormedBlock.GROUPS, widths[0])
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, H, W] against targets of the same shape."""
        skips = [self.first(self.stem(images))]
        for block in self.down:
            skips.append(block(functional.avg_pool2d(skips[-1], 2)))
        hidden = skips.pop()
        for block, mode in zip(reversed(self.up), ("nearest", "bilinear"), strict=True):
            larger = functional.interpolate(hidden, scale_factor=2, mode=mode)
            hidden = block(torch.cat([larger, skips.pop()], 1))
        made = self.last(functional.silu(self.norm(hidden)))
        return functional.mse_loss(made, targets)


class VisionBlock(PreNormBlock):
    """A bidirectional block with its norms before the sublayers, as ViT has it."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden [batch, length, width] to the same shape."""
        hidden = hidden + self.attention(self.norm_attention(hidden), None, causal=False)
        return hidden + self.feed(self.norm_feed(hidden))


class VisionTransformer(nn.Module):
    """A classifier of square images by their patches, in the manner of ViT."""

    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, size, size] against labels [batch]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.positions
        hidden = self.norm(self.blocks(hidden))
        return functional.cross_entropy(self.head(hidden[:, 0]), labels)


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions, whose queries share keys and values."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.features = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.features, bias=False)
        self.value = nn.Linear(width, key_heads * self.features, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map hidden [batch, length, width]; cosine and sine are [length, features]."""
        batch, length, width = hidden.shape

        def heads_of(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.features).transpose(1, 2)

        query = rotate(heads_of(self.query(hidden)), cosine, sine)
        key = rotate(heads_of(self.key(hidden)), cosine, sine)
        mixed = functional.scaled_dot_product_attention(
            query, key, heads_of(self.value(hidden)), is_causal=True, enable_gqa=True
        )
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-right, left], -1) * sine


class LlamaBlock(nn.Module):
    """A causal block with RMS norms and a gated feed-forward, as Llama has it."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, key_heads)
        self.norm_feed = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map hidden [batch, length, width] to the same shape."""
        hidden = hidden + self.attention(self.norm_attention(hidden), cosine, sine)
        normal = self.norm_feed(hidden)
        return hidden + self.down(functional.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """A decoder-only language model in the manner of Llama."""

    def __init__(
        self, vocabulary: int, width: int, depth: int, length: int,
        heads: int = 8, key_heads: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        features = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, key_heads, inner=8 * width // 3) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        rates = 10000 ** (-torch.arange(0, features, 2) / features)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting targets from tokens, both int64 [batch, length]."""
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.cosine, self.sine)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recommender(nn.Module):
    """Predicts clicks from numbers and categories by pairwise products, in the manner of DLRM."""

    def __init__(self, numbers: int, table_rows: list[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in table_rows)
        # Rows of this size keep the products of pairs near the scale of the numbers.
        for table in self.tables:
            nn.init.normal_(table.weight, std=width**-0.5)
        self.bottom = nn.Sequential(
            nn.Linear(numbers, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        features = len(table_rows) + 1
        pairs = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)
        self.top = nn.Sequential(
            nn.Linear(width + pairs.shape[1], 256), nn.ReLU(),
            nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        """Return the loss of predicting clicks [batch].

        numbers is float [batch, numbers]; categories, int64 [batch, tables], name a row of each.
        """
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *looked_up], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat([dense, products[:, self.pairs]], 1))
        return functional.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


def make_mlp() -> Workload:
    return Workload(Mlp(), [(torch.randn(64, 512), torch.randint(10, (64,))) for _ in batches()])


def make_lm_d64() -> Workload:
    model = LanguageModel(1000, width=64, heads=4, depth=2, length=32)
    return Workload(model, text_batches(1000, 32, 4))


def make_lm_d256() -> Workload:
    model = LanguageModel(8000, width=256, heads=4, depth=4, length=128)
    return Workload(model, text_batches(8000, 128, 8))


def make_lm_128k() -> Workload:
    model = LanguageModel(128_000, width=256, heads=4, depth=2, length=128)
    return Workload(model, text_batches(128_000, 128, 16))


def make_cnn() -> Workload:
    return Workload(Cnn(), image_batches(32, 16))


def make_bert() -> Workload:
    model = MaskedLanguageModel(4000, width=256, heads=4, depth=4, length=64)
    return Workload(model, masked_batches(4000, 64, 8))


def masked_batches(vocabulary: int, length: int, batch: int) -> list[Batch]:
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

    return [masked_batch() for _ in batches()]


def padded_texts(vocabulary: int, length: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, segments and where padding is, [batch, length]; 27 to 35% are tokens."""
    tokens = torch.randint(1, vocabulary, (batch, length))
    # Most texts are short, and a few fill their row.
    ends = (4 + (length - 4) * torch.rand(batch, 1) ** 2.6).long()
    padding = torch.arange(length) >= ends
    tokens[padding] = 0
    return tokens, (torch.arange(length) >= ends // 2).long(), padding


def make_glue_like() -> Workload:
    vocabulary, length, width = 30522, 128, 256
    model = Classifier(Encoder(vocabulary, width, heads=4, depth=4, length=length), width, 2)

    def labelled_batch() -> Batch:
        tokens, segments, _ = padded_texts(vocabulary, length, 32)
        return tokens, segments, torch.randint(2, (32,))

    return Workload(model, [labelled_batch() for _ in batches()])


def make_mlm_like() -> Workload:
    vocabulary, length = 30522, 128
    model = MaskedLanguageModel(vocabulary, width=256, heads=4, depth=4, length=length)

    def masked_batch() -> Batch:
        tokens, segments, padding = padded_texts(vocabulary, length, 32)
        asked = (torch.rand(tokens.shape) < 0.15) & ~padding
        asked[:, 0] = True
        return tokens, segments, torch.where(asked, tokens, IGNORED)

    return Workload(model, [masked_batch() for _ in batches()])


def make_sft_like() -> Workload:
    vocabulary, length = 30522, 128
    model = LanguageModel(vocabulary, width=256, heads=4, depth=4, length=length)

    def answered_batch() -> Batch:
        tokens = torch.randint(1, vocabulary, (32, length))
        ends = torch.randint(length // 4, length, (32, 1))
        places = torch.arange(length)
        tokens[places >= ends] = 0
        # The last third of a text is the answer; each place is asked for the token behind it.
        is_asked = (places >= ends * 2 // 3) & (places < ends - 1)
        return tokens, torch.where(is_asked, tokens.roll(-1, 1), IGNORED)

    return Workload(model, [answered_batch() for _ in batches()])


def make_vit() -> Workload:
    model = VisionTransformer(size=64, patch=8, width=192, heads=3, depth=6)
    return Workload(model, image_batches(64, 16))


def make_resnet18() -> Workload:
    return Workload(ResNet(), image_batches(32, 16))


def make_unet() -> Workload:
    def noisy_batch() -> Batch:
        targets = torch.randn(8, 3, 64, 64)
        return targets + torch.randn(8, 3, 64, 64), targets

    return Workload(UNet((32, 64, 128)), [noisy_batch() for _ in batches()])


def make_llama() -> Workload:
    return Workload(Llama(4000, width=256, depth=4, length=128), text_batches(4000, 128, 4))


def make_recommender() -> Workload:
    # A few tables hold most of the rows, as in logs of clicks.
    table_rows = [4 + int(60_000 / (1 + place) ** 1.5) for place in range(26)]
    batch = 1024

    def clicks_batch() -> Batch:
        # Few rows of a table are asked for often, and most hardly ever.
        places = torch.rand(batch, len(table_rows)) ** 3 * torch.tensor(table_rows)
        return torch.randn(batch, 13), places.long(), torch.randint(2, (batch,)).float()

    model = Recommender(numbers=13, table_rows=table_rows, width=16)
    return Workload(model, [clicks_batch() for _ in batches()])


def make_tagger() -> Workload:
    vocabulary, tags, shape = 5000, 17, (32, 64)
    return Workload(
        small_models.Tagger(vocabulary, 128, tags),
        [(torch.randint(vocabulary, shape), torch.randint(tags, shape)) for _ in batches()],
    )


def make_mobilenet() -> Workload:
    return Workload(small_models.MobileNet(10), image_batches(64, 16))


def make_convnext() -> Workload:
    return Workload(small_models.ConvNeXt((32, 64, 128), 2, 10), image_batches(64, 16))


def make_unet3d() -> Workload:
    size = (2, 16, 32, 32)
    return Workload(
        small_models.VolumeUNet(16, 4),
        [(torch.randn(size).unsqueeze(1), torch.randint(4, size)) for _ in batches()],
    )


def make_gpt2() -> Workload:
    model = LanguageModel(50257, width=768, heads=12, depth=12, length=256)
    return Workload(model, text_batches(50257, 256, 2))


def gpt(width: int, heads: int, depth: int, batch: int) -> Callable[[], Workload]:
    def make() -> Workload:
        model = LanguageModel(50257, width, heads, depth, length=1024)
        return Workload(model, text_batches(50257, 1024, batch))

    return make


def make_bert_large() -> Workload:
    model = MaskedLanguageModel(30522, width=1024, heads=16, depth=24, length=512)
    return Workload(model, masked_batches(30522, 512, 16))


def make_llama_1b() -> Workload:
    model = Llama(32000, width=2048, depth=20, length=1024, heads=32, key_heads=8)
    return Workload(model, text_batches(32000, 1024, 4))


def make_vit_b() -> Workload:
    model = VisionTransformer(size=224, patch=16, width=768, heads=12, depth=12)
    return Workload(model, image_batches(224, 64))


def make_resnet50() -> Workload:
    return Workload(ResNet50(), image_batches(224, 64))


def make_deep_recompute() -> Workload:
    model = LanguageModel(1000, width=256, heads=4, depth=12, length=128)
    return Workload(model, text_batches(1000, 128, 8))


def text_batches(vocabulary: int, length: int, batch: int) -> list[Batch]:
    def next_token_batch() -> Batch:
        text = torch.randint(vocabulary, (batch, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return [next_token_batch() for _ in batches()]


def image_batches(size: int, batch: int) -> list[Batch]:
    return [
        (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))) for _ in batches()
    ]  # fmt: skip


def batches() -> range:
    return range(NUM_BATCHES)


MODELS: dict[str, Callable[[], Workload]] = {
    "mlp": make_mlp,
    "lm_d64": make_lm_d64,
    "lm_d256": make_lm_d256,
    "cnn": make_cnn,
    "bert": make_bert,
    "glue_like": make_glue_like,
    "mlm_like": make_mlm_like,
    "sft_like": make_sft_like,
    "vit": make_vit,
    "resnet18": make_resnet18,
    "unet": make_unet,
    "llama": make_llama,
    "recommender": make_recommender,
    "tagger": make_tagger,
    "mobilenet": make_mobilenet,
    "convnext": make_convnext,
    "unet3d": make_unet3d,
    "gpt2": make_gpt2,
    "lm_128k": make_lm_128k,
    "deep_recompute": make_deep_recompute,
    "gpt2_small": gpt(768, 12, 12, batch=8),
    "gpt2_small_1": gpt(768, 12, 12, batch=1),
    "gpt2_medium": gpt(1024, 16, 24, batch=4),
    "bert_large": make_bert_large,
    "llama_1b": make_llama_1b,
    "vit_b": make_vit_b,
    "resnet50": make_resnet50,
}
# Of the sizes that GPUs train.
FOR_GPUS = (
    "gpt2_small", "gpt2_small_1", "gpt2_medium", "bert_large", "llama_1b", "vit_b", "resnet50"
)  # fmt: skip
# A step of these takes long: they are measured when asked for.
LARGE = ("gpt2", "lm_128k", "deep_recompute", *FOR_GPUS)


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
