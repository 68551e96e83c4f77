"""Images: classification, segmentation, contrastive learning, adversaries, autoencoders."""

from __future__ import annotations

import copy

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A residual block that is left out at random in training (stochastic depth)."""

    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        if self.training:
            keep = torch.rand(x.shape[0], 1, 1, 1) >= self.drop
            y = y * keep / (1 - self.drop)
        return F.relu(x + y)


@program
def residual_network_with_mixup(wrap):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8, 0.1), nn.MaxPool2d(2), Residual(8, 0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    mixing = torch.distributions.Beta(0.4, 0.4)
    for _ in range(STEPS):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
        share, order = mixing.sample(), torch.randperm(4)
        logits = compiled(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
        update(optimizer, loss)
        yield loss
    return model


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.leaky_relu(self.down(x), 0.1)
        deep = F.leaky_relu(self.norm(self.middle(F.max_pool2d(wide, 2))), 0.1)
        return self.out(torch.cat([wide, self.up(deep)], 1))


@program
def segmentation_with_dice(wrap):
    model = UNet()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(2, 1, 8, 8)
        target = (x > 0.5).float()
        logits = compiled(x)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * target).sum((1, 2, 3)) + 1) / ((p + target).sum((1, 2, 3)) + 1)
        loss = F.binary_cross_entropy_with_logits(logits, target) + dice.mean()
        update(optimizer, loss)
        yield loss
    return model


class Patches(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 2, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


@program
def vision_transformer(wrap):
    model = Patches()
    compiled = wrap(model)
    # Not Adam: the gradient of the keys' bias is 0 but for rounding, which Adam makes a full step.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randn(4, 3, 8, 8)), torch.randint(5, (4,)))
        update(optimizer, loss)
        yield loss
    return model


class Encoder(nn.Module):
    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 32), nn.ReLU()
        )
        self.projection = nn.Linear(32, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.projection(self.body(x)), dim=-1)


@program
def contrastive_pairs(wrap):
    """SimCLR: each image has to find its other view."""
    model = Encoder()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        images = torch.randn(4, 3, 8, 8)
        views = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
        z = compiled(torch.cat(views))
        scores = z @ z.T / 0.2
        scores = scores.masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
        loss = F.cross_entropy(scores, torch.arange(8).roll(4))
        update(optimizer, loss)
        yield loss
    return model


class Momentum(nn.Module):
    """MoCo: keys of a slow encoder wait in a queue, which forward replaces piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=-1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        q = self.query(first)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = self.key(second)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.1
        places = (self.place + torch.arange(k.shape[0])) % self.queue.shape[0]
        self.queue[places] = k
        self.place.add_(k.shape[0]).remainder_(self.queue.shape[0])
        return F.cross_entropy(logits, torch.zeros(k.shape[0], dtype=torch.long))


@program
def momentum_contrast_with_a_queue(wrap):
    model = Momentum()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    for _ in range(STEPS):
        images = torch.randn(4, 3, 8, 8)
        loss = compiled(images, images + 0.1 * torch.randn_like(images))
        update(optimizer, loss)
        yield loss
    return model


@program
def contrast_of_images_and_texts(wrap):
    """CLIP with a learned temperature that is clamped after each step."""
    images, texts = wrap(image := Encoder()), wrap(text := nn.EmbeddingBag(20, 8))
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([*image.parameters(), *text.parameters(), scale], lr=1e-2)
    for _ in range(STEPS):
        a = images(torch.randn(4, 3, 8, 8))
        b = F.normalize(texts(torch.randint(20, (4, 5))), dim=-1)
        scores = scale.exp() * a @ b.T
        target = torch.arange(4)
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
        update(optimizer, loss)
        with torch.no_grad():
            scale.clamp_(max=4.6)
        yield loss
    return image, text, scale


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 32), nn.Unflatten(1, (8, 2, 2)), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


@program
def adversaries(wrap):
    """A GAN whose losses run through both networks, with spectral norm in the discriminator."""
    generator = Generator()
    discriminator = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 8, 3, padding=1)),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1),
    )  # fmt: skip
    make, judge = wrap(generator), wrap(discriminator)
    of_g = torch.optim.SGD(generator.parameters(), lr=0.02)
    of_d = torch.optim.SGD(discriminator.parameters(), lr=0.02)
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    for _ in range(STEPS):
        real = torch.rand(4, 1, 4, 4)
        fake = make(torch.randn(4, 6))
        loss_d = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        update(of_d, loss_d)
        loss_g = F.binary_cross_entropy_with_logits(judge(fake), ones)
        update(of_g, loss_g)
        yield loss_d, loss_g
    return generator, discriminator


@program
def adversaries_with_a_gradient_penalty(wrap):
    """WGAN-GP: the penalty differentiates a gradient."""
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    judge = wrap(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    for _ in range(STEPS):
        real, fake = torch.randn(4, 8) + 1, torch.randn(4, 8)
        mixed = torch.lerp(real, fake, torch.rand(4, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = judge(fake).mean() - judge(real).mean() + 10 * penalty
        update(optimizer, loss)
        yield loss, penalty
    return critic


class VAE(nn.Module):
    """A variational autoencoder whose weight of the KL term is a number that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.beta = 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        restored = self.decoder(z)
        likelihood = F.binary_cross_entropy_with_logits(restored, x.flatten(1), reduction="sum")
        return likelihood / x.shape[0] + self.beta * kl, kl


@program(quick=True)
def vae_with_an_annealed_weight(wrap):
    model = VAE()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        model.beta = min(1.0, step / 6)
        loss, kl = compiled(torch.rand(4, 1, 4, 4))
        update(optimizer, loss)
        yield loss, kl
    return model


class Codebook(nn.Module):
    """Quantizes to the nearest code; codes follow a moving average of what they stand for."""

    def __init__(self, codes: int = 8, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nearest = torch.cdist(z, self.codes).argmin(-1)
        chosen = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, self.codes.shape[0]).to(z.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp_min(1e-5).unsqueeze(-1))
        commitment = F.mse_loss(z, chosen.detach())
        return z + (chosen - z).detach(), commitment


class VectorQuantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(8, 4), Codebook(), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code, commitment = self.codebook(self.encoder(x))
        return F.mse_loss(self.decoder(code), x) + 0.25 * commitment


@program
def vector_quantization_with_moving_averages(wrap):
    model = VectorQuantized()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = compiled(torch.randn(6, 8))
        update(optimizer, loss)
        yield loss
    return model


class Detector(nn.Module):
    """Boxes and classes at each place; the loss reads the places that hold an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU())
        self.classes, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, boxes: torch.Tensor) -> dict:
        features = self.body(x)
        logits = self.classes(features).permute(0, 2, 3, 1)
        found = self.boxes(features).permute(0, 2, 3, 1).exp()
        has_object = labels > 0
        focal = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        focal = ((1 - torch.exp(-focal)) ** 2 * focal).mean()
        distance = F.smooth_l1_loss(found[has_object], boxes[has_object], reduction="sum")
        return {"focal": focal, "boxes": distance / has_object.sum().clamp(min=1)}


@program
def detection_with_masked_reads(wrap):
    model = Detector()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        labels = torch.randint(3, (2, 4, 4))
        losses = compiled(torch.randn(2, 3, 4, 4), labels, torch.rand(2, 4, 4, 4))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        yield losses.values()
    return model


@program
def style_transfer(wrap):
    """Trains an image, not a network: a frozen network's Gram matrices are the loss."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    compiled = wrap(network.requires_grad_(False).eval())

    def gram(x):
        flat = x.flatten(2)
        return flat @ flat.mT / flat.shape[-1]

    style = gram(compiled(torch.rand(1, 3, 8, 8))).detach()
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([image], lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(gram(compiled(image)), style) * 100
        loss.backward()
        optimizer.step()
        yield loss
    return image


class Masked(nn.Module):
    """A masked autoencoder: it reads a random quarter of the patches, and restores the others."""

    def __init__(self, patches: int = 8, width: int = 12) -> None:
        super().__init__()
        self.embed, self.restore = nn.Linear(6, width), nn.Linear(width, 6)
        self.positions = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.mask = nn.Parameter(torch.zeros(width))
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, patches, _ = x.shape
        order = torch.rand(size, patches).argsort(1)
        back, kept = order.argsort(1), order[:, : patches // 4]
        rows = kept.unsqueeze(-1).expand(-1, -1, self.mask.shape[0])
        seen = self.encoder((self.embed(x) + self.positions).gather(1, rows))
        rest = self.mask.expand(size, patches - seen.shape[1], -1)
        all_rows = back.unsqueeze(-1).expand(-1, -1, self.mask.shape[0])
        full = torch.cat([seen, rest], 1).gather(1, all_rows) + self.positions
        hidden = (back >= seen.shape[1]).float()
        wrong = (self.restore(full) - x).square().mean(-1)
        return (wrong * hidden).sum() / hidden.sum()


@program
def masked_autoencoder(wrap):
    model = Masked()
    compiled = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = compiled(torch.randn(3, 8, 6))
        update(optimizer, loss)
        yield loss
    return model


class Rays(nn.Module):
    """A radiance field: colours and densities along rays, summed up as light is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, start: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        depth = torch.linspace(0.5, 2, 6) + torch.rand(start.shape[0], 6) * 0.2
        x = start.unsqueeze(1) + way.unsqueeze(1) * depth.unsqueeze(-1)
        waves = x.unsqueeze(-1) * 2.0 ** torch.arange(4)
        features = torch.cat([x, waves.sin().flatten(2), waves.cos().flatten(2)], -1)
        colour, density = self.body(features).split([3, 1], -1)
        gaps = torch.diff(depth, append=depth[:, -1:] + 0.3)
        alpha = 1 - torch.exp(-F.softplus(density.squeeze(-1)) * gaps)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)[:, :-1]
        return ((alpha * clear).unsqueeze(-1) * colour.sigmoid()).sum(1)


@program
def radiance_field(wrap):
    model = Rays()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        found = compiled(torch.randn(5, 3), F.normalize(torch.randn(5, 3), dim=-1))
        loss = F.mse_loss(found, torch.rand(5, 3))
        update(optimizer, loss)
        yield loss
    return model


class Aligns(nn.Module):
    """A spatial transformer: it warps its input before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(64, 6)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.read = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.locate(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False, padding_mode="border")
        return self.head(self.read(F.interpolate(x, scale_factor=1.0)).relu().flatten(1))


@program
def spatial_transformer(wrap):
    model = Aligns()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(torch.randn(3, 1, 8, 8)), torch.randint(3, (3,)))
        update(optimizer, loss)
        yield loss
    return model


class Cells(nn.Module):
    """A cellular automaton that runs for a number of steps that the loop draws."""

    def __init__(self) -> None:
        super().__init__()
        self.rule = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            around = x.roll(1, -1) + x.roll(-1, -1) + x.roll(1, -2) + x.roll(-1, -2) - 4 * x
            change = self.rule(torch.cat([x, around], 1))
            x = x + change * (torch.rand_like(x[:, :1]) < 0.5)
        return x


@program
def cellular_automaton(wrap):
    model = Cells()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.rand(2, 4, 6, 6)
        loss = (compiled(x, 2 + step % 3) - x).square().mean() + (compiled(x, 1) - 0.5).abs().mean()
        update(optimizer, loss)
        yield loss
    return model


@program
def redundancy_of_features(wrap):
    """Barlow twins: the correlation of two views should be the identity."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Linear(16, 8),
    )  # fmt: skip
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x = torch.randn(8, 3, 4, 4)
        a, b = (compiled(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (a, b))
        c = a.T @ b / 8
        on = (c.diagonal() - 1).square().sum()
        off = c.flatten()[:-1].view(7, 9)[:, 1:].square().sum()
        loss = on + 0.05 * off
        update(optimizer, loss)
        yield loss
    return model
