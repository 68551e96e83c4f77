"""Graph networks: gathers along edges, sums at nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from field.program import STEPS, program, update
from torch import nn
from torch.nn import functional as F


@dataclass
class Batch:
    """Several graphs as one, as libraries of graph networks have them."""

    x: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    num_graphs: int


def random_batch(nodes: int = 9, edges: int = 20) -> Batch:
    graph = torch.arange(nodes) // 3
    return Batch(torch.randn(nodes, 6), torch.randint(nodes, (2, edges)), graph, 3)


class Convolution(nn.Module):
    """Neighbours' features, divided by the roots of both degrees."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.ones(x.shape[0]).index_add(0, target, torch.ones(target.shape[0]))
        weights = (degree[source] * degree[target]).rsqrt().unsqueeze(-1)
        x = self.linear(x)
        return x / degree.unsqueeze(-1) + torch.zeros_like(x).index_add(
            0, target, x[source] * weights
        )


class NodeClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(6, 16), Convolution(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x, edges).relu(), 0.2, self.training)
        return self.second(x, edges)


@program
def classes_of_nodes(wrap):
    model = NodeClassifier()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    x, edges, labels = torch.randn(12, 6), torch.randint(12, (2, 30)), torch.randint(3, (12,))
    is_known = torch.arange(12) < 6
    for _ in range(STEPS):
        loss = F.cross_entropy(compiled(x, edges)[is_known], labels[is_known])
        update(optimizer, loss)
        yield loss
    return model


class Attention(nn.Module):
    """Weighs neighbours by a softmax over the edges of each node."""

    def __init__(self, inputs: int, outputs: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inputs, heads * outputs, bias=False)
        self.left = nn.Parameter(torch.randn(heads, outputs) * 0.3)
        self.right = nn.Parameter(torch.randn(heads, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.linear(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        most = torch.full((x.shape[0], self.heads), -1e9).index_reduce(
            0, target, scores.detach(), "amax"
        )
        e = (scores - most[target]).exp()
        total = torch.zeros(x.shape[0], self.heads).index_add(0, target, e)
        weights = e / (total[target] + 1e-9)
        y = torch.zeros_like(h).index_add(0, target, h[source] * weights.unsqueeze(-1))
        return y.flatten(1) + self.bias


class AttentionNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(6, 4), Attention(8, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = F.elu(self.first(batch.x, batch.edges))
        x = F.elu(self.second(x, batch.edges))
        sums = torch.zeros(batch.num_graphs, x.shape[1]).index_add(0, batch.graph, x)
        return self.head(sums)


@program(quick=True)
def attention_on_batches_that_are_objects(wrap):
    model = AttentionNetwork()
    compiled = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        logits = compiled(random_batch(edges=16 + step % 3))
        loss = F.cross_entropy(logits, torch.randint(2, (3,)))
        update(optimizer, loss)
        yield loss
    return model


class Messages(nn.Module):
    """Molecules: messages depend on distances, positions get forces."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.kinds = nn.Embedding(4, width)
        self.message = nn.Sequential(nn.Linear(2 * width + 4, width), nn.SiLU())
        self.update = nn.GRUCell(width, width)
        self.energy = nn.Linear(width, 1)
        self.register_buffer("centres", torch.linspace(0, 3, 4))

    def forward(
        self, kinds: torch.Tensor, positions: torch.Tensor, edges: torch.Tensor
    ) -> torch.Tensor:
        source, target = edges
        distance = (positions[source] - positions[target]).square().sum(-1).add(1e-6).sqrt()
        near = torch.exp(-(distance.unsqueeze(-1) - self.centres).square())
        h = self.kinds(kinds)
        for _ in range(2):
            messages = self.message(torch.cat([h[source], h[target], near], -1))
            sums = torch.zeros_like(h).scatter_add(
                0, target.unsqueeze(-1).expand_as(messages), messages
            )
            h = self.update(sums, h)
        return self.energy(h).sum()


@program
def energies_of_molecules(wrap):
    model = Messages()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        energy = compiled(torch.randint(4, (6,)), torch.randn(6, 3), torch.randint(6, (2, 12)))
        loss = (energy - 1).square()
        update(optimizer, loss)
        yield loss
    return model


@program
def forces_of_molecules(wrap):
    """The loss reads forces, which are gradients: backward goes through a gradient."""
    model = Messages()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        positions = torch.randn(6, 3, requires_grad=True)
        energy = compiled(torch.randint(4, (6,)), positions, torch.randint(6, (2, 12)))
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        loss = (slope + positions.detach()).square().mean()
        update(optimizer, loss)
        yield loss
    return model


class Links(nn.Module):
    """A sparse matrix of neighbours, and products of nodes as scores of links."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(10, 6) * 0.3)
        self.linear = nn.Linear(6, 6)

    def forward(self, neighbours: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(neighbours, self.linear(self.embedding))
        return (x[links[0]] * x[links[1]]).sum(-1)


@program
def links_by_a_sparse_matrix(wrap):
    model = Links()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    neighbours = torch.eye(10).roll(1, 0).add(torch.eye(10)).to_sparse_coo()
    for _ in range(STEPS):
        scores = compiled(neighbours, torch.randint(10, (2, 8)))
        loss = F.binary_cross_entropy_with_logits(scores, (torch.arange(8) < 4).float())
        update(optimizer, loss)
        yield loss
    return model


class Pooled(nn.Module):
    """Keeps the best half of the nodes, whose number the data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score, self.head = Convolution(6, 8), nn.Linear(8, 1), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.first(x, edges).relu()
        score = self.score(x).squeeze(-1).tanh()
        is_kept = score >= score.median()
        kept = x[is_kept] * score[is_kept].unsqueeze(-1)
        return self.head(torch.cat([kept.mean(0), kept.amax(0)]))


@program
def pooling_by_scores(wrap):
    model = Pooled()
    compiled = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        logits = compiled(torch.randn(9, 6), torch.randint(9, (2, 20)))
        loss = F.cross_entropy(logits, torch.randint(2, ()))
        update(optimizer, loss)
        yield loss
    return model
