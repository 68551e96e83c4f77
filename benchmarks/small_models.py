"""Models of kinds that models.py and Hugging Face's library do not have, written small.

As in models.py, a model takes its batch and returns the loss.
"""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


class InvertedResidual(nn.Module):
    """MobileNetV3's block: widen, convolve each channel by itself, weigh channels, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int = 4) -> None:
        super().__init__()
        inner = widening * inputs
        self.is_residual = stride == 1 and inputs == outputs
        self.widen = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.Hardswish(),
        )  # fmt: skip
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, inner // 4, 1), nn.ReLU(),
            nn.Conv2d(inner // 4, inner, 1), nn.Hardsigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, inputs, H, W] to [batch, outputs, H / stride, W / stride]."""
        hidden = self.depthwise(self.widen(images))
        made = self.narrow(hidden * self.weigh(hidden))
        return images + made if self.is_residual else made


class MobileNet(nn.Module):
    """A classifier of images by inverted residual blocks, in the manner of MobileNetV3."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        blocks = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1)]
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
            *(InvertedResidual(*block) for block in blocks),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, classes),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, H, W] against labels [batch]."""
        return functional.cross_entropy(self.layers(images), labels)


class ConvNeXtBlock(nn.Module):
    """ConvNeXt's block: a convolution of each channel by itself, then an MLP for each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, width, H, W] to the same sizes."""
        hidden = self.depthwise(images).permute(0, 2, 3, 1)
        return images + (self.scale * self.mlp(self.norm(hidden))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A classifier of images by ConvNeXt's blocks, at half the size in each stage."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
        for before, width in zip((None, *widths), widths, strict=False):
            if before is not None:
                layers.append(nn.Conv2d(before, width, 2, 2))
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images [batch, 3, H, W] against labels [batch]."""
        return functional.cross_entropy(self.head(self.layers(images)), labels)


class VolumeUNet(nn.Module):
    """Segments volumes at two sizes, with instance norms, as of medical images."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = self.block(1, width)
        self.inner = self.block(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.last = self.block(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        """Give two convolutions, each with its norm and its nonlinearity."""
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(),
            nn.Conv3d(outputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(),
        )  # fmt: skip

    def forward(self, volumes: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of volumes [batch, 1, D, H, W] against labels [batch, D, H, W]."""
        outer = self.first(volumes)
        inner = self.inner(functional.max_pool3d(outer, 2))
        joined = self.last(torch.cat([outer, self.up(inner)], 1))
        return functional.cross_entropy(self.head(joined), labels)


class TimedBlock(nn.Module):
    """Two convolutions with what the time adds between them, and a way past them."""

    GROUPS = 8

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.norm_first = nn.GroupNorm(self.GROUPS, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.of_time = nn.Linear(time_width, outputs)
        self.norm_second = nn.GroupNorm(self.GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.past = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        """Map [batch, inputs, H, W] and time [batch, time_width] to [batch, outputs, H, W]."""
        hidden = self.first(functional.silu(self.norm_first(images)))
        hidden = hidden + self.of_time(functional.silu(time))[:, :, None, None]
        return self.second(functional.silu(self.norm_second(hidden))) + self.past(images)


class ImageAttention(nn.Module):
    """Self-attention between the places of an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(TimedBlock.GROUPS, width)
        self.project_in = nn.Conv2d(width, 3 * width, 1)
        self.project_out = nn.Conv2d(width, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, width, H, W] to the same shape."""
        batch, width, high, wide = images.shape
        packed = self.project_in(self.norm(images))
        packed = packed.reshape(batch, 3, self.heads, width // self.heads, high * wide)
        query, key, value = packed.transpose(-1, -2).unbind(1)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return images + self.project_out(mixed.transpose(-1, -2).reshape(images.shape))


class DiffusionUNet(nn.Module):
    """Predicts the noise in images that have been noised for some time, as diffusion models do."""

    TIMES = 1000

    def __init__(self, width: int) -> None:
        super().__init__()
        time_width = 4 * width
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width)
        )
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.above = TimedBlock(width, width, time_width)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.below = TimedBlock(2 * width, 2 * width, time_width)
        self.attention = ImageAttention(2 * width, heads=4)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = TimedBlock(2 * width, width, time_width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, self.TIMES), 0)
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the loss of predicting noise, shaped as images [batch, 3, H, W].

        times, int64 [batch], lie below TIMES; they tell how much noise is put into the images.
        """
        kept = self.kept[times][:, None, None, None]
        noised = kept.sqrt() * images + (1 - kept).sqrt() * noise
        time = self.time(waves(times, self.width))
        above = self.above(self.stem(noised), time)
        below = self.attention(self.below(self.down(above), time))
        hidden = self.last(torch.cat([self.up(below), above], 1), time)
        return functional.mse_loss(self.head(functional.silu(hidden)), noise)


def waves(times: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times [batch], as [batch, width]."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=times.device) * 2 / width)
    angles = times[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Gan(nn.Module):
    """A maker of images and a judge of them, in the manner of DCGAN, trained in one step.

    The maker learns through a judge whose parameters are held, so that one loss serves both.
    """

    def __init__(self, noise: int, width: int) -> None:
        super().__init__()
        self.maker = nn.Sequential(
            nn.ConvTranspose2d(noise, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, padding=1), nn.GroupNorm(4, 2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, padding=1), nn.GroupNorm(4, 4 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4),
        )  # fmt: skip

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the sum of both losses for images [batch, 3, 32, 32] and noise [batch, noise]."""
        made = self.maker(noise[:, :, None, None])
        of_real, of_made = self.judge(images), self.judge(made.detach())
        judged = hinge(of_real) + hinge(-of_made)
        held = {name: value.detach() for name, value in self.judge.named_parameters()}
        return judged - functional_call(self.judge, held, (made,)).mean()


def hinge(scores: Tensor) -> Tensor:
    return functional.relu(1 - scores).mean()


class Tagger(nn.Module):
    """Names the kind of each token of a text by an LSTM in both directions."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """Return the loss of tags for tokens, both int64 [batch, length]."""
        hidden, _ = self.recurrent(self.tokens(tokens))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


class CellTagger(nn.Module):
    """Names the kind of each token of a text by a GRU cell and a loop."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, tags)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """Return the loss of tags for tokens, both int64 [batch, length]."""
        inputs = self.tokens(tokens)
        state, states = inputs.new_zeros(len(tokens), self.width), []
        for each in inputs.unbind(1):
            state = self.cell(each, state)
            states.append(state)
        hidden = torch.stack(states, 1)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


class GraphLayer(nn.Module):
    """Sends messages along edges, weighs those that meet at a node, and adds them up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.weight = nn.Linear(2 * width, 1)
        self.update = nn.Linear(2 * width, width)

    def forward(self, nodes: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        """Map nodes [nodes, width]; senders and receivers, int64 [edges], are rows of them."""
        ends = torch.cat([nodes[senders], nodes[receivers]], 1)
        scores = self.weight(ends).squeeze(1)
        # A softmax over the edges that meet at a node.
        largest = scores.new_full((len(nodes),), -torch.inf)
        largest = largest.scatter_reduce(0, receivers, scores.detach(), "amax")
        powers = torch.exp(scores - largest[receivers])
        totals = torch.zeros_like(largest).scatter_add(0, receivers, powers)
        messages = self.message(ends).relu() * (powers / totals[receivers])[:, None]
        heard = torch.zeros_like(nodes).index_add(0, receivers, messages)
        return nodes + self.update(torch.cat([nodes, heard], 1)).relu()


class GraphNetwork(nn.Module):
    """Classifies the nodes of a graph by attention over its edges."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(
        self, features: Tensor, senders: Tensor, receivers: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the loss of features [nodes, features] against labels [nodes]."""
        nodes = self.stem(features)
        for layer in self.layers:
            nodes = layer(nodes, senders, receivers)
        return functional.cross_entropy(self.head(nodes), labels)


class PointNet(nn.Module):
    """Classifies clouds of points by the largest of each feature, after turning the clouds."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.turn = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
            nn.Flatten(), nn.Linear(32, 9),
        )  # fmt: skip
        self.layers = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(128, classes)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of points [batch, 3, points] against labels [batch]."""
        identity = torch.eye(3, device=points.device)
        turn = self.turn(points).view(-1, 3, 3) + identity
        features = self.layers(torch.bmm(turn, points)).amax(2)
        # The turn is kept near a rotation, as PointNet asks.
        excess = identity - torch.bmm(turn, turn.transpose(1, 2))
        loss = functional.cross_entropy(self.head(features), labels)
        return loss + 1e-3 * excess.square().sum((1, 2)).mean()


class RadianceField(nn.Module):
    """Colors of rays through a scene that an MLP of waves describes, in the manner of NeRF."""

    OCTAVES = 6

    def __init__(self, width: int) -> None:
        super().__init__()
        features = 3 + 6 * self.OCTAVES
        self.first = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Linear(width + features, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def forward(
        self, origins: Tensor, directions: Tensor, distances: Tensor, colors: Tensor
    ) -> Tensor:
        """Return the loss of rays, [rays, 3] each, against colors [rays, 3].

        distances, [rays, samples] in ascending order, tell where on its ray the scene is asked.
        """
        places = origins[:, None] + directions[:, None] * distances[:, :, None]
        scales = 2.0 ** torch.arange(self.OCTAVES, device=places.device)
        angles = (places[..., None] * scales).flatten(2)
        features = torch.cat([places, angles.sin(), angles.cos()], 2)
        found = self.second(torch.cat([self.first(features), features], 2))
        density, color = functional.softplus(found[..., 0]), found[..., 1:].sigmoid()
        steps = torch.diff(distances, append=distances[:, -1:] + 0.1)
        passes = torch.exp(-density * steps)
        reaches = torch.cumprod(torch.cat([torch.ones_like(passes[:, :1]), passes], 1), 1)[:, :-1]
        seen = ((reaches * (1 - passes))[..., None] * color).sum(1)
        return functional.mse_loss(seen, colors)


class Experts(nn.Module):
    """A feed-forward layer of which each token uses its best two experts, up to their capacity."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(width**-0.5 * torch.randn(experts, width, 2 * width))
        self.down = nn.Parameter((2 * width) ** -0.5 * torch.randn(experts, 2 * width, width))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens [tokens, width] to the same shape; also return how uneven the experts are."""
        odds = self.router(tokens).softmax(1)
        weights, chosen = odds.topk(2, 1)
        asked = functional.one_hot(chosen.flatten(), odds.shape[1])
        # Each expert takes those who come first; who finds no place passes unchanged.
        place = (asked.cumsum(0) - 1).gather(1, chosen.flatten()[:, None]).squeeze(1)
        fits = (place < self.capacity)[:, None].to(tokens.dtype)
        slot = chosen.flatten() * self.capacity + place.clamp(max=self.capacity - 1)
        copies = tokens.repeat_interleave(2, 0) * fits
        taken = tokens.new_zeros(odds.shape[1] * self.capacity, tokens.shape[1])
        taken = taken.index_add(0, slot, copies).view(odds.shape[1], self.capacity, -1)
        made = torch.bmm(functional.gelu(torch.bmm(taken, self.up)), self.down)
        made = made.flatten(0, 1)[slot] * fits * weights.flatten()[:, None]
        share = asked.float().mean(0)
        return tokens + made.view(-1, 2, tokens.shape[1]).sum(1), (share * odds.mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """Classifies texts by the mean of their tokens behind two layers of experts."""

    def __init__(self, vocabulary: int, width: int, classes: int, capacity: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Experts(width, 4, capacity) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of texts, int64 [batch, length], against labels [batch]."""
        hidden, uneven = self.tokens(tokens).flatten(0, 1), 0.0
        for layer in self.layers:
            hidden, more = layer(hidden)
            uneven = uneven + more
        pooled = self.norm(hidden).view(*tokens.shape, -1).mean(1)
        return functional.cross_entropy(self.head(pooled), labels) + 0.01 * uneven
