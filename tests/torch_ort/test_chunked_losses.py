"""Losses of linear layers over many classes: chunks of rows, against eager PyTorch in float64."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from linear_losses import CLASSES, NEAR, ROWS, WIDTH, num_rows
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort.engine import watchers
from torch_ort.engine.program import Program

IGNORED = -100

pytestmark = pytest.mark.usefixtures("kept_memory")


class Head(nn.Module):
    """Two linear layers; `make` gives the loss, or a tuple of what leaves, from both and labels."""

    def __init__(self, make, bias: bool = False, classes: int = CLASSES):
        super().__init__()
        self.make = make
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        self.register_buffer("class_weight", torch.rand(classes))

    def forward(self, x: Tensor, labels: Tensor):
        return self.make(self, self.layer(x), labels)


def mean(model, hidden, labels):
    return F.cross_entropy(model.head(hidden), labels)


def shifted_labels(model, hidden, labels):
    """The loss of Hugging Face's causal language models, beside the logits."""
    logits = model.head(hidden.view(4, -1, WIDTH))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    next_labels = F.pad(labels.view(4, -1), (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(wide.view(-1, CLASSES), next_labels.view(-1)), logits


def shifted_logits(model, hidden, labels):
    """The older loss of Hugging Face's causal language models."""
    logits = model.head(hidden.view(4, -1, WIDTH))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    shifted = wide[..., :-1, :].contiguous()
    next_labels = labels.view(4, -1)[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, CLASSES), next_labels.view(-1))


def shifted_and_left(model, hidden, labels):
    """As above, of logits that leave, and without copies."""
    logits = model.head(hidden.view(4, -1, WIDTH))
    next_labels = labels.clamp(min=7).view(4, -1)[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), next_labels.flatten(), ignore_index=7)
    return loss, logits


def smoothed_and_shifted(model, hidden, labels):
    """Label smoothing of the older loss."""
    logits = logits_of(model, hidden.view(4, -1, WIDTH))
    shifted, next_labels = logits[..., :-1, :].contiguous(), labels.view(4, -1)[..., 1:]
    weight = model.class_weight.to(logits.dtype)
    return F.cross_entropy(
        shifted.view(-1, CLASSES), next_labels.flatten(), weight, label_smoothing=0.1
    )


def rows_of_shifted(model, hidden, labels):
    """Losses of places, each sequence's own mean, with a z-loss of all places."""
    logits = logits_of(model, hidden.view(4, -1, WIDTH))
    next_labels = labels.view(4, -1)[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), next_labels.flatten(), reduction="none", label_smoothing=0.2
    ).view(4, -1)
    means = losses.sum(-1) / (next_labels != IGNORED).sum(-1).clamp(min=1)
    return means.mean() + 1e-2 * logits.logsumexp(-1).square().mean(), logits, losses.detach()


def last_ones(model, hidden, labels):
    """The last places of some sequences."""
    logits, kept = model.head(hidden.view(4, -1, WIDTH)), len(labels) // 4 - 10
    next_labels = labels.view(4, -1)[1:, -kept:].flatten()
    return F.cross_entropy(logits[1:, -kept:].reshape(-1, CLASSES), next_labels.clamp(min=0))


def tied(model, hidden, labels):
    """The weight of the head is the table of what goes in as well."""
    return F.cross_entropy(
        F.linear(hidden + model.head.weight[: len(hidden)], model.head.weight), labels
    )


def chosen(model, hidden, labels):
    """Gives the best classes too, which have no gradient."""
    logits = model.head(hidden)
    return F.cross_entropy(logits, labels), logits.argmax(-1)


def frozen(model, hidden, labels):
    return F.cross_entropy(F.linear(hidden, model.head.weight.detach()), labels)


def logits_of(model, hidden):
    """Sums of all logarithms of a row are too large for float16."""
    logits = model.head(hidden)
    return logits.float() if logits.dtype == torch.float16 else logits


def smoothed(model, hidden, labels):
    return F.cross_entropy(logits_of(model, hidden), labels, label_smoothing=0.1)


def smoothed_sum(model, hidden, labels):
    logits = logits_of(model, hidden)
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.3) / 7


def smoothed_and_weighted(model, hidden, labels):
    logits = logits_of(model, hidden)
    weight = model.class_weight.to(logits.dtype)
    return F.cross_entropy(logits, labels, weight, label_smoothing=0.2)


def with_z_loss(model, hidden, labels):
    """That of PaLM, over all rows."""
    logits = model.head(hidden)
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def with_z_loss_and_left(model, hidden, labels):
    logits = model.head(hidden)
    return F.cross_entropy(logits, labels) + 1e-2 * (logits.logsumexp(-1) ** 2).mean(), logits


def with_masked_z_loss(model, hidden, labels):
    """Over rows whose label counts, before the other loss is made; in steps of an accumulation."""
    logits = model.head(hidden.view(4, -1, WIDTH))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    counts = (labels != IGNORED).view(4, -1).to(logits.dtype)
    z_loss = (torch.logsumexp(logits, -1, keepdim=True).squeeze(-1) ** 2 * counts).sum()
    z_loss = z_loss / counts.sum()
    loss = F.cross_entropy(logits.view(-1, CLASSES), labels)
    return (0.5 * loss + z_loss * 0.01) / 4, logits, z_loss.detach()


def with_z_loss_and_left_in_float(model, hidden, labels):
    """As Accelerate asks for what a model in bfloat16 gives."""
    logits = model.head(hidden)
    loss = F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()
    return loss, logits if logits.dtype == torch.float64 else logits.float()


def everything(model, hidden, labels):
    logits = logits_of(model, hidden)
    weight = model.class_weight.to(logits.dtype)
    loss = F.cross_entropy(logits, labels, weight, label_smoothing=0.2)
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


def masked_mean(model, hidden, labels):
    """Losses of rows, of which a mask chooses some."""
    losses = F.cross_entropy(model.head(hidden), labels.clamp(min=0), reduction="none")
    counts = (labels != IGNORED).to(losses.dtype)
    return (losses * counts).sum() / counts.sum()


def mean_of_means(model, hidden, labels):
    """Each sequence counts as much as any other one."""
    losses = F.cross_entropy(model.head(hidden), labels, reduction="none").view(4, -1)
    counts = (labels != IGNORED).view(4, -1).sum(-1)
    return (losses.sum(-1) / counts).mean(), losses.detach()


def weighted_by_what_is_learned(model, hidden, labels):
    losses = F.cross_entropy(model.head(hidden), labels, reduction="none")
    return (losses * hidden[:, 0]).sum()


def weighted_rows(model, hidden, labels):
    losses = F.cross_entropy(
        model.head(hidden), labels, model.class_weight, reduction="none", label_smoothing=0.1
    )
    return (losses * torch.linspace(0.5, 1, len(labels)).to(losses)).mean()


def capped(model, hidden, labels):
    """The logits of Gemma."""
    logits = model.head(hidden) / 3
    return F.cross_entropy((torch.tanh(logits) * 3), labels)


def capped_and_left(model, hidden, labels):
    logits = 2.3 * torch.tanh(model.head(hidden.view(4, -1, WIDTH)) / 2.3)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels.view(4, -1)[:, 1:].flatten())
    return loss, wide


def capped_in_float(model, hidden, labels):
    logits = model.head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = torch.tanh(logits * (1 / 3)) * 3
    loss = F.cross_entropy(logits, labels, model.class_weight.to(logits.dtype), label_smoothing=0.2)
    return loss + 1e-2 * logits.logsumexp(-1).square().mean(), logits.argmax(-1)


def capped_in_float_and_left(model, hidden, labels):
    logits = model.head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = torch.tanh(logits / 3) * 3
    return F.cross_entropy(logits, labels), logits


MODELS = {
    "mean": (mean, False),
    "bias": (mean, True),
    "shifted": (shifted_labels, True),
    "shifted logits": (shifted_logits, True),
    "shifted and left": (shifted_and_left, True),
    "smoothed and shifted": (smoothed_and_shifted, True),
    "rows of shifted": (rows_of_shifted, True),
    "last ones": (last_ones, False),
    "smoothed": (smoothed, True),
    "smoothed sum": (smoothed_sum, False),
    "smoothed and weighted": (smoothed_and_weighted, True),
    "z-loss": (with_z_loss, True),
    "z-loss and left": (with_z_loss_and_left, True),
    "z-loss and left in float": (with_z_loss_and_left_in_float, False),
    "masked z-loss": (with_masked_z_loss, False),
    "everything": (everything, True),
    "masked mean": (masked_mean, True),
    "mean of means": (mean_of_means, False),
    "weighted by what is learned": (weighted_by_what_is_learned, False),
    "weighted rows": (weighted_rows, True),
    "capped": (capped, True),
    "capped and left": (capped_and_left, False),
    "capped in float": (capped_in_float, True),
    "tied": (tied, False),
    "chosen": (chosen, False),
    "frozen": (frozen, False),
}


def batch(dtype: torch.dtype, rows: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    rows = rows or num_rows(dtype)
    labels = torch.randint(0, CLASSES, (rows,))
    labels[torch.rand(rows) < 0.3] = IGNORED
    return torch.randn(rows, WIDTH, dtype=dtype).to(device), labels.to(device)


def compiled(model: nn.Module, **options):
    torch.compiler.reset()
    return torch.compile(model, backend="ort", options={"strict": True, **options})


def left(call, model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor | None]:
    """Give what leaves, and the gradients of the loss, which comes first."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    made = call(x, labels)
    made = made if isinstance(made, tuple) else (made,)
    (made[0] * 2).backward()
    return [*(each.detach() for each in made), x.grad, *(p.grad for p in model.parameters())]


def is_near(got: Tensor | None, want: Tensor | None, near: float) -> bool:
    if got is None or want is None:
        return got is want
    if not want.is_floating_point():
        return (got == want).double().mean().item() > 0.9
    return (got.double() - want).norm().item() <= near * want.norm().item()


def assert_chunked(programs: list[Program]) -> None:
    (program,) = programs
    ops = [node["op"] for node in program.graph.nodes()]
    assert ops.count("LinearCrossEntropy") == 1


def chunked_nodes(model, *inputs) -> int:
    graphs = torch_ort.explain(model, *inputs).graphs
    return sum(graph.nodes.get("torch_ort.LinearCrossEntropy", 0) for graph in graphs)


# tests/cpu/test_linear_loss.py compares the kernels in all dtypes. What short floats add here are
# the casts around a loss, and what a GPU adds is where the factors of rows stand.
IN_BFLOAT16 = (
    "mean", "shifted", "smoothed and weighted", "z-loss and left in float", "masked z-loss",
    "weighted rows", "capped and left",
)  # fmt: skip


def with_dtypes(names, in_bfloat16, dtypes=tuple(NEAR), in_float32=None):
    """All dtypes of all names, of which the default run takes float32 and the named bfloat16."""
    default = {(name, torch.float32) for name in in_float32 or names}
    default |= {(name, torch.bfloat16) for name in in_bfloat16}
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(
                *case,
                marks=() if case in default else pytest.mark.slow,
                id="-".join(map(str, case)),
            )
            for case in itertools.product(names, dtypes)
        ],
    )


ON_CUDA = (
    ("bias", torch.float32), ("shifted and left", torch.bfloat16), ("mean", torch.float16),
    ("rows of shifted", torch.float32), ("masked mean", torch.float32),
    ("weighted rows", torch.float32), ("masked z-loss", torch.bfloat16),
    ("capped in float", torch.float32), ("frozen", torch.float32),
)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "dtype"), ON_CUDA, ids=str)
def test_on_a_gpu(name, dtype):
    compare(name, dtype, "cuda")


@with_dtypes(MODELS, IN_BFLOAT16)
def test_against_float64(name, dtype):
    compare(name, dtype, "cpu")


def compare(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    make, bias = MODELS[name]
    model = Head(make, bias).to(dtype).to(device)
    exact = copy.deepcopy(model).double()
    x, labels = batch(dtype, device=device)
    with watchers.watching() as programs:
        got = left(compiled(model), model, x, labels)
    want = left(exact, exact, x.double(), labels)
    assert all(is_near(*pair, NEAR[dtype]) for pair in zip(got, want, strict=True))
    assert torch_ort.counters()["fallbacks"] == 0
    assert_chunked(programs)


@with_dtypes(
    ["shifted", "capped and left", "z-loss and left", "z-loss and left in float"],
    ["z-loss and left in float"],
    (torch.float32, torch.bfloat16),
    ["shifted", "capped and left", "z-loss and left"],  # a float32 is wide already
)
def test_gradients_of_logits_from_elsewhere(name, dtype):
    """Logits that leave may have a gradient too: in one step, and none in the next."""
    torch.manual_seed(0)
    model = Head(MODELS[name][0], True).to(dtype)
    exact = copy.deepcopy(model).double()
    x, labels = batch(dtype)

    @functools.cache
    def wanted(total):
        exact.zero_grad()
        total(*exact(x.double(), labels)).backward()
        return [p.grad for p in exact.parameters()]

    call = compiled(model)
    alone = lambda loss, logits: loss  # noqa: E731
    beside = lambda loss, logits: loss + logits.square().mean()  # noqa: E731
    of_logits = lambda loss, logits: logits.square().mean()  # noqa: E731
    with watchers.watching() as programs:
        for step, total in enumerate((alone, beside, alone, of_logits)):
            model.zero_grad()
            total(*call(x, labels)).backward()
            pairs = zip([p.grad for p in model.parameters()], wanted(total), strict=True)
            assert all(is_near(*pair, 1.5 * NEAR[dtype]) for pair in pairs), step
    assert_chunked(programs)
    assert torch_ort.counters()["fallbacks"] == 0


def test_logits_leave_as_wide_as_the_cap_has_made_them():
    model = Head(capped_in_float_and_left).bfloat16()
    x, labels = batch(torch.bfloat16)
    assert chunked_nodes(model, x, labels) == 1
    _, logits = compiled(model)(x, labels)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("make", [mean, shifted_logits, smoothed])
def test_no_label_counts(make):
    model = Head(make, True)
    x, labels = batch(torch.float32)
    got = left(compiled(model), model, x, torch.full_like(labels, IGNORED))
    assert got[0].isnan()
    assert not any(gradient.any() for gradient in got[1:])


@pytest.mark.parametrize("make", [smoothed_sum, weighted_by_what_is_learned, with_z_loss])
def test_no_label_counts_and_something_else_does(make):
    torch.manual_seed(0)
    model = Head(make, True)
    exact = copy.deepcopy(model).double()
    x, labels = batch(torch.float32)
    labels.fill_(IGNORED)
    got, want = left(compiled(model), model, x, labels), left(exact, exact, x.double(), labels)
    assert torch.equal(got[0].isnan(), want[0].isnan())
    assert all(is_near(*pair, 3e-6) for pair in zip(got[1:], want[1:], strict=True))


@pytest.mark.parametrize("make", [smoothed, with_z_loss, masked_mean])
def test_far_from_zero(make):
    """A bias that all classes have moves all logits, and no loss but the z-loss."""
    torch.manual_seed(0)
    model = Head(make, True)
    with torch.no_grad():
        model.head.bias += 1000
    exact = copy.deepcopy(model).double()
    x, labels = batch(torch.float32)
    got, want = left(compiled(model), model, x, labels), left(exact, exact, x.double(), labels)
    assert all(is_near(*pair, 1e-4) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_labels_out_of_range_raise_eagers_error(label):
    model = Head(mean)
    x, labels = batch(torch.float32)
    call = compiled(model)
    left(call, model, x, labels)
    labels[7] = label
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(IndexError, match=f"Target {label} is out of bounds."):
            call(x, labels)


@pytest.mark.cuda
def test_dynamic_sizes_on_a_gpu():
    check_dynamic_sizes(masked_mean, (ROWS, 1000, 17, 1, 1500), "cuda")


@pytest.mark.parametrize(
    "make", [mean, shifted_and_left, everything, mean_of_means, rows_of_shifted]
)
def test_dynamic_sizes(make):
    sizes = (ROWS, 1000, 17, 1, 1500) if make in (mean, everything) else (ROWS, 1000, 8, 1500)
    check_dynamic_sizes(make, sizes, "cpu")


def check_dynamic_sizes(make, sizes, device):
    """One graph for all sizes, those too for which it would not have been chosen."""
    torch.manual_seed(0)
    model = Head(make, True).to(device)
    exact = copy.deepcopy(model).double()
    torch.compiler.reset()
    call = torch.compile(model, backend="ort", dynamic=True, options={"strict": True})
    for rows in sizes:
        x, labels = batch(torch.float32, rows, device)
        labels[0] = 5
        got, want = left(call, model, x, labels), left(exact, exact, x.double(), labels)
        assert all(is_near(*pair, 3e-6) for pair in zip(got, want, strict=True)), rows
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("make", [mean, with_z_loss, capped])
def test_gradients_that_are_differentiated(make):
    """The first ones come from a chunked loss, later ones from a graph of the gradients."""
    torch.manual_seed(0)
    model = Head(make, True)
    exact = copy.deepcopy(model).double()
    x, labels = batch(torch.float32)
    assert chunked_nodes(model, x, labels) == 1
    torch.compiler.reset()
    call = torch.compile(model, backend="ort")

    def second(run, module, rows):
        rows = rows.clone().requires_grad_()
        module.zero_grad()
        loss = run(rows, labels)
        (of_rows,) = torch.autograd.grad(loss, rows, create_graph=True)
        (loss + of_rows.square().sum() * 1e3).backward()
        return [of_rows.detach(), rows.grad, *(p.grad for p in module.parameters())]

    want = second(exact, exact, x.double())
    for _ in range(2):
        got = second(call, model, x)
        assert all(is_near(*pair, 1e-5) for pair in zip(got, want, strict=True))


INFERENCE = ("rows of shifted", "mean", "shifted", "smoothed", "masked mean", "capped and left")


@with_dtypes([*INFERENCE, "none"], ["shifted", "capped and left"])
def test_inference(name, dtype):
    torch.manual_seed(0)
    make, bias = MODELS.get(name, (none, True))
    model = Head(make, bias).to(dtype)
    x, labels = batch(dtype)
    with torch.no_grad():
        with watchers.watching() as programs:
            got = compiled(model)(x, labels)
        want = model.double()(x.double(), labels)
    assert_chunked(programs)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    assert all(is_near(*pair, NEAR[dtype]) for pair in pairs)


def test_autocast(device):
    torch.manual_seed(0)
    model = Head(mean, True).to(device)
    exact = copy.deepcopy(model).double()
    x, labels = batch(torch.float32, 2 * ROWS, device)

    def in_bfloat16(*args):
        with torch.autocast(device, torch.bfloat16):
            return call(*args)

    call = compiled(model)
    got = left(in_bfloat16, model, x, labels)
    want = left(exact, exact, x.double(), labels)
    assert all(is_near(*pair, 1e-2) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("device", "rows", "share"),
    [("cpu", ROWS, 0.5), pytest.param("cuda", 20_000, 0.6, marks=pytest.mark.cuda)],
)
def test_memory(device, rows, share):
    """Neither logits nor their gradients cross to the backward half, or stand there.

    A GPU has chunks of at most 256 MiB, here two for 400 MB.
    """
    model = Head(mean).to(device)
    logits = 4 * rows * CLASSES
    inputs = batch(torch.float32, rows, device)
    plan = torch_ort.explain(model, *inputs).graphs[0].plan
    assert plan["saved_bytes"] < logits / 20
    assert plan["peak_bytes"] < logits * share


@pytest.mark.cuda
@pytest.mark.parametrize("make", [smoothed, masked_mean])
def test_float16_on_a_gpu_stays_if_rows_have_factors(make):
    """Gradients of float16 are scaled by the number of rows, which says nothing of such factors."""
    model = Head(make).half().cuda()
    assert chunked_nodes(model, *batch(torch.float16, device="cuda")) == 0


@pytest.mark.cuda
def test_a_label_that_is_no_class_on_a_gpu():
    """The loss is NaN, and the next call raises."""
    model = Head(mean).cuda()
    x, labels = batch(torch.float32, device="cuda")
    call = compiled(model)
    labels[7] = CLASSES
    assert call(x, labels).isnan()
    with pytest.raises(IndexError, match="Target is out of bounds: found by an earlier step"):
        call(x, labels)


# ---- what stays as it is


def focal(model, hidden, labels):
    """Gradients of rows depend on losses of rows."""
    losses = F.cross_entropy(model.head(hidden), labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def none(model, hidden, labels):
    return F.cross_entropy(model.head(hidden), labels, reduction="none")


def apart(model, hidden, labels):
    """Two losses of which each may have a gradient of its own."""
    logits = model.head(hidden)
    return F.cross_entropy(logits, labels), logits.logsumexp(-1).square().mean()


def capped_twice(model, hidden, labels):
    logits = torch.tanh(torch.tanh(model.head(hidden) / 4) * 4 / 3) * 3
    return F.cross_entropy(logits, labels)


def scaled(model, hidden, labels):
    return F.cross_entropy(torch.tanh(model.head(hidden)) * 3, labels)


def scaled_otherwise(model, hidden, labels):
    return F.cross_entropy(torch.tanh(model.head(hidden) / 2) * 3, labels)


def z_loss_of_rows_of_the_loss(model, hidden, labels):
    """Rows that are cut off have no part in it."""
    logits = model.head(hidden.view(4, -1, WIDTH))[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.view(4, -1)[:, 1:].flatten())
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


def capped_elsewhere(model, hidden, labels):
    logits = model.head(hidden)
    return F.cross_entropy(torch.tanh(logits / 3) * 3, labels), logits


def entropy(model, hidden, labels):
    """Logits are differentiated in another way too."""
    logits = model.head(hidden)
    return F.cross_entropy(logits, labels) - logits.softmax(-1).square().sum(-1).mean()


@pytest.mark.parametrize(
    "make",
    [
        focal, none, apart, entropy, capped_twice, scaled, scaled_otherwise, capped_elsewhere,
        z_loss_of_rows_of_the_loss,
    ],
)  # fmt: skip
def test_other_uses_of_logits_stay(make):
    torch.manual_seed(0)
    model = Head(make)
    x, labels = batch(torch.float32)
    assert chunked_nodes(model, x, labels) == 0


def test_a_factor_that_is_not_the_caps_stays_without_gradients():
    """No gradient, whose factors are compared as well, tells the two apart."""
    with torch.no_grad():
        assert chunked_nodes(Head(scaled_otherwise), *batch(torch.float32)) == 0


def test_small_losses_stay():
    model = Head(mean)
    x, labels = batch(torch.float32, 100)
    assert chunked_nodes(model, x, labels) == 0


@pytest.mark.parametrize("disable", ["chunk_losses", "own_kernels"])
def test_it_can_be_switched_off(disable, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", disable)
    assert chunked_nodes(Head(mean), *batch(torch.float32)) == 0
