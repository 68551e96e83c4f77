"""Attention with dropout, as calls and written out, by the engine's own kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import onnx.parser
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_ort
from torch_ort import _C

pytestmark = pytest.mark.ort_only

DROP, KEEP = 0.3, 0.7
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Heads = tuple[Tensor, Tensor, Tensor]
Spelling = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_ORT_EXACT_RANDOM", "0")
    torch._dynamo.reset()
    before = torch_ort.counters()["fallbacks"]
    yield
    assert torch_ort.counters()["fallbacks"] == before


def make_heads(
    queries: int, keys: int, features: int, dtype: torch.dtype = torch.float32,
    batch: int = 2, heads: int = 3,
) -> Heads:  # fmt: skip
    """Give query, key and value as a projection leaves them: heads beside each other in memory."""
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, length, heads, features, dtype=torch.float64).transpose(1, 2).to(dtype)
        for length in (queries, keys, keys)
    )


# ---- ways to write it


def call(query, key, value, mask=None, causal=False):
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=DROP, is_causal=causal
    )


def added_mask(query, key, value, mask=None, causal=False):
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (
        torch.matmul(F.dropout(weights, DROP), value).transpose(1, 2).contiguous().transpose(1, 2)
    )


def filled_mask(query, key, value, mask=None, causal=False):
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(key.size(-1)))
    if causal:
        seen = torch.tril(torch.ones(scores.shape[-2:])).view(1, 1, *scores.shape[-2:])
        scores = scores.masked_fill(seen == 0, -math.inf)
    return F.dropout(scores.softmax(-1), DROP) @ value


def batched(query, key, value, mask=None, causal=False):
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value)]
    scores = torch.bmm(flat[0] / math.sqrt(query.shape[-1]), flat[1].transpose(1, 2))
    if mask is not None:
        scores = torch.where(mask, scores, -1e4)
    return torch.bmm(F.dropout(scores.softmax(-1), DROP), flat[2]).view_as(query)


def exactly(query, key, value, kept, mask=None, causal=False):
    """Compute in float64, with what the kernel kept."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -1e4)
    elif mask is not None:
        scores = scores + mask.double()
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    return (scores.softmax(-1) * kept / KEEP) @ value


def run(attend: Spelling, heads: Heads, *args: object, **settings: object) -> list[Tensor]:
    """Give the result and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in heads]
    torch.manual_seed(5)
    result = attend(*leaves, *args, **settings)
    torch.manual_seed(1)
    result.backward(torch.randn(result.shape, dtype=torch.float64).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def compiled(attend: Spelling, **options: object) -> Spelling:
    torch._dynamo.reset()
    return torch.compile(attend, backend="ort", options=options)


def kept_of(attend: Spelling, heads: Heads, **settings: object) -> Tensor:
    """Recover what the kernel keeps of scores of these sizes: with the identity as values."""
    attend = torch.compile(attend, backend="ort", dynamic=False)
    batch, count, queries, _ = heads[0].shape
    keys = heads[1].shape[2]
    nothing = torch.zeros(batch, count, max(queries, keys), keys, dtype=heads[0].dtype)
    values = torch.eye(keys, dtype=heads[0].dtype).expand(batch, count, keys, keys)
    return run(attend, (nothing[:, :, :queries], nothing[:, :, :keys], values), **settings)[0] != 0


def check(attend: Spelling, heads: Heads, isa: str = "", **settings: object) -> None:
    kept = kept_of(attend, heads, **settings).double()
    got = run(compiled(attend, isa=isa), heads, **settings)
    want = run(exactly, tuple(tensor.double() for tensor in heads), kept, **settings)
    for number, exact in zip(got, want, strict=True):
        assert number.dtype == heads[0].dtype
        scale = max(exact.abs().max().item(), 1)
        atol = TOLERANCE[number.dtype] * scale
        torch.testing.assert_close(number.double(), exact, rtol=0, atol=atol)


SIZES = [(1, 2, 1), (4, 4, 16), (7, 13, 20), (48, 48, 32), (49, 97, 33), (130, 130, 64)]


@pytest.mark.parametrize("isa", _C.isa_names())
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_float64(size, isa):
    check(call, make_heads(*size), isa)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_causal(size):
    check(call, make_heads(*size), causal=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("attend", [call, filled_mask, batched], ids=lambda f: f.__name__)
def test_dtypes(attend, dtype):
    check(attend, make_heads(33, 33, 16, dtype))


def test_long():
    check(call, make_heads(1100, 1100, 16, batch=1, heads=2), causal=True)


@pytest.mark.parametrize("attend", [call, added_mask], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(1, 1, 1, 53), (2, 1, 1, 53), (37, 53), (2, 3, 37, 53)], ids=str)
def test_masks_that_are_added(attend, shape):
    check(attend, make_heads(37, 53, 20), mask=torch.randn(shape))


def test_masks_of_truth_values():
    check(filled_mask, make_heads(150, 150, 20), causal=True)
    heads = make_heads(37, 37, 20)
    mask = torch.rand(6, 1, 37) < 0.7
    kept = kept_of(batched, heads).double()
    got = run(compiled(batched), heads, mask=mask)
    want = run(
        exactly, tuple(tensor.double() for tensor in heads), kept, mask=mask.view(2, 3, 1, 37)
    )
    for number, exact in zip(got, want, strict=True):
        torch.testing.assert_close(number.double(), exact, rtol=1e-5, atol=1e-5)


def hidden_mask(kind: str, queries: int, keys: int) -> Tensor:
    """Give a mask that hides many of the last keys."""
    lengths = {
        "padding": torch.tensor([keys // 3, keys - 1]),
        "all of a batch": torch.tensor([0, 7]),
    }
    if kind == "triangle":
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    else:
        hidden = (torch.arange(keys) >= lengths[kind].unsqueeze(1)).view(2, 1, 1, keys)
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("kind", ["triangle", "padding"])
@pytest.mark.parametrize("attend", [call, added_mask], ids=lambda f: f.__name__)
def test_keys_at_the_end_that_no_query_sees(attend, kind):
    check(attend, make_heads(150, 200, 16), mask=hidden_mask(kind, 150, 200))


@pytest.mark.parametrize("attend", [call, added_mask], ids=lambda f: f.__name__)
def test_a_batch_that_sees_nothing_is_eagers(attend):
    heads, mask = make_heads(50, 70, 8), hidden_mask("all of a batch", 50, 70)
    got, want = (run(each, heads, mask=mask) for each in (compiled(attend), attend))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("attend", [call, added_mask], ids=lambda f: f.__name__)
def test_queries_that_see_nothing_are_eagers(attend):
    heads = make_heads(4, 6, 8)
    mask = torch.zeros(4, 6)
    mask[2] = -math.inf
    got, want = (run(each, heads, mask=mask) for each in (compiled(attend), attend))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(got[0][:, :, 2] == 0, want[0][:, :, 2] == 0)


def test_keys_without_a_seen_one_share_evenly_under_a_finite_mask():
    heads = make_heads(5, 6, 8)
    mask = torch.ones(6, 5, 6, dtype=torch.bool)
    mask[:, 2] = False
    kept = kept_of(batched, heads).double()
    got = run(compiled(batched), heads, mask=mask)
    want = run(exactly, tuple(x.double() for x in heads), kept, mask=mask.view(2, 3, 5, 6))
    for number, exact in zip(got, want, strict=True):
        torch.testing.assert_close(number.double(), exact, rtol=1e-5, atol=1e-5)


# ---- which programs run in the kernels


class Projected(nn.Module):
    """Self-attention as a transformer has it."""

    def __init__(self, attend: Spelling) -> None:
        super().__init__()
        self.attend, self.packed, self.out = attend, nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x, **settings):
        heads = [part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.packed(x).chunk(3, -1)]
        return self.out(self.attend(*heads, **settings).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    "attend", [call, added_mask, filled_mask, batched], ids=lambda f: f.__name__
)
def test_the_engines_kernels_run_in_training(attend):
    x = torch.randn(2, 10, 24, requires_grad=True)
    graph = torch_ort.explain(Projected(attend), x).graphs[0]
    assert graph.nodes["torch_ort.Attention"] == graph.nodes["torch_ort.AttentionGrad"] == 1
    assert not graph.nodes["torch_ort.BernoulliMask"]
    assert not any("softmax" in name for name in graph.aten)
    assert "Softmax" not in graph.nodes
    assert graph.nodes["MatMul"] <= 4  # those of the two linear layers


def test_layers_of_pytorch_run_in_the_kernels():
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=DROP, batch_first=True)
    graph = torch_ort.explain(layer, torch.randn(2, 10, 24, requires_grad=True)).graphs[0]
    assert graph.nodes["torch_ort.Attention"] == graph.nodes["torch_ort.AttentionGrad"] == 1


def test_evaluation_is_eagers():
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=DROP, batch_first=True).eval()
    x = torch.randn(2, 10, 24, requires_grad=True)
    torch.testing.assert_close(compiled(layer)(x), layer(x))


def test_weights_that_are_read_stay():
    def attend(query, key, value):
        weights = F.dropout((query @ key.transpose(-1, -2)).softmax(-1), DROP)
        return weights @ value, weights

    heads = tuple(x.requires_grad_() for x in make_heads(5, 6, 8))
    graph = torch_ort.explain(attend, *heads).graphs[0]
    assert not graph.nodes["torch_ort.Attention"]


def test_one_head_alone_stays_with_the_library():
    heads = tuple(x.requires_grad_() for x in make_heads(5, 6, 8, batch=1, heads=1))
    assert not torch_ort.explain(call, *heads).graphs[0].nodes["torch_ort.Attention"]


def test_a_mask_that_is_trained_gets_its_gradient():
    def attend(query, key, value, bias):
        return ((query @ key.transpose(-1, -2) + bias).softmax(-1)) @ value

    heads = (*make_heads(5, 6, 8), torch.randn(5, 6))
    for mine, theirs in zip(run(compiled(attend), heads), run(attend, heads), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_scores_do_not_cross_the_border():
    def saved_bytes(**options: object) -> int:
        torch.compiler.reset()
        compiled(call, **options)(*(x.requires_grad_() for x in make_heads(64, 64, 8)))
        return torch_ort.counters()["saved_bytes"]

    scores = 6 * 64 * 64
    assert saved_bytes(disable=["fuse_attention"]) > 4 * scores
    assert saved_bytes() < 4 * scores
    assert saved_bytes(exact_random=True) < saved_bytes() + 2 * scores


@pytest.mark.parametrize("wanted", range(1, 8))
@pytest.mark.parametrize("attend", [call, filled_mask, batched], ids=lambda f: f.__name__)
def test_gradients_that_nobody_wants(attend, wanted):
    def train(each: Spelling) -> list[Tensor]:
        leaves = [
            x.detach().requires_grad_(bool(wanted >> i & 1))
            for i, x in enumerate(make_heads(9, 9, 8))
        ]
        torch.manual_seed(3)
        each(*leaves).sin().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    for mine, theirs in zip(train(compiled(attend, exact_random=True)), train(attend), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_attention_over_results_of_attention():
    def attend(query, key, value):
        first = filled_mask(query, key, value)
        second = added_mask(first * 2, key, call(first, first, first))
        return batched(second, second, second) + first

    got, want = (
        run(each, make_heads(9, 9, 8)) for each in (compiled(attend, exact_random=True), attend)
    )
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def _sum_of_views(rows: Tensor) -> Tensor:
    first, second = rows.transpose(1, 2), rows[:, :, 1:2]
    return first * 2 + (rows.unsqueeze(1) + rows.contiguous().unsqueeze(1)).sum() + second.mean()


def _view_in_place(rows: Tensor) -> Tensor:
    return (rows.transpose(1, 2) * 1).add_(rows.contiguous().transpose(1, 2))


def _strided(rows: Tensor) -> Tensor:
    copy = rows.contiguous()
    return copy.as_strided(rows.size(), copy.stride()) + torch.empty_like(rows).copy_(rows)


def _by_users_code(rows: Tensor) -> Tensor:
    return torch.fft.rfft(rows, dim=1).real + rows.contiguous()[:, :5]


@pytest.mark.parametrize(
    "read", [_sum_of_views, _view_in_place, _strided, _by_users_code], ids=lambda f: f.__name__
)
def test_a_result_that_is_read_transposed_in_several_ways(read):
    def attend(query, key, value):
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return read((F.dropout(weights, DROP) @ value).transpose(1, 2))

    got, want = (
        run(each, make_heads(9, 9, 9)) for each in (compiled(attend, exact_random=True), attend)
    )
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# ---- random numbers


class Masks(nn.Module):
    """What several layers keep: attention with the identity as values."""

    def forward(self, zeros, values):
        return [call(zeros * scale, zeros, values) for scale in (1.0, 2.0, 3.0)]


@pytest.fixture
def masks() -> Tensor:
    """[layers * steps, heads, queries, keys]"""
    zeros, values = torch.zeros(2, 3, 96, 96), torch.eye(96).expand(2, 3, 96, 96)
    attend = compiled(Masks())
    steps = [out != 0 for _ in range(3) for out in attend(zeros, values)]
    return torch.stack(steps).double().flatten(1, 2)


def test_share_of_kept_scores(masks):
    deviation = (KEEP * (1 - KEEP) / masks[0].numel()) ** 0.5
    assert (masks.mean((1, 2, 3)) - KEEP).abs().max() < 4 * deviation


@pytest.mark.parametrize("along", [2, 3], ids=["queries", "keys"])
def test_queries_and_keys_vary_as_independent_draws_do(masks, along):
    wanted = (KEEP * (1 - KEEP) / masks.shape[along]) ** 0.5
    spread = masks.mean(along).flatten(1).std(1)
    torch.testing.assert_close(spread, torch.full_like(spread, wanted), rtol=0.15, atol=0)


def test_masks_of_layers_steps_heads_and_neighbours_are_independent(masks):
    flat = (masks - KEEP).flatten(0, 1).flatten(1) / (KEEP * (1 - KEEP)) ** 0.5
    correlations = flat @ flat.T / flat.shape[1]
    others = correlations - torch.diag(correlations.diag())
    assert others.abs().max() < 5.5 / flat.shape[1] ** 0.5
    for shift in (1, 2, 4, 16, 64, 96):
        neighbours = (flat[:, shift:] * flat[:, :-shift]).mean(1)
        assert neighbours.abs().max() < 5 / flat.shape[1] ** 0.5


def test_any_number_of_threads_and_instruction_set_keeps_the_same():
    heads = make_heads(60, 60, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for isa in _C.isa_names():
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                attend = compiled(call, isa=isa)
                results.append((isa, run(attend, heads, causal=True)))
    finally:
        torch.set_num_threads(before)
    for (isa, one), (other_isa, other) in itertools.pairwise(results):
        for mine, theirs in zip(one, other, strict=True):
            if isa == other_isa:
                assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_every_call_keeps_others_until_the_seed_is_set_again():
    heads, attend = make_heads(20, 20, 8), compiled(call)
    torch.manual_seed(3)
    first, second = attend(*heads), attend(*heads)
    torch.manual_seed(3)
    assert torch.equal(attend(*heads), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("attend", [call, added_mask, batched], ids=lambda f: f.__name__)
def test_exact_random_keeps_what_eager_keeps(attend):
    heads = make_heads(21, 34, 8)
    got, want = run(compiled(attend, exact_random=True), heads), run(attend, heads)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def gradient_matches(zeros: Tensor, values: Tensor, result: Tensor, **settings: object) -> None:
    """Of the identity as values, the gradient is what was kept, the other way around."""
    (gradient,) = torch.autograd.grad(result.sum(), values, **settings)
    torch.testing.assert_close(gradient[..., 0], result.detach().sum(-2))


def identity(size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, size, size), torch.eye(size).repeat(2, 3, 1, 1).requires_grad_()


def test_two_calls_alive_at_once_and_a_kept_graph():
    attend, (zeros, first), (_, second) = compiled(call), identity(), identity()
    results = attend(zeros, zeros, first), attend(zeros, zeros, second)
    gradient_matches(zeros, second, results[1], retain_graph=True)
    gradient_matches(zeros, first, results[0])
    gradient_matches(zeros, second, results[1])


@pytest.mark.hands_over("Dynamo's operators that take graphs")
def test_a_checkpointed_block_draws_once():
    def block(zeros, values):
        return checkpoint(lambda v: call(zeros, zeros, v * 1.0), values, use_reentrant=False)

    zeros, values = identity()
    gradient_matches(zeros, values, compiled(block)(zeros, values))


@pytest.mark.hands_over("Dynamo gives a probability as a tensor (dynamic=True)")
@pytest.mark.parametrize("attend", [call, filled_mask], ids=lambda f: f.__name__)
def test_lengths_that_change(attend):
    def train(layer: nn.Module, length: int) -> list[Tensor]:
        torch.manual_seed(length)
        x = torch.randn(2, length, 24, requires_grad=True)
        out = layer(x, causal=True)
        out.sum().backward()
        return [out.detach(), x.grad]

    layer = Projected(attend)
    lengths = (5, 64, 33, 128)
    static = [train(compiled(layer), length) for length in lengths]
    plans = torch_ort.counters()["graphs_compiled"]
    dynamic = torch.compile(layer, backend="ort", dynamic=True)
    for length, want in zip(lengths, static, strict=True):
        for mine, theirs in zip(train(dynamic, length), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch_ort.counters()["graphs_compiled"] == plans + 1


def test_rounding_as_eager_leaves_the_operators_apart():
    heads = make_heads(9, 9, 8, torch.bfloat16)
    apart, as_eager = (
        run(compiled(filled_mask, emulate_eager_casts=True, disable=disable), heads)
        for disable in ([], ["fuse_attention"])
    )
    assert all(torch.equal(*pair) for pair in zip(apart, as_eager, strict=True))


def test_a_seed_that_is_none_is_refused():
    text = """
        <ir_version: 10, opset_import: ["" : 20, "torch_ort" : 1]>
        attention (float[2,3,4,5] x, int64[2] seed) => (float[2,3,4,5] o)
        <float[2,3,4] sums>
        {
           o, sums = torch_ort.Attention <keep = "0.5", stream = 0> (x, x, x, seed)
        }
    """
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    inputs = {"x": torch.zeros(2, 3, 4, 5), "seed": torch.zeros(2, dtype=torch.int64)}
    words = "file: node 'o': Attention: seed: got 1 dims of int64, want one int64"
    with pytest.raises(torch_ort.UserError, match=words):
        _C.run(graph, inputs)


def test_saved_files_hold_the_operators_of_the_program(tmp_path):
    options = {"save_onnx": True, "onnx_prefix": str(tmp_path / "step")}
    run(compiled(call, **options), make_heads(6, 6, 8))
    files = sorted(tmp_path.iterdir())
    assert files
    for file in files:
        text = file.read_bytes()
        assert b"Dropout" in text
        assert b"AttentionGrad" not in text
