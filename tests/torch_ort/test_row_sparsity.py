"""Rows that nobody reads are not computed: losses and gradients against eager PyTorch in float64.

Memory is spoilt before results are written into it (`check=1`), so that a row which is read and was
not computed shows as NaN.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ort
from torch_ort.engine import watchers

LABELS, PADDING = "enable_label_sparse_optimizer", "enable_embedding_sparse_optimizer"
BATCH, LENGTH, WIDTH, WORDS, IGNORED = 4, 9, 8, 11, -100
CHECKED = {"check": 1}


class Block(nn.Module):
    """A block of an encoder, with its norms behind the sublayers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.pack = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, length, _ = x.shape
        packed = self.pack(x).view(batch, length, 3, 2, WIDTH // 2)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=self.dropout.p, is_causal=is_causal
        )
        x = self.norms[0](x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return self.norms[1](x + self.dropout(self.feed(x)))


class SharedKeys(Block):
    """One head of keys and values for both of queries, behind a cache that has nothing yet."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.pack = nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, length, _ = x.shape

        def heads_of(projection: nn.Linear, count: int) -> Tensor:
            heads = projection(x).view(batch, length, count, WIDTH // 2).transpose(1, 2)
            scale = torch.arange(1, length + 1)[:, None] / length
            heads = F.layer_norm(heads, heads.shape[-1:]) * scale
            heads = torch.cat([x.new_empty(0), heads], -2)
            return heads[:, :, None].expand(-1, -1, 2 // count, -1, -1).flatten(1, 2)

        query, key, value = heads_of(self.pack, 2), heads_of(self.keys, 1), heads_of(self.values, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        x = self.norms[0](x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.feed(x))


class Encoder(nn.Module):
    """`head` gives the loss, or what leaves, from the model, its last states and the labels."""

    def __init__(
        self, mask: Callable, head: Callable, dropout: float = 0.0, classes: int = WORDS
    ) -> None:
        super().__init__()
        self.make_mask, self.head = mask, head
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.classes = nn.Linear(WIDTH, classes)

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        mask = self.make_mask(words != 0, x.dtype)
        for block in self.blocks:
            is_named = isinstance(mask, str)  # Dynamo of torch 2.11 compares no tensor with a name
            x = block(x, None if is_named else mask, is_named and mask == "causal")
        return self.head(self, x, labels)


def of_truth(is_word: Tensor, dtype: torch.dtype) -> Tensor:
    return is_word[:, None, None]


def of_infinity(is_word: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_word.shape, dtype=dtype).masked_fill(~is_word, -torch.inf)[:, None, None]


def of_lowest(is_word: Tensor, dtype: torch.dtype) -> Tensor:
    return (~is_word)[:, None, None].to(dtype) * torch.finfo(dtype).min


def for_each_query(is_word: Tensor, dtype: torch.dtype) -> Tensor:
    shown = is_word[:, None, None] & torch.ones(2 * is_word.shape[-1:], dtype=torch.bool).tril()
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


def soft(is_word: Tensor, dtype: torch.dtype) -> Tensor:
    return (~is_word)[:, None, None].to(dtype) * -4


def causal(is_word: Tensor, dtype: torch.dtype) -> str:
    return "causal"


def nothing(is_word: Tensor, dtype: torch.dtype) -> str:
    return "none"


MASKS = {
    each.__name__: each
    for each in (of_truth, of_infinity, of_lowest, for_each_query, soft, causal, nothing)
}


def first(model: Encoder, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.classes(x[:, 0]), labels[:, 0].clamp(min=0))


def last(model: Encoder, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.classes(x[:, -1]), labels[:, 0].clamp(min=0), reduction="sum")


def labelled(model: Encoder, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.classes(x).flatten(0, 1), labels.flatten())


def with_logits(model: Encoder, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.classes(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits


def shifted(model: Encoder, x: Tensor, labels: Tensor) -> Tensor:
    """Each place tells the next one, as Hugging Face's models write it."""
    following = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(model.classes(x).flatten(0, 1), following.flatten())


def all_rows(model: Encoder, x: Tensor, labels: Tensor) -> Tensor:
    return (model.classes(x) * labels.clamp(min=0)[..., None]).square().mean()


HEADS = {each.__name__: each for each in (first, last, labelled, shifted, with_logits, all_rows)}


def words_of(lengths: list[int], left: bool = False) -> Tensor:
    words = torch.randint(1, WORDS, (len(lengths), LENGTH))
    for row, length in zip(words, lengths, strict=True):
        row[: LENGTH - length] = 0 if left else row[: LENGTH - length]
        row[length:] = row[length:] if left else 0
    return words


def labels_of(words: Tensor, part: float) -> Tensor:
    return torch.where(torch.rand(words.shape) < part, words, IGNORED)


def loss_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def gradients(model: nn.Module, run: Callable, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(run(*inputs))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(want)
    scale = max(w.nan_to_num().abs().max().item() for w in want[1:])
    for ours, exact in zip(got, want, strict=True):
        assert torch.equal(ours.isnan(), exact.isnan())
        error = (ours.double() - exact).nan_to_num().norm()
        assert error <= tolerance * (exact.nan_to_num().norm() + scale)


def assert_same_step(
    ours: nn.Module, compiled: Callable, exact: nn.Module, *inputs: Tensor, tolerance: float = 1e-5
) -> None:
    want = gradients(exact, exact, *inputs)
    assert_near(gradients(ours, compiled, *inputs), want, tolerance)


class Exact(nn.Module):
    """A model in float64, in eager PyTorch.

    Where a finite mask hides all keys, gradients of PyTorch's fused kernel are wrong by the number
    of keys (2.13): the logarithm of the sum is lost in the mask.
    """

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, *inputs: Tensor) -> Any:
        is_finite = self.model.make_mask in (of_lowest, for_each_query)
        with sdpa_kernel(SDPBackend.MATH) if is_finite else contextlib.nullcontext():
            return self.model(*inputs)


def both(model: Encoder) -> tuple[nn.Module, Callable, nn.Module]:
    ours = copy.deepcopy(model)
    return ours, torch.compile(ours, backend="ort", options=CHECKED), Exact(model)


def rewrites(model: nn.Module, *inputs: Tensor) -> int:
    report = torch_ort.explain(copy.deepcopy(model), *inputs)
    return sum(count for name, count, _ in report.graphs[0].passes if name == "row_sparsity")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_against_eager(mask: str, head: str) -> None:
    torch.manual_seed(0)
    ours, compiled, exact = both(Encoder(MASKS[mask], HEADS[head]))
    for lengths, part in (
        ([9, 3, 1, 5], 0.3), ([1, 1, 1, 1], 0.5), ([9] * 4, 1.0), ([2, 9, 9, 1], 0.1),
    ):  # fmt: skip
        words = words_of(lengths)
        assert_same_step(ours, compiled, exact, words, labels_of(words, part))
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("mask", ["of_truth", "of_infinity", "of_lowest", "for_each_query"])
def test_padding_on_the_left_and_sequences_without_a_word(mask: str) -> None:
    torch.manual_seed(1)
    ours, compiled, exact = both(Encoder(MASKS[mask], labelled))
    for words in (words_of([9, 3, 1, 5], left=True), words_of([4, 0, 9, 0]), words_of([0] * 4)):
        labels = labels_of(words, 0.5)
        assert_same_step(ours, compiled, exact, words, labels)


@pytest.mark.parametrize("mask", [of_truth, causal, nothing])
def test_losses_that_make_their_logits_themselves(mask: Callable) -> None:
    """So many classes that logits are made in chunks; of rows with a label alone."""
    torch.manual_seed(0)
    ours, compiled, exact = both(Encoder(mask, labelled, classes=300_000))
    for lengths, part in (([9, 3, 1, 5], 0.3), ([9] * 4, 1.0), ([9] * 4, 0.0)):
        words = words_of(lengths)
        labels = labels_of(words, part)
        assert_same_step(ours, compiled, exact, words, labels)
    (graph,) = torch_ort.explain(copy.deepcopy(ours), words, labels).graphs
    assert graph.nodes["torch_ort.LinearCrossEntropy"] == 1
    if mask is nothing:
        assert graph.nodes["torch_ort.Rows"] == 1


@pytest.mark.parametrize("head", [first, labelled, all_rows])
def test_operators_that_no_region_takes_stand_between_products(head: Callable) -> None:
    """The gradient of a ReLU between two products without bias is a node by itself."""
    model = Encoder(of_truth, head)
    for block in model.blocks:
        block.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.ReLU(),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        )
    words = words_of([9, 3, 5, 1])
    ours, compiled, exact = both(model)
    inputs = words, labels_of(words, 0.5)
    assert_near(gradients(ours, compiled, *inputs), gradients(exact, exact, *inputs))


def test_nothing_labelled() -> None:
    ours, compiled, exact = both(Encoder(of_truth, labelled))
    words = words_of([9, 3, 1, 5])
    labels = torch.full_like(words, IGNORED)
    want = gradients(exact, exact, words, labels)
    assert want[0].isnan()
    assert_near(gradients(ours, compiled, words, labels), want)


@pytest.mark.parametrize("head", ["first", "labelled"])
def test_dropout_draws_by_the_place_of_a_row(head: str) -> None:
    torch.manual_seed(2)
    model = Encoder(of_truth, HEADS[head], dropout=0.3)
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.4)
    found = []
    for options in ({**CHECKED, "disable": ("row_sparsity",)}, CHECKED):
        each = copy.deepcopy(model)
        run = torch.compile(each, backend="ort", options=options)
        torch.manual_seed(3)
        found.append(gradients(each, run, words, labels))
    assert_near(found[1], [each.double() for each in found[0]])


@pytest.mark.parametrize(
    ("mask", "head", "wanted"),
    [
        (of_truth, first, 1),
        (of_lowest, labelled, 1),
        (causal, first, 1),
        (nothing, labelled, 1),
        (of_truth, all_rows, 1),
        (soft, all_rows, 1),  # whether it hides is told by each call
        (nothing, all_rows, 0),
        (causal, all_rows, 0),
    ],
)
def test_where_rows_are_left_out(mask: Callable, head: Callable, wanted: int) -> None:
    words = words_of([9, 3, 1, 5])
    assert rewrites(Encoder(mask, head), words, labels_of(words, 0.4)) == wanted


@pytest.mark.parametrize("mask", [of_truth, causal])
def test_labels_that_the_loss_copies_leave_rows_out_of_all_products(mask: Callable) -> None:
    words = words_of([9, 3, 1, 5])
    (graph,) = torch_ort.explain(Encoder(mask, shifted), words, labels_of(words, 0.4)).graphs
    assert graph.nodes["torch_ort.RowsProduct"] > 20
    assert graph.nodes["MatMul"] + graph.nodes["Gemm"] == 0


@pytest.mark.parametrize("mask", [of_truth, causal])
def test_one_head_of_keys_behind_an_empty_cache(mask: Callable) -> None:
    torch.manual_seed(0)
    model = Encoder(mask, shifted)
    model.blocks = nn.ModuleList(SharedKeys() for _ in range(2))
    ours, compiled, exact = both(model)
    for lengths in ([9, 3, 1, 5], [2, 9, 9, 1]):
        words = words_of(lengths)
        labels = labels_of(words, 0.4)
        assert_same_step(ours, compiled, exact, words, labels)
    (graph,) = torch_ort.explain(copy.deepcopy(ours), words, labels).graphs
    assert graph.nodes["torch_ort.RowsProduct"] > 20
    assert graph.nodes["MatMul"] + graph.nodes["Gemm"] == 0


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [({}, True), ({LABELS: False}, False), ({"disable": "row_sparsity"}, False)],
)
def test_rows_of_logits_that_get_no_gradient(options: dict, is_asked: bool) -> None:
    """It is expected that these get none beside a loss, and the backward half is planned so.

    Rows that count in no loss are NaN here, so that a product over all rows shows.
    """
    torch.manual_seed(0)
    model = Encoder(nothing, with_logits)
    with torch.no_grad():
        model.words.weight[WORDS - 1] = torch.nan
    compiled = torch.compile(model, backend="ort", options=options)
    words = torch.randint(1, WORDS - 1, (BATCH, LENGTH))
    words[1] = WORDS - 1
    labels = words.clone()
    labels[1] = IGNORED
    for _ in range(3):
        loss, *found = gradients(model, compiled, words, labels)
        assert loss.isfinite()
        assert found[-2].isfinite().all() == is_asked  # of the weight of the head
    assert compiled(words, labels)[1][1].isnan().all()
    (report,) = torch_ort.explain(model, words, labels).graphs
    assert "torch_ort.RowsProduct" not in report.nodes


class Keys(nn.Module):
    """One layer of attention whose keys leave beside the loss, as those of a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.pack = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.pack(self.words(words).tanh()).split(WIDTH, -1)
        heads = (part.view(*words.shape, 2, WIDTH // 2).transpose(1, 2) for part in parts)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return labelled(self, mixed.transpose(1, 2).flatten(2), labels), key


class WithoutKeys(Keys):
    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return super().forward(words, labels)[0]


def test_a_gradient_that_stands_in_no_region() -> None:
    torch.manual_seed(0)
    model = WithoutKeys()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort", options=CHECKED)
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.4)
    want = gradients(exact, exact, words, labels)
    assert_near(gradients(model, compiled, words, labels), want)
    (graph,) = torch_ort.explain(copy.deepcopy(model), words, labels).graphs
    assert graph.aten["aten::tanh_backward"] == 1
    assert graph.nodes["torch_ort.RowsProduct"] == 6


def test_keys_that_get_no_gradient_of_their_own() -> None:
    torch.manual_seed(0)
    model = Keys()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ort", options=CHECKED)
    words = words_of([9, 3, 1, 5])
    labels = torch.full_like(words, IGNORED)
    labels[0, 4] = labels[3, 1] = 2
    read = []
    with watchers.watching() as programs:
        for _ in range(3):
            want = gradients(exact, exact, words, labels)
            assert_near(gradients(model, compiled, words, labels), want)
            values = {row["name"] for row in programs[0].session.plan_table()}
            read.append("tangents_2" in values)
    assert read == [False, False, False]
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("head", [first, labelled])
def test_a_dropout_of_attention_leaves_as_many_rows_out(head: Callable, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    words = words_of([9, 3, 1, 5])
    products = []
    for dropout in (0.0, 0.3):
        torch.compiler.reset()  # else Dynamo makes an input of the probability
        model = Encoder(of_truth, head, dropout)
        (graph,) = torch_ort.explain(model, words, labels_of(words, 0.4)).graphs
        products.append(graph.nodes["torch_ort.RowsProduct"])
    assert products[0] == products[1] > 20


def sources(options: dict[str, Any], head: Callable = labelled) -> set[str]:
    """Give the kinds of what tells rows."""
    words, model = words_of([9, 3, 1, 5]), Encoder(of_truth, head)
    model.blocks = model.blocks[:1]
    report = torch_ort.explain(model, words, labels_of(words, 0.4), options=options)
    told = " ".join(word for each in report.graphs[0].row_lists for word in each.chosen_by)
    return {kind for kind in ("labels", "mask", "place 0") if kind in told}


@pytest.mark.parametrize(
    ("off", "of_labels", "of_places"),
    [
        ((), {"labels", "mask"}, {"mask", "place 0"}),
        ((LABELS,), {"mask"}, {"mask", "place 0"}),
        ((PADDING,), {"labels"}, {"place 0"}),
        ((LABELS, PADDING), set(), {"place 0"}),
        (("enable_sparse_optimizer",), set(), set()),
        (("enable_compute_optimizer",), set(), set()),
    ],
)
def test_switches_choose_what_tells_rows(
    off: tuple[str, ...], of_labels: set[str], of_places: set[str], monkeypatch
) -> None:
    options = dict.fromkeys(off, False)
    assert sources(options) == of_labels
    assert sources(options, first) == of_places
    for name in off:
        monkeypatch.setenv(f"ORTMODULE_{name.upper()}", "0")
    assert sources({}) == of_labels
    assert sources(dict.fromkeys(off, True)) == {"labels", "mask"}


@pytest.mark.parametrize("switch", [LABELS, PADDING])
@pytest.mark.parametrize("head", ["first", "labelled", "with_logits"])
def test_numbers_under_a_switch(head: str, switch: str) -> None:
    torch.manual_seed(6)
    model = Encoder(of_truth, HEADS[head])
    ours, _, exact = both(model)
    compiled = torch.compile(ours, backend="ort", options={**CHECKED, switch: False})
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.3)
    assert_same_step(ours, compiled, exact, words, labels)


@pytest.mark.parametrize("switch", ["enable_sparse_optimizer", LABELS])
def test_switches_of_an_ortmodule(switch: str) -> None:
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.4)
    kinds = []
    for options in ({}, {switch: False}):
        debug = torch_ort.DebugOptions(config=options)
        with watchers.watching() as programs:
            torch_ort.ORTModule(Encoder(nothing, labelled), debug)(words, labels)
        nodes = programs[0].graph.nodes()
        kinds.append({tuple(n["attrs"].get("kinds", [])) for n in nodes if n["op"] == "Rows"})
    assert kinds == [{("labels",)}, set()]


def test_the_report_tells_rows_and_density() -> None:
    words = words_of([9, 3, 1, 5])
    labels = torch.full_like(words, IGNORED)
    labels[0, 2] = labels[1, :2] = labels[3, 4] = 1
    report = torch_ort.explain(Encoder(of_truth, labelled), words, labels)
    (graph,) = report.graphs
    counts = {(each.count, each.num_rows) for each in graph.row_lists}
    # Labelled places alone; words; of the last block queries up to the last label of a sequence.
    assert {(4, 36), (18, 36)} <= counts
    alone = next(each for each in graph.row_lists if each.count == 4)
    assert alone.density == 4 / 36
    assert alone.chosen_by[0].startswith("the labels ")
    assert alone.chosen_by[0].endswith(" that are not -100")
    assert alone.readers["torch_ort.RowsProduct"] > 0
    assert any(origin.startswith("test_row_sparsity.py:") for origin in alone.origins)
    text = str(report)
    assert graph.rows_text() in text
    assert "  rows computed: 4 of 36 (11.11%), chosen by the labels " in text
    assert "  rows computed: 18 of 36 (50.00%), chosen by the keys that the mask of " in text


def test_the_report_of_a_graph_that_computes_all_rows() -> None:
    words = words_of([9, 3, 1, 5])
    report = torch_ort.explain(Encoder(nothing, all_rows), words, labels_of(words, 0.4))
    assert report.graphs[0].row_lists == []
    assert report.graphs[0].rows_text() == ""
    assert "rows computed" not in str(report)


def test_the_report_has_no_lists_of_all_rows() -> None:
    """Attention reads one for its queries where a mask hides keys and all places are read."""
    words = words_of([9, 3, 1, 5])
    report = torch_ort.explain(Encoder(of_truth, all_rows), words, labels_of(words, 0.4))
    (graph,) = report.graphs
    assert {each.count for each in graph.row_lists} == {18}
    assert graph.nodes["torch_ort.Rows"] > len(graph.row_lists)
    assert graph.rows_text() in str(report)


def test_labels_out_of_range_raise_beside_rows_that_are_left_out() -> None:
    _, compiled, exact = both(Encoder(of_truth, labelled))
    words = words_of([9, 3, 1, 5])
    labels = torch.full_like(words, IGNORED)
    labels[1, 1] = WORDS
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        exact(words, labels)
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        compiled(words, labels)


def test_ids_out_of_range_raise_in_rows_that_are_left_out() -> None:
    class Model(Encoder):
        def forward(self, words: Tensor, labels: Tensor) -> Tensor:
            x = self.words(words) + self.places.weight[: words.shape[1]]
            for block in self.blocks:
                x = block(x, (labels != 0)[:, None, None], False)
            return first(self, x, labels)

    _, compiled, _ = both(Model(of_truth, first))
    words, labels = words_of([9, 3, 1, 5]), words_of([9, 3, 1, 5])
    compiled(words, labels)
    words[2, 8] = WORDS
    with pytest.raises(IndexError, match="index out of range in self"):
        compiled(words, labels)


def test_two_calls_at_once_and_sizes_that_change() -> None:
    torch.manual_seed(4)
    ours, compiled, exact = both(Encoder(of_truth, labelled))
    batches = []
    for lengths in ([9, 3, 1, 5], [2, 2, 9], [7, 1, 1, 1, 4]):
        words = words_of(lengths)
        batches.append((words, labels_of(words, 0.5)))
    for earlier, later in itertools.pairwise(batches):
        for model, run in ((ours, compiled), (exact, exact)):
            model.zero_grad()
            losses = [run(*earlier), run(*later)]
            losses[0].backward()
            losses[1].backward()
        got, want = ([p.grad for p in model.parameters()] for model in (ours, exact))
        assert_near(got, want)
    with torch.no_grad():
        assert torch.allclose(compiled(*batches[0]).double(), exact(*batches[0]), rtol=1e-5)


def test_backward_twice_and_of_logits_alone() -> None:
    ours, compiled, exact = both(Encoder(of_truth, with_logits))
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.4)
    for backward in (
        lambda loss, logits: [loss.backward(retain_graph=True), loss.backward()],
        lambda loss, logits: logits.square().mean().backward(),
        lambda loss, logits: (loss + logits.square().mean()).backward(),
    ):
        for model, run in ((ours, compiled), (exact, exact)):
            model.zero_grad()
            backward(*run(words, labels))
        got, want = ([p.grad for p in model.parameters()] for model in (ours, exact))
        assert_near(got, want)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH),
    part=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    mask=st.sampled_from([of_truth, of_lowest, for_each_query]),
    head=st.sampled_from([first, labelled]),
    seed=st.integers(0, 1000),
)
def test_random_lengths_and_labels(
    lengths: list[int], part: float, mask: Callable, head: Callable, seed: int
) -> None:
    torch.manual_seed(seed)
    ours, compiled, exact = both(Encoder(mask, head))
    words = words_of(lengths)
    labels = labels_of(words, part)
    assert_same_step(ours, compiled, exact, words, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    model = Encoder(of_truth, labelled)
    ours, _, exact = both(model)
    ours = ours.to(dtype)
    exact.model.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, backend="ort", options=CHECKED)
    words = words_of([9, 3, 1, 5])
    labels = labels_of(words, 0.5)
    assert_same_step(ours, compiled, exact, words, labels, tolerance=0.05)


def test_a_profile_counts_what_products_of_listed_rows_compute() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 100)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.hidden(x))), labels)

    labels = torch.tensor([IGNORED] * 24 + [3] * 8)
    result = torch_ort.profile(Classifier(), torch.randn(32, 64), labels)
    products = {step.sizes: step for step in result.steps if step.op == "torch_ort.RowsProduct"}
    flops = {sizes: step.flops for sizes, step in products.items()}
    # The weight gradients sum over the eight rows; x needs no gradient.
    head, hidden = 2 * 8 * 64 * 100, 2 * 8 * 64 * 64
    assert flops == {
        "8×64×64": hidden, "8×64×100": head, "8×100×64": head, "100×8×64": head, "64×8×64": hidden,
    }  # fmt: skip
    assert {step.kind for step in products.values()} == {"products"}
