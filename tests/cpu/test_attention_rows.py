"""Attention of sequences that lists of rows make shorter, by the engine's kernels.

What stands behind the end of a sequence holds NaN. Results are compared with eager PyTorch in
float64, a sequence at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_ort
from tests.cpu.regions import ISAS, REAL, read, type_text
from torch_ort import _C

TOLERANCE = {
    torch.float32: 3e-6,
    torch.float64: 1e-14,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


def list_of(lengths: list[int], longest: int, all_places: bool = True) -> Tensor:
    """List the first rows of each sequence, or the last one of them alone."""
    rows = [
        batch * longest + place
        for batch, length in enumerate(lengths)
        for place in range(0 if all_places else max(length - 1, 0), length)
    ]
    rest = [2**62] * (len(lengths) * longest - len(rows))
    return torch.tensor([len(rows), *rows, *rest])


@dataclass
class Case:
    """Heads of a batch, and how long its sequences are."""

    queries: int
    keys: int
    of_queries: list[int]
    of_keys: list[int]
    features: int = 20
    heads: int = 4
    key_heads: int = 4
    dtype: torch.dtype = torch.float32
    mask: Tensor | None = None
    kept: Tensor | None = None
    seed: Tensor | None = None
    attrs: dict[str, float] = field(default_factory=dict)
    all_places: bool = True
    isa: str = ""

    def __post_init__(self) -> None:
        batch = len(self.of_queries)
        if self.mask is not None and self.dtype == torch.float64:
            self.mask = self.mask.double()

        def heads(length: int, count: int, lengths: list[int]) -> Tensor:
            x = torch.randn(batch, length, count, self.features, dtype=torch.float64)
            for each, end in zip(x, lengths, strict=True):
                each[end:] = math.nan
            return x.to(self.dtype).transpose(1, 2)

        self.query = heads(self.queries, self.heads, self.of_queries)
        self.grad = heads(self.queries, self.heads, self.of_queries)
        self.key = heads(self.keys, self.key_heads, self.of_keys)
        self.value = heads(self.keys, self.key_heads, self.of_keys)

    def run(self, has_rows: bool = True) -> list[Tensor]:
        """Give result, logarithms, and gradients of query, key, value and scores."""
        heads = {"q": self.query, "k": self.key, "v": self.value}
        rest = {"mask": self.mask, "kept": self.kept, "seed": self.seed}
        if has_rows:
            rest["qr"] = list_of(self.of_queries, self.queries, self.all_places)
            rest["kr"] = list_of(self.of_keys, self.keys, self.all_places)
        rest = {name: value for name, value in rest.items() if value is not None}
        result, logarithms = self.call("Attention", heads | rest, [self.query], has_rows)
        operands = {"g": self.grad, **heads, "l": logarithms, **rest}
        scores = self.query.new_empty(*self.query.shape[:3], self.keys)
        results = [self.query, self.key, self.value, scores]
        return [result, logarithms, *self.call("AttentionGrad", operands, results, has_rows)]

    def call(
        self, op: str, operands: dict[str, Tensor], like: list[Tensor], has_rows: bool
    ) -> list[Tensor]:
        inputs = {name: type_text(value.dtype, value.shape) for name, value in operands.items()}
        types = {f"y{i}": type_text(x.dtype, x.shape) for i, x in enumerate(like)}
        if op == "Attention":
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            types["logarithms"] = type_text(dtype, self.query.shape[:3])
        attrs = ", ".join(
            f"{name} = {value}"
            for name, value in [*self.attrs.items(), ("has_rows", int(has_rows))]
        )
        node = f"{', '.join(types)} = torch_ort.{op} <{attrs}> ({', '.join(operands)})"
        graph = read(inputs, [node], list(types), types=types)
        graph.verify("test")
        return list(_C.run(graph, operands, _C.SessionOptions(isa=self.isa)).values())

    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.of_queries, self.of_keys, strict=True))

    def parts(self, results: list[Tensor], batch: int) -> list[Tensor]:
        """Give what the results have of one sequence."""
        queries, keys = self.lengths()[batch]
        ends = [queries, queries, queries, keys, keys, queries]
        parts = [x[batch, :, :end] for x, end in zip(results, ends, strict=True)]
        return [*parts[:-1], parts[-1][..., :keys]]

    def exact(self, batch: int) -> list[Tensor]:
        queries, keys = self.lengths()[batch]
        q, k, v = (
            x[batch, :, :end].double().requires_grad_()
            for x, end in [(self.query, queries), (self.key, keys), (self.value, keys)]
        )
        repeats = self.heads // self.key_heads
        wide_k, wide_v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ wide_k.transpose(-1, -2) / math.sqrt(self.features)
        if self.mask is not None:
            scores = scores + self.mask.double()[batch, :, :queries, :keys]
        if self.attrs.get("is_causal"):
            seen = torch.ones(queries, keys, dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        weights = scores.softmax(-1)
        if self.kept is not None:
            weights = weights * self.kept[batch, :, :queries, :keys] / self.attrs["keep"]
        result = weights @ wide_v
        gradients = torch.autograd.grad(
            result, (q, k, v, scores), self.grad[batch, :, :queries].double(),
            materialize_grads=True,
        )  # fmt: skip
        return [result.detach(), scores.detach().logsumexp(-1), *gradients]

    def check(self) -> list[Tensor]:
        results = self.run()
        for batch in range(len(self.of_queries)):
            for mine, want in zip(self.parts(results, batch), self.exact(batch), strict=True):
                size = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0
                atol = TOLERANCE[self.dtype] * max(size, 1)
                torch.testing.assert_close(mine.double(), want, rtol=0, atol=atol)
        return results


LENGTHS = {
    "all": ([70, 70, 70], [53, 53, 53]),
    "some": ([70, 1, 49], [53, 17, 32]),
    "none of one": ([33, 0, 70], [20, 0, 53]),
    "queries none": ([0, 0, 0], [20, 53, 1]),
    "shared": ([48, 20, 10], [1, 16, 48]),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, dtype, isa):
    torch.manual_seed(0)
    Case(70, 53, *LENGTHS[lengths], dtype=dtype, isa=isa).check()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_only_the_last_place_counts(lengths):
    torch.manual_seed(1)
    case = Case(70, 53, *LENGTHS[lengths])
    every = case.run()
    case.all_places = False
    last = case.run()
    for batch in range(3):
        for a, b in zip(case.parts(every, batch), case.parts(last, batch), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_causal(dtype):
    torch.manual_seed(2)
    lengths = [60, 1, 49]
    Case(60, 60, lengths, lengths, dtype=dtype, attrs={"is_causal": 1}).check()
    Case(1100, 1100, [1100, 300], [1100, 300], heads=1, key_heads=1, attrs={"is_causal": 1}).check()


@pytest.mark.parametrize("causal", [0, 1])
def test_masks(causal):
    torch.manual_seed(3)
    mask = torch.randn(3, 1, 60, 60).masked_fill(torch.rand(3, 1, 60, 60) < 0.3, -math.inf)
    mask[..., 0] = 0  # each query sees a key
    lengths = [60, 7, 40]
    attrs = {"is_causal": causal}
    Case(60, 60, lengths, lengths, mask=mask, attrs=attrs).check()
    # Of no key that takes part: nothing is left, and there is no gradient.
    hidden = torch.zeros(3, 1, 60, 60)
    hidden[1, :, 2, :7] = -math.inf
    case = Case(60, 60, lengths, lengths, mask=hidden, attrs=attrs)
    result, logarithms, *gradients = case.parts(case.run(), 1)
    assert not result[:, 2].any()
    assert (logarithms[:, 2] == -math.inf).all()
    assert not gradients[0][:, 2].any()
    assert all(each.isfinite().all() for each in gradients)


def test_queries_without_keys_give_zeros():
    torch.manual_seed(4)
    case = Case(20, 30, [20, 9], [30, 0])
    result, _, of_query, of_key, of_value, _ = case.parts(case.run(), 1)
    assert not result.any()
    assert not of_query.any()
    assert of_key.numel() == of_value.numel() == 0


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_heads_that_share_keys(dtype):
    torch.manual_seed(5)
    Case(40, 50, [40, 13], [9, 50], heads=6, key_heads=2, dtype=dtype).check()


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("causal", [0, 1])
def test_dropout_of_truth_values(causal, dtype):
    torch.manual_seed(6)
    kept = torch.rand(3, 4, 60, 60) < 0.7
    attrs = {"keep": 0.7, "is_causal": causal}
    Case(60, 60, [60, 7, 40], [60, 7, 40], kept=kept, attrs=attrs, dtype=dtype).check()


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("lengths", [[60, 60, 60], [60, 7, 40]], ids=str)
def test_dropout_draws_what_it_draws_without_lists(lengths, causal):
    """Keys that a mask hides everywhere leave what the list leaves."""
    torch.manual_seed(7)
    attrs = {"keep": 0.7, "stream": 3, "is_causal": causal}
    case = Case(60, 60, lengths, lengths, seed=torch.tensor([99]), attrs=attrs)
    some = case.run()
    case.mask = torch.zeros(3, 1, 1, 60)
    for row, length in zip(case.mask, lengths, strict=True):
        row[..., length:] = -math.inf
    for each in ("query", "key", "value", "grad"):
        setattr(case, each, getattr(case, each).nan_to_num(0))
    everything = case.run(has_rows=False)
    for batch in range(3):
        for a, b in zip(case.parts(some, batch), case.parts(everything, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_all_rows_give_the_bits_of_no_lists(dtype):
    torch.manual_seed(8)
    seed, attrs = torch.tensor([5]), {"keep": 0.9, "stream": 1}
    case = Case(70, 53, [70] * 2, [53] * 2, dtype=dtype, seed=seed, attrs=attrs)
    for a, b in zip(case.run(), case.run(has_rows=False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype):
    torch.manual_seed(9)
    case = Case(70, 53, *LENGTHS["some"], dtype=dtype)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(case.run())
    for batch in range(3):
        want = case.parts(results[0], batch)
        for result in results[1:]:
            assert all(map(torch.equal, case.parts(result, batch), want))


@st.composite
def cases(draw) -> Case:
    queries, keys = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    batch = draw(st.integers(1, 3))
    of_queries = [draw(st.integers(0, queries)) for _ in range(batch)]
    of_keys = [draw(st.integers(1, keys)) for _ in range(batch)]
    torch.manual_seed(draw(st.integers(0, 1000)))
    mask = None
    if draw(st.booleans()):
        mask = torch.randn(batch, 1, queries, keys)
        mask[..., 1:].masked_fill_(torch.rand(batch, 1, queries, keys - 1) < 0.3, -math.inf)
    attrs: dict[str, float] = {"is_causal": draw(st.integers(0, 1))}
    kept = None
    if draw(st.booleans()):
        attrs["keep"], kept = 0.5, torch.rand(batch, 2, queries, keys) < 0.5
    return Case(
        queries, keys, of_queries, of_keys, draw(st.integers(1, 40)), 2, draw(st.integers(1, 2)),
        draw(st.sampled_from(REAL)), mask, kept, None, attrs, draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_any(case):
    case.check()


class TestErrors:
    def run(self, change, words, error=torch_ort.UserError):
        case = Case(4, 5, [4], [5])
        heads = {"q": case.query, "k": case.key, "v": case.value}
        lists = {"qr": list_of([4], 4), "kr": list_of([5], 5)}
        change(lists)
        with pytest.raises(error, match=words):
            case.call("Attention", heads | lists, [case.query], True)

    def test_layouts_of_lists(self):
        words = "file: node 'y0': rows: got 4 int64, want 5 int64"
        self.run(lambda lists: lists.update(qr=torch.zeros(4, dtype=torch.int64)), words)
        words = "rows: got 6 int32, want 6 int64"
        self.run(lambda lists: lists.update(kr=torch.zeros(6, dtype=torch.int32)), words)
        words = "rows: got 6 float32, want 6 int64"
        self.run(lambda lists: lists.update(kr=torch.zeros(1, 1, 1, 6)), words)
        self.run(lambda lists: lists.pop("kr"), "Attention: got 4 inputs")

    def test_numbers_of_rows(self):
        words = "list of rows: got 6 of them, want 0 to 5"
        wrong = torch.tensor([6, 0, 1, 2, 3, 4])
        self.run(lambda lists: lists.update(kr=wrong), words, IndexError)
        words = "list of rows: got -1 of them, want 0 to 4"
        self.run(lambda lists: lists["qr"].copy_(-1 - lists["qr"] * 0), words, IndexError)

    def test_lists_that_name_no_rows_end_sequences_somewhere(self):
        case = Case(4, 5, [4, 4], [5, 5])
        heads = {"q": case.query, "k": case.key, "v": case.value}
        for numbers in (-(2**63), -1, 9, 2**63 - 1):
            lists = {
                name: torch.full_like(list_of([0, 0], size), numbers)
                for name, size in [("qr", 4), ("kr", 5)]
            }
            for each in lists.values():
                each[0] = 3
            case.call("Attention", heads | lists, [case.query], True)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_of_other_scores_are_zeros(lengths):
    torch.manual_seed(6)
    case = Case(70, 53, *LENGTHS[lengths])
    scores = case.run()[-1]
    for batch, (queries, keys) in enumerate(case.lengths()):
        assert not scores[batch, :, queries:].any()
        assert not scores[batch, :, :, keys:].any()
