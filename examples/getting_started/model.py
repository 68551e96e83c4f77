"""A word-level transformer language model, in plain PyTorch."""

import math

import torch
from torch import Tensor, nn


class PositionalEncoding(nn.Module):
    """Add sines and cosines of the position, so that attention can tell word order."""

    def __init__(self, width: int, dropout: float, max_length: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_length).unsqueeze(1)
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(max_length, 1, width)
        table[:, 0, 0::2] = torch.sin(position * frequency)
        # An odd width has one sine more than cosines.
        table[:, 0, 1::2] = torch.cos(position * frequency)[:, : width // 2]
        self.register_buffer("table", table)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map float [length, batch, width] to the same shape."""
        return self.dropout(hidden + self.table[: hidden.size(0)])


class TransformerModel(nn.Module):
    """Predict, at each position, the next word from the words up to there."""

    def __init__(
        self,
        num_words: int,
        width: int = 200,
        num_heads: int = 2,
        hidden_width: int = 200,
        num_layers: int = 2,
        dropout: float = 0.2,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(num_words, width)
        self.positions = PositionalEncoding(width, dropout, max_length)
        layer = nn.TransformerEncoderLayer(width, num_heads, hidden_width, dropout)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, num_words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor) -> Tensor:
        """Map int64 [length, batch] to logits, float [length, batch, num_words]."""
        hidden = self.positions(self.embedding(words) * math.sqrt(self.width))
        mask = nn.Transformer.generate_square_subsequent_mask(len(words), device=words.device)
        # is_causal says what the mask holds; otherwise the encoder reads its data to find out.
        return self.decoder(self.encoder(hidden, mask, is_causal=True))
