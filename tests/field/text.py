"""Texts: language models, translation, tagging, embeddings, preferences."""

from __future__ import annotations

import copy
import math

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F

WORDS = 30


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by angles that depend on the position."""
    length, width = x.shape[-2:]
    speeds = 1.0 / 100 ** (torch.arange(0, width, 2) / width)
    angles = torch.arange(length).unsqueeze(-1) * speeds
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()],
                       -1).flatten(-2)  # fmt: skip


class GroupedAttention(nn.Module):
    """Causal attention in which two heads of queries share one of keys and values."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width * shared // heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.shared, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class GatedBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width)
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """A decoder whose head is its embedding, and which computes its own loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@program(quick=True)
def decoder_with_tied_weights(wrap):
    model = LanguageModel()
    compiled = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        ids = torch.randint(WORDS, (3, 8 + step % 3))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.1, -100)
        loss = compiled(ids, labels=labels)["loss"]
        update(optimizer, loss)
        yield loss
    return model


@program
def preferences(wrap):
    """DPO: a policy and a frozen copy of it see chosen and rejected texts."""
    policy = LanguageModel()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    ours, theirs = wrap(policy), wrap(reference)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)

    def log_probability(model, ids, mask):
        logits = model(ids)["logits"][:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (chosen * mask[:, 1:]).sum(-1)

    for _ in range(STEPS):
        ids = torch.randint(WORDS, (4, 8))
        mask = (torch.arange(8) < torch.randint(4, 9, (4, 1))).float()
        with torch.no_grad():
            base = log_probability(theirs, ids, mask)
        margins = (log_probability(ours, ids, mask) - base).view(2, 2)
        loss = -F.logsigmoid(0.5 * (margins[:, 0] - margins[:, 1])).mean()
        update(optimizer, loss)
        yield loss
    return policy


class MaskedModel(nn.Module):
    """BERT's pretraining: forward hides a part of the words by boolean assignment."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(12, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        hidden = (torch.rand(ids.shape) < 0.3) & ~padding
        labels = ids.clone()
        labels[~hidden] = -100
        inputs = ids.clone()
        inputs[hidden] = WORDS - 1
        x = self.words(inputs) + self.positions(torch.arange(ids.shape[1]))
        x = self.encoder(x, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@program
def masked_language_model(wrap):
    model = MaskedModel()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        ids = torch.randint(WORDS - 1, (4, 12))
        padding = torch.arange(12) >= torch.randint(6, 13, (4, 1))
        loss = compiled(ids, padding)
        update(optimizer, loss)
        yield loss
    return model


class HeadOnMaskedRows(nn.Module):
    """Computes logits for the hidden words alone, as a masked read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids.masked_fill(hidden, 0))
        x = self.mix(x.mT).mT.tanh()
        return F.cross_entropy(self.head(x[hidden]), ids[hidden])


@program
def head_on_masked_rows(wrap):
    model = HeadOnMaskedRows()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = compiled(torch.randint(WORDS, (4, 9)), torch.rand(4, 9) < 0.4)
        update(optimizer, loss)
        yield loss
    return model


class Translator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(
            self.source(source) * math.sqrt(16), self.target(target), tgt_mask=causal,
            src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(x)


@program
def translation(wrap):
    model = Translator()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        source, target = torch.randint(WORDS, (3, 7)), torch.randint(WORDS, (3, 6))
        padding = torch.where(torch.arange(7) >= torch.randint(3, 8, (3, 1)), -math.inf, 0.0)
        logits = compiled(source, target[:, :-1], padding)
        loss = F.cross_entropy(logits.mT, target[:, 1:], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        yield loss
    return model


class SentenceClassifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.recurrent = kind(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(ids))
        weights = (ids != 0).float().unsqueeze(-1)
        return self.head((states * weights).sum(1) / weights.sum(1).clamp(min=1))


def train_sentences(wrap, kind):
    model = SentenceClassifier(kind)
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randint(WORDS, (4, 6))), torch.randint(3, (4,)))
        update(optimizer, loss)
        yield loss
    return model


@program
def sentences_by_lstm(wrap):
    return (yield from train_sentences(wrap, nn.LSTM))


@program
def sentences_by_gru(wrap):
    return (yield from train_sentences(wrap, nn.GRU))


class Decoder(nn.Module):
    """Decodes word by word; at random it reads its own word in place of the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(WORDS, 8), nn.GRUCell(8, 12)
        self.head = nn.Linear(12, WORDS)
        self.forced = 1.0

    def forward(self, state: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        word, losses = target[:, 0], []
        for i in range(1, target.shape[1]):
            state = self.cell(self.embedding(word), state)
            logits = self.head(state)
            losses.append(F.cross_entropy(logits, target[:, i]))
            is_forced = torch.rand(target.shape[0]) < self.forced
            word = torch.where(is_forced, target[:, i], logits.argmax(-1))
        return torch.stack(losses).mean()


@program
def teacher_forcing_that_decays(wrap):
    model = Decoder()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        model.forced = 0.9**step
        loss = compiled(torch.randn(4, 12), torch.randint(WORDS, (4, 5)))
        update(optimizer, loss)
        yield loss
    return model


class Experts(nn.Module):
    """Sends each word to the best two of four experts, with a loss that balances them."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.flatten(0, -2)
        p = self.gate(flat).softmax(-1)
        weights, chosen = p.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == i)
            y = y.index_add(0, rows, expert(flat[rows]) * weights[rows, rank, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return y.view_as(x), (share * p.mean(0)).sum() * len(self.experts)


@program
def mixture_of_experts(wrap):
    model = Experts()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(2, 6, 8)
        y, balance = compiled(x)
        loss = F.mse_loss(y, x.roll(1, 1)) + 0.01 * balance
        update(optimizer, loss)
        yield loss, balance
    return model


class Words(nn.Module):
    """Word vectors with negative samples; only the rows that are read get gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.inner = nn.Embedding(WORDS, 8, sparse=sparse)
        self.outer = nn.Embedding(WORDS, 8, sparse=sparse)

    def forward(self, word: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        x = self.inner(word)
        good = (x * self.outer(near)).sum(-1)
        bad = torch.einsum("bd,bnd->bn", x, self.outer(far))
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(-1)).mean()


@program
def word_vectors_with_sparse_gradients(wrap):
    model = Words(sparse=True)
    compiled = wrap(model)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = compiled(*(torch.randint(WORDS, s) for s in ((6,), (6,), (6, 3))))
        update(optimizer, loss)
        yield loss
    for parameter in model.parameters():
        parameter.grad = parameter.grad.to_dense()
    return model


class Prompted(nn.Module):
    """A frozen model before which trained vectors stand, with slopes by distance (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 16) * 0.1)
        self.embedding = nn.Embedding(WORDS, 16).requires_grad_(False)
        self.qkv = nn.Linear(16, 48).requires_grad_(False)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 3.0), persistent=False)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.prompt.expand(ids.shape[0], -1, -1), self.embedding(ids)], 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        distances = (places.unsqueeze(-1) - places).abs()
        bias = -self.slopes.view(2, 1, 1) * distances
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


@program
def prompt_tuning_with_slopes(wrap):
    model = Prompted()
    compiled = wrap(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        logits = compiled(torch.randint(WORDS, (4, 5 + step % 2)))
        loss = F.cross_entropy(logits, torch.randint(3, (4,)))
        update(optimizer, loss)
        yield loss
    return model


class Tagger(nn.Module):
    """A chain of tags (CRF): the sum over all paths is a loop over the positions."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, tags))
        self.moves = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        scores = self.scores(ids)
        right = scores.gather(-1, tags.unsqueeze(-1)).sum((1, 2))
        right = right + self.moves[tags[:, :-1], tags[:, 1:]].sum(-1)
        paths = scores[:, 0]
        for i in range(1, ids.shape[1]):
            paths = torch.logsumexp(paths.unsqueeze(-1) + self.moves, 1) + scores[:, i]
        return (paths.logsumexp(-1) - right).mean()


@program
def tags_in_a_chain(wrap):
    model = Tagger()
    compiled = wrap(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = compiled(torch.randint(WORDS, (3, 6)), torch.randint(4, (3, 6)))
        update(optimizer, loss)
        yield loss
    return model


class StateSpace(nn.Module):
    """A linear recurrence with complex poles, computed as a convolution by FFT."""

    def __init__(self, states: int = 4, width: int = 3) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.rand(width, states).log())
        self.turn = nn.Parameter(torch.rand(width, states) * 3)
        self.out = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        poles = torch.complex(-self.log_decay.exp(), self.turn)
        powers = torch.exp(poles.unsqueeze(-1) * torch.arange(length))
        kernel = torch.einsum("ws,wsl->wl", self.out, powers).real
        y = torch.fft.rfft(x, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        return torch.fft.irfft(y, 2 * length)[..., :length]


@program
def state_space_with_complex_poles(wrap):
    model = StateSpace()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x = torch.randn(2, 3, 16)
        loss = F.mse_loss(compiled(x), x.roll(1, -1))
        update(optimizer, loss)
        yield loss
    return model


class CarriedModel(nn.Module):
    """A recurrent language model, to which the loop gives the states of the last piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(WORDS, 8), nn.LSTM(8, 12, num_layers=2)
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids: torch.Tensor, states: tuple | None = None) -> tuple:
        y, states = self.recurrent(self.embedding(ids), states)
        return self.head(y), states


@program
def states_carried_between_pieces(wrap):
    model = CarriedModel()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text, states = torch.randint(WORDS, (4 * STEPS + 1, 3)), None
    for step in range(STEPS):
        piece = text[4 * step : 4 * step + 5]
        if states is not None:
            states = tuple(state.detach() for state in states)
        logits, states = compiled(piece[:-1], states)
        loss = F.cross_entropy(logits.flatten(0, 1), piece[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        yield loss
    return model


class PackedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(WORDS, 8), nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.recurrent(packed)
        return self.head(last[-1])


@program
def packed_sequences(wrap):
    model = PackedModel()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(STEPS):
        logits = compiled(torch.randint(WORDS, (4, 6)), torch.randint(1, 7, (4,)))
        loss = F.cross_entropy(logits, torch.randint(3, (4,)))
        update(optimizer, loss)
        yield loss
    return model


class Sentences(nn.Module):
    """Vectors of bounded length, for triplets with the hardest negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, max_norm=1.0)
        self.head = nn.Linear(8, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(self.embedding(ids).mean(1)), dim=-1)


@program
def triplets_with_bounded_vectors(wrap):
    model = Sentences()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(6) // 2
    for _ in range(STEPS):
        z = compiled(torch.randint(WORDS, (6, 4)))
        distances = torch.cdist(z, z)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        far = distances.masked_fill(~same, -1).amax(1)
        near = distances.masked_fill(same, 1e4).amin(1)
        loss = F.relu(far - near + 0.5).mean()
        update(optimizer, loss)
        yield loss
    return model
