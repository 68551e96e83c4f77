# What regions and attention compute, against float64 on numbers that lose digits where a formula
# cancels: far from zero, large, tiny, equal, and infinite. The error of a result or a gradient is
# at most twice that of eager PyTorch, plus a few units in the last place.
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_ort

MATRIX = (6, 37)
IMAGES = (3, 4, 5, 5)
HEADS = (2, 2, 7, 8)
LABELS = torch.arange(6) % 5
SOME_LABELS = torch.tensor([0, -100, 2, 3, -100, 1])
HIDDEN = torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
HIDDEN[3] = True

OFFSETS = {f"{offset:+g}": offset for offset in (1e3, -1e3, 1e4, 1e5)}
SCALES = {f"*{scale:g}": scale for scale in (10, 1e2, 1e4, 1e-3, 1e-8, 1e-20, 1e-30, 1e20, 1e30)}
POINTS = {
    "inf": {1: math.inf},
    "-inf": {1: -math.inf},
    "nan": {1: math.nan},
    "infinities": {1: math.inf, 2: -math.inf},
    "row of -inf": dict.fromkeys(range(37), -math.inf),
}
ALL = ("plain", *OFFSETS, *SCALES, "near 1", "equal", "zero", *POINTS)
FAR = ("plain", *OFFSETS, *SCALES, "near 1", "equal")  # no infinities
MILD = ("plain", "+1e3", "*10", "*0.001", "*1e-08", "equal", "zero")
# Scores are products: what they lose where they are large is lost to any softmax.
SCORES = ("plain", "*10", "*100", "*0.001", "*1e-08", "*1e-20", "equal", "zero")


def numbers(condition: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw the numbers that a condition names, in float32."""
    drawn = torch.randn(shape, generator=generator)
    if condition in OFFSETS:
        return drawn + OFFSETS[condition]
    if condition in SCALES:
        return drawn * SCALES[condition]
    if condition == "near 1":
        return 1 + drawn * 1e-4
    if condition in ("equal", "zero"):
        return torch.full(shape, 0.3 if condition == "equal" else 0.0)
    for place, number in POINTS.get(condition, {}).items():
        if place < drawn.shape[-1]:
            drawn.view(-1)[place] = number
    return drawn


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of tensors of these shapes, and the numbers on which it must be exact."""

    function: Callable[..., Tensor]
    shapes: Sequence[Sequence[int]]
    conditions: Sequence[str] = ALL


def elementwise(function: Callable[..., Tensor], count: int = 1, conditions=ALL) -> Case:
    """Give a case that a region works on: a single operator may be left to PyTorch."""
    return Case(lambda *xs: function(*xs) * 2, [MATRIX] * count, conditions)


def attention(weigh: Callable[[Tensor], Tensor]) -> Case:
    """Give attention as models spell it."""
    return Case(
        lambda query, key, value: weigh(query @ key.mT * 0.35).softmax(-1) @ value,
        [HEADS] * 3,
        SCORES,
    )


def scaled(mask: Tensor | None = None, **settings: object) -> Case:
    """Give attention by PyTorch's function."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        added = mask.to(query.dtype) if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, **settings)

    return Case(attend, [HEADS] * 3, SCORES)


def entropy(x: Tensor) -> Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)


def normalized_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def batch_norm_of_channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return batch_norm(x.relu().contiguous(memory_format=torch.channels_last), weight, bias)


SOFTMAX = {
    "softmax": Case(lambda x: x.softmax(-1), [MATRIX]),
    "softmax of columns": Case(lambda x: x.softmax(0) * 2, [MATRIX]),
    "softmax, sharp": Case(lambda x: (x / 0.1).softmax(-1), [MATRIX]),
    "softmax, long rows": Case(lambda x: x.softmax(-1), [(2, 9000)], ("plain", "+1e4", "*10")),
    "log_softmax": Case(lambda x: x.log_softmax(-1), [MATRIX]),
    "log_softmax, long rows": Case(lambda x: x.log_softmax(-1), [(2, 9000)],
        ("plain", *OFFSETS, "*100")),
    "logsumexp": Case(lambda x: x.logsumexp(-1) * 2, [MATRIX]),
    "entropy": Case(entropy, [MATRIX], FAR),
    "cross_entropy": Case(lambda x: F.cross_entropy(x, LABELS), [MATRIX]),
    "cross_entropy, labels ignored": Case(lambda x: F.cross_entropy(x, SOME_LABELS), [MATRIX]),
    "cross_entropy of products": Case(lambda x, y: F.cross_entropy(x * y, LABELS, reduction="sum"),
        [MATRIX, (37, )], FAR),
    "cross_entropy, each": Case(lambda x: F.cross_entropy(x, LABELS, reduction="none"), [MATRIX]),
    "cross_entropy, smooth": Case(lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
        [MATRIX], FAR),
    "cross_entropy, weighted": Case(lambda x,
        y: F.cross_entropy(x, LABELS, weight=y.detach().abs()), [MATRIX, (37, )], FAR),
    "cross_entropy of probabilities": Case(lambda x, y: F.cross_entropy(x, y.softmax(-1)),
        [MATRIX] * 2, FAR),
    "kl_div": Case(lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        [MATRIX] * 2, ("plain", *OFFSETS, "*10", "*100", "equal")),
    "kl_div of logarithms": Case(lambda x,
        y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True),
        [MATRIX] * 2, ("plain", *OFFSETS, "*10", "*100", "equal")),
}  # fmt: skip
NORMS = {
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (37,), w, b), [MATRIX, (37,), (37,)]),
    "layer_norm, long rows": Case(
        lambda x, w, b: F.layer_norm(x, (9000,), w, b),
        [(2, 9000), (9000,), (9000,)],
        ("plain", "+1e3", "*1e-08"),
    ),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (37,), w), [MATRIX, (37,)]),
    "rms_norm by hand": Case(normalized_by_hand, [MATRIX, (37,)], FAR),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), [IMAGES, (4,), (4,)], FAR),
    "instance_norm": Case(
        lambda x, w, b: F.instance_norm(x, None, None, w, b), [IMAGES, (4,), (4,)]
    ),
    "batch_norm": Case(batch_norm, [IMAGES, (4,), (4,)]),
    "batch_norm, channels last": Case(batch_norm_of_channels_last, [(20, 4, 5, 5), (4,), (4,)]),
    "normalize": Case(lambda x: F.normalize(x, dim=-1) * 2, [MATRIX], FAR),
    "cosine_similarity": Case(lambda x, y: F.cosine_similarity(x, y, dim=-1), [MATRIX] * 2, MILD),
    "norm": Case(lambda x: x.norm(dim=-1) * 2, [MATRIX], FAR),
    "var": Case(lambda x: x.var(-1) * 2, [MATRIX]),
    "var of columns": Case(lambda x: x.var(0) * 2, [MATRIX]),
    "std": Case(lambda x: x.std(-1) * 2, [MATRIX], FAR),
    "std, not corrected": Case(lambda x: x.std(-1, correction=0) * 2, [MATRIX], FAR),
}
LOSSES = {
    "binary_cross_entropy_with_logits": Case(lambda x,
        y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), [MATRIX] * 2, FAR),
    "binary_cross_entropy_with_logits, weighted": Case(lambda x, y,
        z: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=z.detach().abs()),
        [MATRIX, MATRIX, (37, )], FAR),
    "mse_loss": Case(lambda x, y: F.mse_loss(x * 2, y), [MATRIX] * 2, FAR),
    "l1_loss": Case(lambda x, y: F.l1_loss(x * 2, y), [MATRIX] * 2, FAR),
    "huber_loss": Case(lambda x, y: F.huber_loss(x * 2, y), [MATRIX] * 2, FAR),
    "smooth_l1_loss": Case(lambda x, y: F.smooth_l1_loss(x * 2, y), [MATRIX] * 2, FAR),
    "poisson_nll_loss": Case(lambda x, y: F.poisson_nll_loss(x, y), [MATRIX] * 2, MILD),
    "triplet_margin_loss": Case(lambda x, y, z: F.triplet_margin_loss(x, y, z), [MATRIX] * 3,
        ("plain", "*10", "*0.001")),
}  # fmt: skip
ELEMENTS = {
    "gelu": elementwise(F.gelu),
    "gelu by hand": elementwise(lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), 1, FAR),
    "gelu, tanh": elementwise(lambda x: F.gelu(x, approximate="tanh")),
    "silu": elementwise(F.silu),
    "gate": elementwise(lambda x, y: F.silu(x) * y, 2, FAR),
    "mish": elementwise(F.mish),
    "softplus": elementwise(F.softplus),
    "logsigmoid": elementwise(F.logsigmoid),
    "sigmoid": elementwise(torch.sigmoid),
    "tanh": elementwise(torch.tanh),
    "tanhshrink": elementwise(F.tanhshrink),
    "elu": elementwise(F.elu),
    "celu": elementwise(lambda x: F.celu(x, 1.5)),
    "selu": elementwise(F.selu),
    "erf": elementwise(torch.erf),
    "erfc": elementwise(torch.erfc),
    "exp": elementwise(torch.exp),
    "expm1": elementwise(torch.expm1),
    "log": elementwise(lambda x: x.abs().log()),
    "log1p": elementwise(lambda x: x.abs().log1p()),
    "logaddexp": elementwise(torch.logaddexp, 2),
    "sqrt": elementwise(lambda x: x.abs().sqrt()),
    "rsqrt": elementwise(lambda x: x.abs().rsqrt()),
    "reciprocal": elementwise(torch.reciprocal),
    "hypot": elementwise(torch.hypot, 2, FAR),
    "square": elementwise(torch.square),
    "cube": elementwise(lambda x: x.pow(3)),
    "power -2": elementwise(lambda x: x.pow(-2)),
    "power 1.7": elementwise(lambda x: x.abs().pow(1.7)),
    "power -0.5": elementwise(lambda x: x.abs().pow(-0.5)),
    "sin": elementwise(torch.sin),
    "quotient": elementwise(torch.div, 2),
    "difference": elementwise(torch.sub, 2),
    "lerp": elementwise(torch.lerp, 3, FAR),
    "addcdiv": elementwise(lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), 3, FAR),
}
SUMS = {
    "sum": Case(lambda x: (x * 2).sum(-1), [MATRIX]),
    "sum of long rows": Case(lambda x: (x * 2).sum(-1), [(2, 9000)], MILD),
    "sum of many rows": Case(lambda x: (x * 2).sum(0), [(9000, 3)], MILD),
    "sum of wide rows": Case(lambda x: (x * 2).sum(0), [(600, 1100)], ("plain", "equal")),
    "sum of all": Case(lambda x: (x * 2).sum(), [(6, 3000)], MILD),
    "mean": Case(lambda x: (x * 2).mean(-1), [MATRIX]),
    "gradient of a bias": Case(
        lambda x, b: (x + b).tanh(), [(5000, 3), (3,)], ("plain", "equal", "*0.001")
    ),
}
ATTENTION = {
    "attention": scaled(),
    "attention, causal": scaled(is_causal=True),
    "attention, mask": scaled(torch.zeros(7, 7).masked_fill(HIDDEN, -math.inf)),
    "attention, truth values": scaled(~HIDDEN),
    "attention by hand": attention(lambda scores: scores),
    "attention by hand, filled": attention(lambda scores: scores.masked_fill(HIDDEN, -1e9)),
    "attention by hand, filled with -inf": attention(
        lambda scores: scores.masked_fill(HIDDEN, -math.inf)
    ),
}
CASES = SOFTMAX | NORMS | LOSSES | ELEMENTS | SUMS | ATTENTION


def result_and_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Tensor
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    (result * weights).sum().backward()
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_exact(got: Tensor, eager: Tensor, truth: Tensor, natural: float) -> None:
    """Compare errors. `natural`: the size of such numbers where nothing cancels."""
    limits = torch.finfo(got.dtype)
    rounded = truth.to(got.dtype)
    in_range = truth.isfinite() & rounded.isfinite()
    assert not (eager.isfinite() & ~got.isfinite()).any()
    if not in_range.any():
        return
    scale = max(truth[in_range].abs().max().item(), natural)
    mine, theirs = (
        (each.double() - truth)[in_range].abs().nan_to_num(math.inf, math.inf)
        for each in (got, eager)
    )
    bound = 2 * theirs.max() + 4 * limits.eps * scale + 1e-30
    assert mine.max() <= bound, (
        f"error: got {mine.max() / scale:.2g}, want eager's {theirs.max() / scale:.2g}"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_at_most_twice_those_of_eager(name, dtype):
    case = CASES[name]
    call = torch.compile(case.function, backend="ort", fullgraph=True, dynamic=False)
    natural: list[float] = []
    for condition in case.conditions:
        generator = torch.Generator().manual_seed(7)
        inputs = [numbers(condition, shape, generator).to(dtype) for shape in case.shapes]
        wide = [x.double() for x in inputs]
        weights = torch.randn(case.function(*wide).shape, generator=generator).to(dtype)
        got, eager, truth = (
            result_and_gradients(function, given, weights.to(given[0].dtype))
            for function, given in ((call, inputs), (case.function, inputs), (case.function, wide))
        )
        if condition == "plain":
            natural = [each.abs().max().item() for each in truth]
        grows = condition in SCALES
        for i, each in enumerate(zip(got, eager, truth, strict=True)):
            try:
                assert_exact(*each, natural=0 if grows else natural[i])
            except AssertionError as error:
                what = "result" if i == 0 else f"gradient {i}"
                raise AssertionError(f"{condition}, {what}: {error}") from error
    assert torch_ort.counters()["fallbacks"] == 0
