"""Small models of many kinds, each with an input, and the dims of it that have names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 8, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        h = self.first(x)
        return self.head(F.relu(h + self.inner(h)).mean((2, 3)))


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 12, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12)
        self.squeeze, self.excite = nn.Linear(12, 3), nn.Linear(3, 12)
        self.project = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        h = F.hardswish(self.depthwise(F.relu6(self.expand(x))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3))))))
        return self.project(h * gate[:, :, None, None])


class Next(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class UNet(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2) if transposed else None
        self.last = nn.Conv2d(14, 2, 3, padding=1)

    def forward(self, x):
        skip = F.silu(self.first(x))
        h = F.silu(self.second(F.max_pool2d(skip, 2)))
        if self.up is not None:
            h = self.up(h)
        else:
            h = F.interpolate(h, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(torch.cat([skip, h], 1))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.elu(self.norm(self.conv(x))).amax((2, 3, 4)))


class Recurrent(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.layer = layer(8, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 4)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids))[0])


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        h = F.leaky_relu(self.norm(self.conv(x)), 0.1).transpose(1, 2)
        return self.head(self.layer(h)[0]).log_softmax(-1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.inner(self.embed(ids))[:, 0])


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.into = nn.Embedding(30, 16), nn.Linear(16, 48)
        self.out, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, ids):
        h = self.embed(ids)
        heads = (*h.shape[:2], 2, 8)
        query, key, value = (
            each.reshape(heads).transpose(1, 2) for each in self.into(self.norm(h)).chunk(3, -1)
        )
        h = h + self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return h @ self.embed.weight.t()


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids):
        rows = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        products = rows @ rows.transpose(1, 2)
        pairs = torch.stack([products[:, 0, 1], products[:, 0, 2], products[:, 1, 2]], 1)
        return torch.sigmoid(self.top(torch.cat([rows.flatten(1), pairs], 1)))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.over_patches = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.over_channels = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
        self.first, self.second, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.over_patches(self.first(h).transpose(1, 2)).transpose(1, 2)
        return self.head((h + self.over_channels(self.second(h))).mean(1))


class Sharper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.slope = nn.PReLU(8)

    def forward(self, x):
        return F.pixel_shuffle(self.last(self.slope(self.norm(self.first(x)))), 2)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(12, 6), nn.Softplus(), nn.Linear(6, 2), nn.Tanh())
        self.up = nn.Sequential(nn.Linear(2, 6), nn.SELU(), nn.Linear(6, 12), nn.Sigmoid())

    def forward(self, x):
        return self.up(self.down(x)).clamp(0.01, 0.99)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 6, 6) / 3)
        self.gate = nn.Linear(6, 3)

    def forward(self, x):
        outputs = torch.einsum("bi,eio->beo", x, self.experts)
        return (outputs * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1).cumsum(-1)


def ids(length: int = 6) -> torch.Tensor:
    return torch.randint(0, 30, (3, length))


TEXT = {0: "batch", 1: "length"}
ROWS = {0: "batch"}

Case = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[int, str]]

# The model, an input, the dims of it that have names.
MODELS: dict[str, Case] = {
    "autoencoder": (Autoencoder, lambda: torch.randn(4, 12), ROWS),
    "causal": (Causal, ids, TEXT),
    "digits": (digits, lambda: torch.randn(2, 1, 16, 16), ROWS),
    "encoder": (Encoder, ids, ROWS),
    "experts": (Gated, lambda: torch.randn(4, 6), ROWS),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), ids, ROWS),
    "lstm": (lambda: Recurrent(nn.LSTM), ids, TEXT),
    "mixer": (Mixer, lambda: torch.randn(2, 3, 8, 8), ROWS),
    "next": (Next, lambda: torch.randn(2, 6, 8, 8), ROWS),
    "recommender": (Recommender, lambda: torch.randint(0, 20, (5, 3)), ROWS),
    "residual": (Residual, lambda: torch.randn(2, 3, 8, 8), ROWS),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), ids, ROWS),
    "separable": (Separable, lambda: torch.randn(2, 3, 9, 9), ROWS),
    "sharper": (Sharper, lambda: torch.randn(2, 1, 6, 6), {0: "batch", 2: "high", 3: "wide"}),
    "speech": (Speech, lambda: torch.randn(2, 4, 16), ROWS),
    "unet": (lambda: UNet(False), lambda: torch.randn(2, 2, 8, 8), ROWS),
    "unet_transposed": (lambda: UNet(True), lambda: torch.randn(2, 2, 8, 8), ROWS),
    "volume": (Volume, lambda: torch.randn(2, 2, 4, 4, 4), ROWS),
}


def library_models() -> dict[str, Case]:
    """Give models of transformers from tiny configurations."""
    import transformers as hf

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 32}  # fmt: skip

    def made(kind: str, config: Any) -> Callable[[], nn.Module]:
        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = getattr(hf, kind)(config)

            def forward(self, x):
                return self.model(x, return_dict=True).logits

        return Logits

    return {
        "bert": (made("BertForTokenClassification", hf.BertConfig(
            vocab_size=30, **small)), ids, ROWS),
        "distilbert": (made("DistilBertForSequenceClassification", hf.DistilBertConfig(
            vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=32)), ids, ROWS),
        "gpt2": (made("GPT2LMHeadModel", hf.GPT2Config(
            vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)), ids,
            ROWS),
        "llama": (made("LlamaForCausalLM", hf.LlamaConfig(
            vocab_size=30, num_key_value_heads=1, use_cache=False, **small)), ids, ROWS),
        "resnet": (made("ResNetForImageClassification", hf.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3)),
            lambda: torch.randn(2, 3, 16, 16), ROWS),
        "vit": (made("ViTForImageClassification", hf.ViTConfig(
            image_size=8, patch_size=4, num_labels=3, **small)), lambda: torch.randn(2, 3, 8, 8),
            ROWS),
        "wav2vec": (made("Wav2Vec2ForCTC", hf.Wav2Vec2Config(
            vocab_size=12, conv_dim=(4, 4), conv_stride=(4, 2), conv_kernel=(8, 4),
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, do_stable_layer_norm=False,
            num_feat_extract_layers=2, **small)), lambda: torch.randn(2, 128), ROWS),
    }  # fmt: skip
