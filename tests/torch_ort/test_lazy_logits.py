"""Logits made at first read: what leaves, who may read it and when, against plain logits."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from linear_losses import CLASSES, NEAR, ROWS, WIDTH, num_rows
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ort
from torch_ort.steps.lazy_logits import LazyLogits

pytestmark = pytest.mark.usefixtures("kept_memory")


class Model(nn.Module):
    """Gives a loss of the logits that `make` gives, and what it makes of them then."""

    def __init__(self, make, bias: bool = True):
        super().__init__()
        self.make = make
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Tensor, labels: Tensor):
        logits, leaving = self.make(self, self.layer(x))
        loss = F.cross_entropy(logits, labels)
        return loss, leaving() if callable(leaving) else leaving


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def plain(model, hidden):
    logits = model.head(hidden)
    return logits, logits


def in_sequences(model, hidden):
    """As Hugging Face's models: the loss in float32, of logits by sequence."""
    logits = model.head(hidden.view(4, -1, WIDTH))
    return wide(logits).view(-1, CLASSES), logits


def capped(model, hidden):
    logits = torch.tanh(model.head(hidden) / 2) * 2
    return logits, logits


def in_float(model, hidden):
    """Rounded, and then wide again."""
    logits = model.head(hidden)
    return logits, lambda: wide(logits).view(2, -1, CLASSES)


def doubled(model, hidden):
    """Two forms of the same logits leave."""
    logits = model.head(hidden)
    return logits, lambda: (logits.view(2, -1, CLASSES), logits)


MAKES = (plain, in_sequences, capped, in_float)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def batch(dtype: torch.dtype = torch.float32, rows: int = 0) -> tuple[Tensor, Tensor]:
    rows = rows or num_rows(dtype)
    labels = torch.randint(0, CLASSES, (rows,))
    labels[::3] = -100
    return torch.randn(rows, WIDTH, dtype=dtype), labels


def compiled(model: nn.Module, **options):
    torch.compiler.reset()
    options = {"strict": True, "lazy_logits": True, **options}
    return torch.compile(model, backend="ort", options=options)


def is_made(logits: Tensor) -> bool:
    assert type(logits) is LazyLogits
    return logits._made is not None


def is_near(got: Tensor, want: Tensor, near: float) -> bool:
    return (got.double() - want).norm().item() <= near * want.norm().item()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


DEFAULT = [
    *((make, torch.float32, True) for make in MAKES),
    (plain, torch.float32, False),
    (in_float, torch.float32, False),
    (plain, torch.bfloat16, True),
    (in_sequences, torch.bfloat16, True),
    (in_float, torch.bfloat16, False),
]


@pytest.mark.parametrize(
    ("make", "dtype", "bias"),
    [
        pytest.param(
            make, dtype, bias, id=f"{make.__name__}-{dtype}-{bias}",
            marks=() if (make, dtype, bias) in DEFAULT else pytest.mark.slow,
        )
        for make, dtype, bias in itertools.product(MAKES, NEAR, (True, False))
    ],
)  # fmt: skip
def test_against_float64(make, dtype, bias):
    model = Model(make, bias).to(dtype)
    exact = copy.deepcopy(model).double()
    x, labels = batch(dtype)
    call = compiled(model)
    for _ in range(2):
        loss, logits = call(x, labels)
        loss.backward()
        assert not is_made(logits)
        want_loss, want = exact(x.double(), labels)
        want_loss.backward()
        assert logits.shape == want.shape
        is_wide = make is in_float and dtype != torch.float64
        assert logits.dtype == (torch.float32 if is_wide else dtype)
        assert is_near(logits.detach(), want.detach(), NEAR[dtype])
        assert is_near(loss.detach(), want_loss.detach(), NEAR[dtype])
        pairs = zip(gradients(model), gradients(exact), strict=True)
        assert all(is_near(*pair, NEAR[dtype]) for pair in pairs)
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("make", MAKES)
def test_gradients_come_through_logits(make):
    """Beside the loss, alone, not at all, and after backward has been planned for the loss."""
    model = Model(make)
    exact = copy.deepcopy(model).double()
    x, labels = batch()
    call = compiled(model)
    totals = [
        lambda loss, logits: loss + logits.square().mean(),
        lambda loss, logits: loss,
        lambda loss, logits: logits.square().mean(),
        lambda loss, logits: loss * 2 + (logits.float() * logits).sum() / 7,
    ]
    for total in totals:
        total(*call(x, labels)).backward()
        total(*exact(x.double(), labels)).backward()
        pairs = zip(gradients(model), gradients(exact), strict=True)
        assert all(is_near(*pair, 3e-6) for pair in pairs)
    assert torch_ort.counters()["fallbacks"] == 0


def test_logits_are_differentiated_by_themselves():
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)
    for ask in (
        lambda logits, g: logits.backward(g),
        lambda logits, g: torch.autograd.backward([logits], [g]),
        lambda logits, g: torch.autograd.backward(logits.made(), g),
    ):
        ask(call(x, labels)[1], torch.ones(ROWS, CLASSES))
        got = gradients(model)
        model(x, labels)[1].sum().backward()
        pairs = zip(got, gradients(model), strict=True)
        assert all(is_near(*pair, 3e-5) for pair in pairs)


def saved(logits: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    return torch.load(file)["logits"]


def written(logits: Tensor) -> Tensor:
    logits = logits.detach()
    logits[:, 3] = 7
    logits += 1
    return logits


READS = {
    "argmax": lambda x: x.argmax(-1),
    "functional": lambda x: F.softmax(x, -1),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "numpy": lambda x: x.detach().numpy(),
    "cpu numpy": lambda x: x.detach().cpu().numpy(),
    "array": lambda x: np.asarray(x.detach()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "tolist": lambda x: x[0].tolist(),
    "item": lambda x: x[0, 0].item(),
    "index": lambda x: x[..., 1:3],
    "mask": lambda x: x[x > 0],
    "iterate": lambda x: list(x)[1],
    "second operand": lambda x: 1 - torch.ones(CLASSES) * x,
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(0)),
    "list": lambda x: torch.cat([x, x[:1]]),
    "equal": lambda x: x == x,
    "print": lambda x: repr(x.detach()),
    "format": lambda x: f"{x[0, 0]}",
    "save": saved,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "copy": lambda x: copy.copy(x.detach()),
    "write": written,
    "storage": lambda x: x.untyped_storage().nbytes(),
    "strides": lambda x: (x.stride(), x.is_contiguous(), x.storage_offset()),
    "C++": lambda x: torch.ops.aten.sum.default(x),
}


@pytest.mark.parametrize("with_grad", [True, False])
def test_every_read_is_one_of_plain_logits(with_grad):
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)
    with torch.set_grad_enabled(with_grad):
        made = call(x, labels)[1].clone()
        torch.testing.assert_close(made, model(x, labels)[1], rtol=1e-4, atol=1e-5)
        for name, read in READS.items():
            _, logits = call(x, labels)
            assert not is_made(logits), name
            assert_same_read(name, read(logits), read(made.clone()))


def assert_same_read(name: str, got: object, want: object) -> None:
    assert type(got) is type(want), name
    if isinstance(got, Tensor):
        assert got.requires_grad == want.requires_grad, name
        assert got.dtype == want.dtype, name
    if isinstance(got, np.ndarray):
        got, want = torch.from_numpy(got), torch.from_numpy(want)
    if isinstance(got, Tensor) and torch.equal(got, want):  # quicker than to ask what is close
        return
    if isinstance(got, Tensor | list | float) and name not in ("argmax", "mask"):
        torch.testing.assert_close(
            got, want, rtol=1e-4, atol=1e-5, msg=lambda words: f"{name}: {words}"
        )
    elif isinstance(got, tuple | int):
        assert got == want, name


def test_what_asks_for_the_form_makes_nothing():
    model = Model(in_sequences)
    x, labels = batch()
    _, logits = compiled(model)(x, labels)
    _, want = model(x, labels)
    assert isinstance(logits, Tensor)
    assert logits.shape == logits.size() == want.shape
    assert (logits.size(-1), len(logits), logits.dim(), logits.ndim) == (CLASSES, 4, 3, 3)
    assert (logits.numel(), logits.nbytes, logits.itemsize) == (want.numel(), want.nbytes, 4)
    assert (logits.dtype, logits.device, logits.layout) == (want.dtype, want.device, want.layout)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.grad_fn is not None
    assert logits.is_floating_point()
    assert torch.is_tensor(logits)
    assert hash(logits) == id(logits)
    assert not is_made(logits)


def test_it_is_made_once():
    _, logits = compiled(Model(plain))(*batch())
    first = logits.detach()
    assert is_made(logits)
    assert logits.data_ptr() == first.data_ptr() == logits.detach().data_ptr()


def test_edits_stay():
    model = Model(plain)
    x, labels = batch()
    _, logits = compiled(model)(x, labels)
    logits.mul_(2)
    logits[:, 0] = 1
    want = model(x, labels)[1] * 2
    assert torch.equal(logits[:, 0], torch.ones(ROWS))
    torch.testing.assert_close(logits[:, 1:], want[:, 1:])
    logits.square().sum().backward()
    got = gradients(model)
    want[:, 1:].square().sum().backward()
    assert all(is_near(*pair, 1e-5) for pair in zip(got, gradients(model), strict=True))


def test_hooks_get_the_gradient_that_comes_through_logits():
    model = Model(plain)
    _, logits = compiled(model)(*batch())
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    assert not is_made(logits)
    logits.sum().backward()
    assert seen == [ROWS * CLASSES]
    _, logits = compiled(model)(*batch())
    logits.retain_grad()
    logits.sum().backward()
    assert torch.equal(logits.grad, torch.ones(ROWS, CLASSES))


def test_only_leaves_are_copied_deeply():
    _, logits = compiled(Model(plain))(*batch())
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(logits)


MESSAGE = (
    r"lazy_logits: logits are made when they are first read, and of the layer that makes them {} "
    r"was written into \(version \d+, want \d+\) since; read them before .*, or leave the option "
    "lazy_logits off"
)


@pytest.mark.parametrize(("name", "words"), [("weight", "its weight"), ("bias", "its bias")])
def test_a_read_after_a_write_raises(name, words):
    model = Model(in_sequences)
    _, logits = compiled(model)(*batch())
    with torch.no_grad():
        getattr(model.head, name).add_(1)
    for _ in range(2):
        with pytest.raises(torch_ort.UserError, match=MESSAGE.format(words)):
            logits.argmax(-1)
    assert logits.shape == (4, ROWS // 4, CLASSES)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch_ort.optim.AdamW])
def test_a_read_after_a_step_raises(kind):
    model = Model(in_sequences)
    x, labels = batch()
    call, optimizer = compiled(model), kind(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss, logits = call(x, labels)
        loss.backward()
        _, before = model(x, labels)
        torch.testing.assert_close(logits.detach(), before.detach())  # after backward it may be
        _, unread = call(x, labels)
        optimizer.step()
        torch.testing.assert_close(logits.detach(), before.detach())  # it has been made
        with pytest.raises(torch_ort.UserError, match="its weight was written into"):
            unread.detach()
        optimizer.zero_grad()


def test_a_parameter_with_other_data_is_not_what_is_read():
    model = Model(plain)
    x, labels = batch()
    _, logits = compiled(model)(x, labels)
    _, want = model(x, labels)
    model.head.weight.data = torch.zeros_like(model.head.weight)
    torch.testing.assert_close(logits, want)


def test_a_weight_that_is_freed_raises():
    """As FSDP frees what it has gathered."""
    model = Model(plain)
    _, logits = compiled(model)(*batch())
    model.head.weight.data.untyped_storage().resize_(0)
    with pytest.raises(torch_ort.UserError, match="its weight was freed since"):
        logits.argmax()


@pytest.mark.parametrize(
    ("make", "mode"), [(make, torch.inference_mode) for make in MAKES] + [(plain, torch.no_grad)]
)
def test_without_gradients(make, mode):
    model = Model(make)
    x, labels = batch()
    with mode():
        loss, logits = compiled(model)(x, labels)
        want_loss, want = model(x, labels)
    assert not is_made(logits)
    assert not logits.requires_grad
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(logits.clone(), want.clone())


def test_what_is_read_under_other_modes():
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)
    _, want = model(x, labels)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        _, logits = call(x, labels)
        with mode:
            logits.argmax()
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, want)
        logits.sum().backward()  # the history is that of the call


def test_autocast():
    model = Model(in_sequences)
    x, labels = batch()
    call = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, logits = call(x, labels)
        _, want = model(x, labels)
    assert not is_made(logits)
    assert logits.dtype == torch.bfloat16
    assert is_near(logits.detach(), want.detach().double(), 1e-2)


def test_float_of_short_logits_stays_lazy():
    """Accelerate asks for it of all that a model in bfloat16 gives."""
    model = Model(in_sequences).bfloat16()
    exact = copy.deepcopy(model).double()
    x, labels = batch(torch.bfloat16)
    _, logits = compiled(model)(x, labels)
    given = logits.float()
    assert not is_made(logits)
    assert not is_made(given)
    assert given.dtype == torch.float32
    given.square().mean().backward()
    exact(x.double(), labels)[1].square().mean().backward()
    assert torch.equal(given, logits.clone().float())
    pairs = zip(gradients(model), gradients(exact), strict=True)
    assert all(is_near(*pair, 2e-2) for pair in pairs)


@pytest.mark.parametrize("make", [plain, in_sequences])
def test_dynamic_sizes(make):
    model = Model(make)
    torch.compiler.reset()
    options = {"strict": True, "lazy_logits": True}
    call = torch.compile(model, backend="ort", dynamic=True, options=options)
    for rows in (ROWS, 1000, 8, 1500):
        x, labels = batch(rows=rows)
        _, logits = call(x, labels)
        _, want = model(x, labels)
        assert not is_made(logits)
        assert logits.shape == want.shape
        torch.testing.assert_close(logits, want)


def test_ortmodule(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_LAZY_LOGITS", "1")
    model = Model(in_sequences)
    wrapped = torch_ort.ORTModule(copy.deepcopy(model))
    for rows in (ROWS, 1500):
        x, labels = batch(rows=rows)
        loss, logits = wrapped(x, labels)
        (loss + logits.square().mean()).backward()
        want_loss, want = model(x, labels)
        (want_loss + want.square().mean()).backward()
        torch.testing.assert_close(logits, want)
        pairs = zip(gradients(wrapped), gradients(model), strict=True)
        assert all(is_near(*pair, 3e-6) for pair in pairs)


def test_two_forms_of_logits():
    model = Model(doubled)
    x, labels = batch()
    loss, made = compiled(model)(x, labels)
    _, want = model(x, labels)
    for got, each in zip(made, want, strict=True):
        torch.testing.assert_close(got, each)
    (loss + made[0].mean() + made[1].square().mean()).backward()
    got = gradients(model)
    loss, made = model(x, labels)
    (loss + made[0].mean() + made[1].square().mean()).backward()
    assert all(is_near(*pair, 1e-5) for pair in zip(got, gradients(model), strict=True))


def test_two_calls_at_once_and_a_graph_that_is_kept():
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)
    first, second = call(x, labels), call(x + 1, labels)
    torch.testing.assert_close(second[1], model(x + 1, labels)[1])
    first[0].backward(retain_graph=True)
    first[1].sum().backward()
    got = gradients(model)
    loss, logits = model(x, labels)
    (loss + logits.sum()).backward()
    assert all(is_near(*pair, 1e-5) for pair in zip(got, gradients(model), strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "ort"])
def test_compiled_functions_take_them(backend, monkeypatch):
    """Dynamo leaves such a function to eager PyTorch."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model = Model(plain)
    x, labels = batch()
    _, logits = compiled(model)(x, labels)
    metric = torch.compile(lambda scores: scores.softmax(-1).square().sum(), backend=backend)
    want = model(x, labels)[1].softmax(-1).square().sum()
    torch.testing.assert_close(metric(logits), want)


def test_a_graph_break_behind_the_loss(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def breaks(model, hidden):
        logits, leaving = plain(model, hidden)
        return logits, leaving

    class Broken(Model):
        def forward(self, x, labels):
            loss, logits = super().forward(x, labels)
            torch._dynamo.graph_break()
            return loss, logits.argmax(-1), logits

    model = Broken(breaks)
    x, labels = batch()
    _, best, logits = compiled(model, strict=False)(x, labels)
    _, want_best, want = model(x, labels)
    assert (best == want_best).float().mean() > 0.99
    torch.testing.assert_close(logits, want)


def test_gradients_that_are_differentiated():
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)

    def second(run):
        given = x.clone().requires_grad_()
        _, logits = run(given, labels)
        (gradient,) = torch.autograd.grad(logits.square().mean(), given, create_graph=True)
        gradient.square().sum().backward()
        return [given.grad, *gradients(model)[:3]]

    for _ in range(2):
        assert all(is_near(*pair, 1e-5) for pair in zip(second(call), second(model), strict=True))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_take_them(process_group):
    model = Model(plain)
    x, labels = batch()
    call = compiled(model)
    want = model(x, labels)[1].detach()
    gathered = [torch.empty_like(want)]
    dist.all_gather(gathered, call(x, labels)[1])
    torch.testing.assert_close(gathered[0], want)
    logits = call(x, labels)[1]
    with torch.no_grad():
        dist.all_reduce(logits)
    torch.testing.assert_close(logits.detach(), want)


def largest_of_plan(folder: Path) -> int:
    (text,) = [path.read_text() for path in folder.glob("*_plan.txt")]
    rows = [line.split() for line in text.splitlines()[1:]]
    return max(int(row[4]) for row in rows if row[1] != "input")


def test_logits_take_no_memory(tmp_path):
    x, labels = batch()
    sizes = []
    for lazy in (False, True):
        folder = tmp_path / str(lazy)
        call = compiled(Model(plain), lazy_logits=lazy, dump=("plan",), dump_dir=str(folder))
        call(x, labels)
        sizes.append(largest_of_plan(folder))
    assert sizes[0] == 4 * ROWS * CLASSES
    assert sizes[1] < sizes[0] / 2


def test_under_a_memory_budget():
    model = Model(in_sequences)
    x, labels = batch()
    loss, logits = compiled(model, memory_budget=1.0)(x, labels)
    loss.backward()
    torch.testing.assert_close(logits, model(x, labels)[1])
    assert is_made(logits)


# ---- what stays as it is


def best(model, hidden):
    """The graph reads logits too."""
    logits = model.head(hidden)
    return logits, lambda: (logits, logits.argmax(-1))


def sliced(model, hidden):
    logits = model.head(hidden)
    return logits, lambda: logits[5:]


def scaled(model, hidden):
    logits = F.linear(hidden, model.head.weight * 2)
    return logits, logits


@pytest.mark.parametrize("make", [best, sliced, scaled])
def test_other_logits_are_made_in_the_step(make):
    model = Model(make)
    x, labels = batch()
    _, made = compiled(model)(x, labels)
    logits = made[0] if isinstance(made, tuple) else made
    assert type(logits) is Tensor


@pytest.mark.parametrize(
    "options",
    [
        {"lazy_logits": False},
        {"disable": ("lazy_logits",)},
        {"disable": ("chunk_losses",)},
        {"disable": ("own_kernels",)},
        {"disable": ("recorder",)},
        {"enable_compute_optimizer": False},
        {"emulate_eager_casts": True},
    ],
    ids=str,
)
def test_it_can_be_switched_off(options):
    model = Model(plain)
    x, labels = batch()
    loss, logits = compiled(model, **options)(x, labels)
    assert type(logits) is Tensor
    loss.backward()
    torch.testing.assert_close(logits, model(x, labels)[1])


def test_it_is_off_unless_asked_for():
    torch.compiler.reset()
    _, logits = torch.compile(Model(plain), backend="ort")(*batch())
    assert type(logits) is Tensor


def test_small_losses_stay():
    _, logits = compiled(Model(plain))(*batch(rows=100))
    assert type(logits) is Tensor
