"""Values that backward rebuilds instead of saving them: numbers, bytes, and what autograd sees."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_as_exact_as_eager, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torch_ort
from torch_ort.engine import watchers
from torch_ort.reports.report import GraphReport

pytestmark = pytest.mark.ort_only
WIDTH, INNER, WORDS = 32, 64, 80
EDITED = "modified by an inplace operation"


class Gated(nn.Module):
    """A gated feed-forward behind an RMS norm, as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(self.down(F.silu(self.gate(x)) * self.up(x)))
        return normal + x


class Activated(nn.Module):
    """A norm of an activation, of which some is dropped."""

    def __init__(self, drop: float = 0) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(WIDTH, INNER),
            nn.LayerNorm(INNER),
            nn.Linear(INNER, 8),
        )
        self.drop = nn.Dropout(drop) if drop else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.drop(F.gelu(self.first(x)))))


class Predicting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        labels = (x.detach()[..., 0].abs() * 10).long() % WORDS
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated": Gated, "activated": Activated, "predicting": Predicting,
}  # fmt: skip


EPS_IS_A_TENSOR = pytest.mark.hands_over("Dynamo gives the norm's eps as a tensor")


def compile_with(model: nn.Module, rebuilds: bool = True, **kwargs) -> Callable:
    options = {} if rebuilds else {"disable": "rebuild_values"}
    return torch.compile(model, backend="ort", options=options, **kwargs)


def report_of(model: nn.Module, x: Tensor, rebuilds: bool = True) -> GraphReport:
    options = {} if rebuilds else {"disable": "rebuild_values"}
    return torch_ort.explain(model, x, options=options).graphs[0]


def rewrites(report: GraphReport) -> int:
    return {name: count for name, count, _ in report.passes}.get("rebuild_values", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["gated", pytest.param("activated", marks=EPS_IS_A_TENSOR), "predicting"]
)
def test_numbers_and_gradients_for_several_sizes(name: str, dtype: torch.dtype) -> None:
    """One graph with symbolic sizes; eager PyTorch in float64 is what both are measured against."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    compiled = compile_with(copy.deepcopy(model), dynamic=True)
    before = torch_ort.counters()["graphs_compiled"]
    for batch, length in [(2, 5), (3, 64), (4, 17)]:
        x = torch.randn(batch, length, WIDTH).to(dtype)
        assert_as_exact_as_eager(model, compiled, x)
    assert torch_ort.counters()["graphs_compiled"] == before + 1


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_saved_values(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 17, WIDTH)
    results = [gradients(compile_with(model, rebuilds), x) for rebuilds in (True, False)]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        # silu(gate), its product with up, which down's gradient reads, and rows by their norm
        ("gated", 4 * (2 * INNER + WIDTH)),
        # gelu(...), which its own gradient rebuilds
        ("activated", 4 * INNER),
    ],
)
def test_fewer_bytes_cross(name: str, saved: int) -> None:
    model, x = MODELS[name](), torch.randn(4, 64, WIDTH, requires_grad=True)
    kept, rebuilt = report_of(model, x, rebuilds=False), report_of(model, x)
    assert rewrites(kept) == 0 < rewrites(rebuilt)
    assert kept.plan["saved_bytes"] - rebuilt.plan["saved_bytes"] == 4 * 64 * saved


def test_the_loss_writes_no_log_probabilities() -> None:
    """Logits cross instead, which the product wrote, and their gradient takes their place."""
    x = torch.randn(4, 64, WIDTH, requires_grad=True)
    kept, rebuilt = report_of(Predicting(), x, rebuilds=False), report_of(Predicting(), x)
    logits = 4 * 4 * 64 * WORDS
    assert kept.bytes_after - rebuilt.bytes_after > 0.9 * logits
    rows = 2 * 4 * 4 * 64  # the largest logit, and the logarithm of the sum
    assert rebuilt.plan["saved_bytes"] <= kept.plan["saved_bytes"] + rows
    assert rebuilt.plan["peak_bytes"] <= kept.plan["peak_bytes"] + rows


class Tail(nn.Module):
    """An output, `y`, that backward reads, and an input that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.mix(x)
        y = hidden.sigmoid() * hidden
        return y * 1.0, (y + z).tanh() * y


@pytest.mark.parametrize("which", ["first output", "second output", "x", "z", "weight", "bias"])
def test_edits_in_place_raise_as_in_eager(which: str) -> None:
    torch.manual_seed(0)

    def outcome(compiles: bool) -> tuple[str, list[Tensor | None]]:
        torch.manual_seed(1)
        model = Tail()
        call = compile_with(model) if compiles else model
        x = torch.randn(4, WIDTH, requires_grad=True)
        z = torch.randn(4, WIDTH)
        first, second = call(x, z)
        total = first.sum() + (second * second).sum()
        edited = {
            "first output": first, "second output": second, "x": x, "z": z,
            "weight": model.mix.weight, "bias": model.mix.bias,
        }[which]  # fmt: skip
        with torch.no_grad():
            edited.mul_(2)
        message = ""
        try:
            total.backward()
        except RuntimeError as error:
            message = str(error)
        return message, [x.grad, model.mix.weight.grad]

    (want, eager), (got, ours) = outcome(compiles=False), outcome(compiles=True)
    assert (EDITED in want) == bool(want)
    assert (EDITED in got) == bool(got) == bool(want)
    if not want:
        torch.testing.assert_close(ours, eager)


def test_dropped_values_are_rebuilt_with_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    torch.manual_seed(0)
    model, x = Activated(drop=0.3), torch.randn(4, 16, WIDTH)
    results = []
    for rebuilds in (True, False):
        call = compile_with(model, rebuilds)
        torch.manual_seed(5)
        results.append(gradients(call, x))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert rewrites(report_of(model, x.requires_grad_())) > 0


@pytest.mark.hands_over("a checkpoint")
def test_what_a_checkpoint_policy_saves_is_saved() -> None:
    """silu(gate) would be rebuilt; a policy that names it has it cross."""
    aten = torch.ops.aten
    products = [aten.mm.default, aten.addmm.default]

    class Checkpointed(nn.Module):
        def __init__(self, saved: list) -> None:
            super().__init__()
            self.inner = Gated()
            self.context = functools.partial(create_selective_checkpoint_contexts, saved)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.context)

    x = torch.randn(4, 16, WIDTH, requires_grad=True)
    saved_bytes = []
    for saved in (products, [*products, aten.silu.default]):
        torch.manual_seed(0)
        model = Checkpointed(saved)
        saved_bytes.append(report_of(model, x).plan["saved_bytes"])
        want = gradients(model, x)
        for got, expected in zip(gradients(compile_with(model), x), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert saved_bytes[1] - saved_bytes[0] == 4 * 16 * 4 * INNER


class ManyGates(nn.Module):
    """Each activation is read twice by the next: 2 ** 40 ways lead from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x * x.sigmoid()
        return self.mix(x)


def test_what_a_value_is_made_of_is_visited_once() -> None:
    """Without that the pass would not come to an end."""
    model = ManyGates()
    wrapped = torch_ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(64, WIDTH)
    for got, want in zip(gradients(wrapped, x), gradients(model, x), strict=True):
        torch.testing.assert_close(got, want)


class Stream(nn.Module):
    """Layers that each add to what all before them have made, as transformers do."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + mix(norm(x))
        return x


def test_no_layer_reads_what_all_layers_before_it_have_made() -> None:
    """Under autocast what is added is shorter than the sum, which backward then makes again."""

    def most_inputs(depth: int) -> int:
        call = compile_with(Stream(depth))
        with watchers.watching() as programs, torch.autocast("cpu", torch.bfloat16):
            call(torch.randn(4, 16, WIDTH, requires_grad=True))
        nodes = [node for program in programs for node in program.graph.nodes()]
        return max(len(node["inputs"]) for node in nodes if node["op"] == "Region")

    assert most_inputs(6) == most_inputs(18) <= 12
