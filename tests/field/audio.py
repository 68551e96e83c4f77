"""Sound and speech: spectra, masks, alignments."""

from __future__ import annotations

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


def spectrum(sound: torch.Tensor) -> torch.Tensor:
    return torch.stft(sound, 16, 4, window=torch.hann_window(16), return_complex=True)


@program(quick=True)
def recognition_with_spec_augment_and_ctc(wrap):
    model = Recognizer()
    compiled = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        log_probabilities = compiled(torch.randn(3, 80), torch.rand(3, 21) < 0.2)
        lengths = torch.full((3,), log_probabilities.shape[0])
        target = torch.randint(1, 6, (3, 4))
        loss = F.ctc_loss(log_probabilities, target, lengths, torch.tensor([4, 3, 2]))
        update(optimizer, loss)
        yield loss
    return model


class Recognizer(nn.Module):
    """Log-mel features; masked frames become a trained vector."""

    def __init__(self, mels: int = 6) -> None:
        super().__init__()
        self.register_buffer("mels", torch.rand(mels, 9))
        self.masked = nn.Parameter(torch.randn(mels))
        self.body = nn.Conv1d(mels, 12, 5, padding=2)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 6)

    def forward(self, sound: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        features = (self.mels @ spectrum(sound).abs().square()).clamp(min=1e-5).log().mT
        features = features.clone()
        features[mask] = self.masked
        hidden = F.gelu(self.norm(self.body(features.mT).mT))
        return self.head(hidden).log_softmax(-1).transpose(0, 1)


class CTCInside(nn.Module):
    """Computes the alignment loss inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        p = self.head(self.body(x).relu()).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        return F.ctc_loss(p, target, sizes, lengths, zero_infinity=True)


@program
def ctc_inside_of_forward(wrap):
    model = CTCInside()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = compiled(
            torch.randn(3, 10, 6), torch.randint(1, 5, (3, 4)), torch.randint(1, 5, (3,))
        )
        update(optimizer, loss)
        yield loss
    return model


class Denoiser(nn.Module):
    """Masks a spectrum, and goes back to sound by istft."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Sequential(nn.Conv1d(9, 12, 3, padding=1), nn.PReLU(), nn.Conv1d(12, 9, 1))

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        whole = spectrum(sound)
        masked = whole * self.mask(whole.abs().log1p()).sigmoid()
        return torch.istft(masked, 16, 4, window=torch.hann_window(16), length=sound.shape[-1])


@program(quick=True)
def denoising_by_istft(wrap):
    model = Denoiser()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        clean = torch.sin(torch.arange(64) * torch.rand(3, 1))
        loss = F.l1_loss(compiled(clean + 0.3 * torch.randn(3, 64)), clean)
        update(optimizer, loss)
        yield loss
    return model


class Vocoder(nn.Module):
    """A generator with weight norm, whose loss compares spectra of several resolutions."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.up = norm(nn.ConvTranspose1d(4, 6, 8, stride=4, padding=2))
        self.dilated = nn.ModuleList(
            norm(nn.Conv1d(6, 6, 3, dilation=d, padding=d)) for d in (1, 3)
        )
        self.out = norm(nn.Conv1d(6, 1, 7, padding=3))

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = self.up(mel)
        for layer in self.dilated:
            x = x + layer(F.leaky_relu(x, 0.1))
        return self.out(F.leaky_relu(x)).tanh().squeeze(1)


class Resolutions(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        loss = F.l1_loss(a, b)
        for size in (8, 16):
            window = torch.hann_window(size)
            x, y = (torch.stft(s, size, size // 4, window=window, return_complex=True).abs()
                    for s in (a, b))  # fmt: skip
            loss = loss + (x - y).norm() / y.norm()
            loss = loss + F.l1_loss((x + 1e-2).log(), (y + 1e-2).log())
        return loss


@program
def vocoder_with_spectral_losses(wrap):
    model = Vocoder()
    compiled, loss_of = wrap(model), wrap(Resolutions())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = loss_of(compiled(torch.randn(2, 4, 8)), torch.randn(2, 32))
        update(optimizer, loss)
        yield loss
    return model


class Separator(nn.Module):
    """Separates two speakers; which output is whose is chosen by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 8, 8, stride=4, bias=False)
        self.body = nn.Sequential(
            nn.GroupNorm(1, 8), nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8), nn.PReLU(),
            nn.Conv1d(8, 16, 1),
        )  # fmt: skip
        self.decoder = nn.ConvTranspose1d(8, 1, 8, stride=4, bias=False)

    def forward(self, mixed: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        x = self.encoder(mixed.unsqueeze(1))
        masks = self.body(x).unflatten(1, (2, 8)).relu()
        found = self.decoder((masks * x.unsqueeze(1)).flatten(0, 1)).view_as(parts)
        pairs = -self.ratio(found.unsqueeze(2), parts.unsqueeze(1))
        straight = pairs[:, 0, 0] + pairs[:, 1, 1]
        crossed = pairs[:, 0, 1] + pairs[:, 1, 0]
        return torch.minimum(straight, crossed).mean()

    @staticmethod
    def ratio(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        scale = (found * want).sum(-1, keepdim=True) / want.square().sum(-1, keepdim=True)
        target = scale * want
        noise = (found - target).square().sum(-1)
        return 10 * torch.log10((target.square().sum(-1) + 1e-6) / (noise + 1e-6))


@program
def separation_of_speakers(wrap):
    model = Separator()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        parts = torch.randn(2, 2, 48)
        loss = compiled(parts.sum(1), parts)
        update(optimizer, loss)
        yield loss
    return model


class Contrast(nn.Module):
    """Speech without labels: hidden frames are found among others, by Gumbel-chosen codes."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.context = nn.Conv1d(1, 8, 4, stride=2), nn.Linear(8, 6)
        self.choose, self.codes = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 6))
        self.hidden = nn.Parameter(torch.rand(8))
        self.temperature = 2.0

    def forward(self, sound: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        z = self.features(sound.unsqueeze(1)).mT
        hot = F.gumbel_softmax(self.choose(z), tau=self.temperature, hard=True)
        codes = hot @ self.codes
        c = self.context(torch.where(mask.unsqueeze(-1), self.hidden, z).cumsum(1))
        scores = F.cosine_similarity(c.unsqueeze(2), codes.unsqueeze(1), dim=-1) / 0.1
        places = torch.arange(z.shape[1]).expand(z.shape[0], -1)
        loss = F.cross_entropy(scores.mT, places, reduction="none")
        p = hot.mean((0, 1))
        diversity = (p * (p + 1e-7).log()).sum()
        return (loss * mask).sum() / mask.sum() + 0.1 * diversity


@program
def speech_without_labels(wrap):
    model = Contrast()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model.temperature = max(0.5, 2.0 * 0.8**step)
        loss = compiled(torch.randn(2, 22), torch.rand(2, 10) < 0.5)
        update(optimizer, loss)
        yield loss
    return model


class CTCModule(nn.Module):
    """A recurrent network with the alignment loss as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.recurrent = nn.Conv1d(4, 8, 3, padding=1), nn.LSTM(8, 6, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8, momentum=None), nn.Linear(6, 5)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y, _ = self.recurrent(self.norm(self.body(x)).relu().mT)
        p = self.head(y).log_softmax(-1).transpose(0, 1)
        return self.loss(p, target, torch.full((x.shape[0],), x.shape[2]), lengths)


@program
def ctc_as_a_module(wrap):
    model = CTCModule()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        target, lengths = torch.randint(1, 5, (3, 4)), torch.randint(1, 5, (3,))
        loss = compiled(torch.randn(3, 4, 10), target, lengths)
        update(optimizer, loss)
        yield loss
    return model
