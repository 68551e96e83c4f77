"""Modules that stay in eager PyTorch, as nodes of the graph of what stands around them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


class Around(nn.Module):
    """Layers before and after a module."""

    def __init__(self, inner, before=None) -> None:
        super().__init__()
        self.before, self.inner = before or nn.Linear(8, 8), inner
        self.after = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.after(self.inner(self.before(x))).square().mean()


class Words(nn.Module):
    def __init__(self, table) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.table(ids)).square().mean()


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(8, 6), nn.CTCLoss(reduction="none")

    def forward(self, x, targets, lengths):
        scores = self.body(x).log_softmax(-1)
        return self.loss(scores, targets, torch.full((x.shape[1],), x.shape[0]), lengths).mean()


class SpeechByFunction(Speech):
    def forward(self, x, targets, lengths):
        scores = self.body(x).log_softmax(-1)
        sizes = torch.full((x.shape[1],), x.shape[0])
        of_all = nn.functional.ctc_loss(scores, targets, sizes, lengths, reduction="sum")
        return of_all + scores.logsumexp(-1).mean()


class SpeechOfLabels(Speech):
    """Has all labels in one row, as models of transformers have, whose number data tells."""

    def __init__(self, reduction="mean", names=()) -> None:
        super().__init__()
        self.reduction, self.names = reduction, names

    def forward(self, x, targets, lengths):
        scores = self.body(x).log_softmax(-1)
        is_label = torch.arange(targets.shape[1]) < lengths.unsqueeze(-1)
        sizes = torch.full_like(lengths, x.shape[0])
        values = [scores, targets.masked_select(is_label), sizes, is_label.sum(-1)]
        num_plain = len(values) - len(self.names)
        named = dict(zip(self.names, values[num_plain:], strict=True))
        with torch.backends.cudnn.flags(enabled=False):
            loss = nn.functional.ctc_loss(*values[:num_plain], **named, reduction=self.reduction)
        return loss.mean() / 10


class SpeechOfSizes(Speech):
    """Has the lengths as numbers, which are sizes of the input."""

    def forward(self, x, targets, lengths):
        scores = self.body(x).log_softmax(-1)
        count = x.shape[1]
        return nn.functional.ctc_loss(
            scores, targets, (x.shape[0],) * count, [targets.shape[1] - 1] * count
        )


class Shared(nn.Module):
    """Calls one observer twice, with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fake = fake_quantize()

    def forward(self, x):
        return self.fake(self.second(self.fake(self.first(x)) * 3)).square().mean()


def fake_quantize():
    return quantization.FakeQuantize(
        observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )


def rows(size):
    return (torch.randn(size, 8),)


def ids(size):
    return (torch.randint(10, (size, 3)),)


def spoken(size):
    return torch.randn(12, size, 8), torch.randint(1, 6, (size, 4)), torch.randint(1, 5, (size,))


CASES = {
    "batch norm with a running mean": (
        lambda: Around(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)), rows
    ),
    "fake quantization": (lambda: Around(fake_quantize()), rows),
    "fake quantization, twice": (Shared, rows),
    "observer": (lambda: Around(quantization.MinMaxObserver()), rows),
    "max_norm": (lambda: Words(nn.Embedding(10, 8, max_norm=1.0)), ids),
    "sparse and max_norm": (lambda: Words(nn.Embedding(10, 8, max_norm=1.0, sparse=True)), ids),
    "sparse bags and max_norm": (
        lambda: Words(nn.EmbeddingBag(10, 8, max_norm=1.0, sparse=True)), ids
    ),
    "CTC": (Speech, spoken),
    "CTC, a function": (SpeechByFunction, spoken),
    "CTC, labels in a row": (SpeechOfLabels, spoken),
    "CTC, labels in a row, for each": (lambda: SpeechOfLabels("none"), spoken),
    "CTC, lengths that are sizes": (
        SpeechOfSizes, lambda size: (torch.randn(2 * size, 4, 8), *spoken(4)[1:])
    ),
    "CTC, keywords": (
        lambda: SpeechOfLabels("sum", ["input_lengths", "target_lengths"]), spoken
    ),
}  # fmt: skip


def train(model, call, inputs, sizes=(4, 4, 6, 5)):
    seen = []
    for step, size in enumerate(sizes):
        torch.manual_seed(step)
        model.zero_grad()
        loss = call(*inputs(size))
        loss.backward()
        seen.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    seen.append((parameter.grad.layout, parameter.grad.to_dense()))
                    parameter -= 0.1 * parameter.grad.to_dense()
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen


def compare(got, want) -> None:
    assert len(got) == len(want)
    for mine, right in zip(got, want, strict=True):
        if isinstance(mine, tuple):
            assert mine[0] == right[0]
            mine, right = mine[1], right[1]
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_training(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    eager = make()
    model = copy.deepcopy(eager)
    compare(train(model, ORTModule(model), inputs), train(eager, eager, inputs))
    counters = torch_ort.counters()
    assert counters["graphs_captured"] <= 2  # one has looked at the sizes of this call
    assert counters["fallbacks"] == 0
    assert counters["backward_runs"] == 4
    assert counters["steps_python"] > 0


@pytest.mark.parametrize("name", CASES)
def test_evaluation(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    eager = make()
    train(eager, eager, inputs, (4,))
    eager.eval()
    model = copy.deepcopy(eager)
    ours = ORTModule(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = inputs(4)
            torch.testing.assert_close(ours(*given), eager(*given))
    compare([*model.buffers()], [*eager.buffers()])


def test_under_autocast():
    eager = Around(fake_quantize())
    model = copy.deepcopy(eager)
    ours = ORTModule(model)
    for _ in range(2):
        (x,) = rows(4)
        losses = []
        for call in (ours, eager):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(call(x))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    compare([*model.buffers()], [*eager.buffers()])


def test_gradients_accumulate():
    make, inputs = CASES["sparse and max_norm"]
    eager = make()
    model = copy.deepcopy(eager)
    ours = ORTModule(model)
    optimizers = [torch.optim.SparseAdam([each.table.weight]) for each in (model, eager)]
    for _ in range(2):
        for _ in range(3):
            given = inputs(4)
            ours(*given).backward()
            eager(*given).backward()
        mine, right = model.table.weight.grad, eager.table.weight.grad
        torch.testing.assert_close(mine.to_dense(), right.to_dense())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.table.weight, eager.table.weight)


class Tied(nn.Module):
    """Reads the table that the embedding writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, max_norm=1.0)

    def forward(self, ids):
        return (self.table(ids) @ self.table.weight.T).square().mean()


def test_what_an_embedding_writes_nothing_else_may_read(monkeypatch):
    with pytest.raises(Exception, match=r"forward reads 'table\.weight', which an embedding with"):
        ORTModule(Tied())(*ids(4))
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    eager = Tied()
    model = copy.deepcopy(eager)
    with pytest.warns(FallbackWarning, match="an embedding with max_norm writes into"):
        got = ORTModule(model)(*ids(4))
    assert got.requires_grad


def test_a_module_is_freed_with_its_graph():
    import gc
    import weakref

    make, inputs = CASES["fake quantization"]
    model = make()
    ours, alive = ORTModule(model), weakref.ref(model)
    ours(*inputs(4)).backward()
    del ours, model
    gc.collect()
    assert alive() is None
