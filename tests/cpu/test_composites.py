"""Every composite that expand_composites knows, forward and backward: as the operators say, as the
small ones that they become, and fused on every instruction set; against eager PyTorch in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Sequence

import pytest
import regions
import torch
import torch.nn.functional as F
from conversion import convert, floats, ops_of
from regions import ISAS

from torch_ort import _C

FOLDER = pathlib.Path(__file__).parents[2] / "csrc/passes/composites"
# What the pass knows; test_attention.py, test_group_norm.py and, since PyTorch has no kernel for
# RMS norms on the CPU, cuda_kernels/test_rms_norm.py have the rest.
EXPANSIONS = {
    op
    for path in FOLDER.glob("*.cpp")
    for op in re.findall(r'^    {"([\w:]+)", expand_', path.read_text(), re.MULTILINE)
    if "attention" not in op.lower() and op not in ("GroupNormalization", "RMSNormalization")
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Of the largest number of a result; sums go over a few dozen numbers.
TOLERANCE = {
    torch.float32: 4e-6,
    torch.float64: 2e-14,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


@dataclasses.dataclass(frozen=True)
class Composite:
    """`call` takes real tensors of `shapes`, then `others`; its result is differentiated.

    `stays`: what has an expansion, but none of this form. `reads_sizes`: computes with them.
    """

    name: str
    call: Callable[..., torch.Tensor]
    shapes: Sequence[Sequence[int]]
    others: Sequence[torch.Tensor] = ()
    scale: float = 1.0
    stays: Sequence[str] = ()
    reads_sizes: bool = False

    def __str__(self) -> str:
        return self.name

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        real = [floats(*shape, dtype=torch.float64) * self.scale for shape in self.shapes]
        gradient = 1.5 - floats(*self.result_shape, dtype=torch.float64).square()
        return [x.to(dtype) for x in (*real, gradient)] + list(self.others)

    @functools.cached_property
    def result_shape(self) -> torch.Size:
        return self.call(*(floats(*shape) for shape in self.shapes), *self.others).shape

    def with_gradients(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        count = len(self.shapes)
        result, pull = torch.func.vjp(
            lambda *x: self.call(*x, *inputs[count + 1 :]), *inputs[:count]
        )
        return [result, *pull(inputs[count])]


def labels(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def norm(x, *weights, columns, epsilon=1e-5):
    return F.layer_norm(x, columns, *weights, eps=epsilon)


def batch_norm(x, weight, bias, mean, variance):
    call = torch.ops.aten._native_batch_norm_legit_functional
    # Statistics of doubles are doubles.
    return call(x, weight, bias, mean.to(x.dtype), variance.to(x.dtype), True, 0.1, 1e-5)[0]


LOSS = ("aten::nll_loss_forward", "aten::nll_loss_backward")
REDUCTIONS = ("mean", "sum", "none")
binary = F.binary_cross_entropy_with_logits
COMPOSITES = [
    Composite("layer norm", functools.partial(norm, columns=[33]), [(2, 5, 33), (33,), (33,)]),
    Composite("layer norm of two dims", functools.partial(norm, columns=[4, 9]),
              [(5, 4, 9), (4, 9), (4, 9)]),
    Composite("layer norm without bias", functools.partial(norm, columns=[33], epsilon=0.1),
              [(7, 33), (33,)]),
    Composite("layer norm without weights", functools.partial(norm, columns=[33]), [(7, 33)]),
    Composite("layer norm of a constant row", lambda x: norm(x * 0 + 3, columns=[8]), [(4, 8)]),
    Composite("batch norm", batch_norm, [(6, 5, 4, 3), (5,), (5,)],
              [torch.zeros(5), torch.ones(5)], reads_sizes=True),
    # PyTorch's gradient of a hard sigmoid multiplies float64, too, by the float32 next to 1 / 6.
    Composite("hard activations",
              lambda x: F.hardswish(x) + F.hardsigmoid(x.detach()) + F.relu6(x), [(7, 33)],
              scale=3),
    Composite("exponential units", lambda x: F.elu(x, 0.7) + F.selu(x) + F.celu(x, 1.3),
              [(7, 33)], scale=3),
    Composite("gated units", F.glu, [(7, 34)], scale=3),
    Composite("gated units along another dim", lambda x: F.glu(x, 1), [(3, 8, 5)], scale=3),
    Composite("softmax", lambda x: x.softmax(-1), [(2, 3, 40)]),
    Composite("softmax of one number", lambda x: x.softmax(1), [(5, 1)]),
    Composite("softmax of large numbers", lambda x: x.softmax(1), [(5, 40)], scale=100),
    Composite("log-softmax", lambda x: x.log_softmax(-1), [(6, 40)]),
    Composite("log-softmax of large numbers", lambda x: x.log_softmax(1), [(5, 40)], scale=100),
    Composite("cross-entropy", F.cross_entropy, [(5, 9)], [labels(0, 8, 3, 3, 5)]),
    Composite("sum of cross-entropy", lambda x, y: F.cross_entropy(x, y, reduction="sum"),
              [(5, 9)], [labels(0, 8, -100, 3, -100)]),
    Composite("cross-entropy with ignored labels", F.cross_entropy, [(5, 9)],
              [labels(0, 8, -100, 3, -100)]),
    Composite("cross-entropy that ignores a class",
              lambda x, y: F.cross_entropy(x, y, ignore_index=3),
              [(5, 9)], [labels(0, 8, 3, 3, 5)]),
    Composite("cross-entropy of ignored labels alone", F.cross_entropy, [(3, 9)],
              [labels(-100, -100, -100)]),
    Composite("smoothed cross-entropy", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
              [(5, 9)], [labels(0, 8, -100, 3, 5)], stays=["aten::div", "aten::mul"],
              reads_sizes=True),
    Composite("loss of each row", lambda x, y: F.cross_entropy(x, y, reduction="none"),
              [(5, 9)], [labels(0, 8, -100, 3, 5)], stays=["aten::nll_loss_forward"]),
    Composite("weighted loss", lambda x, w, y: F.nll_loss(x, y, w.detach()), [(5, 9), (9,)],
              [labels(0, 8, 3, 3, 5)], stays=LOSS),
    Composite("embedding", lambda w, ids: F.embedding(ids, w), [(11, 6)], [labels(3, 3, 0, 10, 3)]),
    Composite("embedding with padding", lambda w, ids: F.embedding(ids, w, padding_idx=3),
              [(11, 6)], [labels(3, 3, 0, 10, 3)]),
    Composite("square", lambda x: x**2, [(5, 9)]),
    Composite("cube", lambda x: x**3, [(5, 9)]),
    Composite("square root", lambda x: x.abs() ** 0.5, [(5, 9)]),
    Composite("inverse square root", lambda x: x.abs() ** -0.5, [(5, 9)], stays=["Pow"]),
    Composite("reciprocal square root", lambda x: x.abs().rsqrt(), [(5, 9)]),
    Composite("inverse", lambda x: x**-1, [(5, 9)]),
    Composite("odd power", lambda x: x.abs() ** 1.7, [(5, 9)], stays=["Pow", "aten::mul"]),
    Composite("products with sizes", lambda x: (x * x.shape[0] / x.shape[1]) ** 2, [(5, 9)]),
    *(Composite(f"{kind} of squared errors", functools.partial(F.mse_loss, reduction=kind),
                [(5, 9), (5, 9)]) for kind in REDUCTIONS),
    *(Composite(f"{kind} of Huber's loss",
                lambda x, y, kind=kind: F.huber_loss(x, y, reduction=kind, delta=0.7),
                [(5, 9), (5, 9)]) for kind in REDUCTIONS),
    *(Composite(f"{kind} of smooth absolute errors",
                lambda x, y, kind=kind: F.smooth_l1_loss(x, y, reduction=kind, beta=0.7),
                [(5, 9), (5, 9)]) for kind in REDUCTIONS),
    Composite("absolute errors", F.l1_loss, [(5, 9), (5, 9)]),
    *(Composite(f"{kind} of binary cross-entropies",
                lambda x, y, kind=kind: binary(x, y.detach(), reduction=kind),
                [(5, 9), (5, 9)], scale=3) for kind in REDUCTIONS),
    Composite("binary cross-entropy of large numbers",
              lambda x, y: binary(x, y.sigmoid().detach()), [(5, 9), (5, 9)], scale=50),
    Composite("weighted binary cross-entropy",
              lambda x, y, w, p: binary(x, y.sigmoid().detach(), w.detach().abs(),
                                        pos_weight=p.detach().exp()),
              [(5, 9), (5, 9), (9,), (5, 1)]),
    *(Composite(f"{kind} of binary cross-entropies of probabilities",
                lambda x, y, w, kind=kind: F.binary_cross_entropy(
                    x.sigmoid(), y.sigmoid().detach(), w.detach().abs(), reduction=kind),
                [(5, 9), (5, 9), (9,)]) for kind in REDUCTIONS),
    Composite("mean", lambda x: x.exp().mean(), [(5, 9)]),
    Composite("mean over rows", lambda x: (x * 2).mean(0), [(5, 9)]),
    Composite("mean over a dim in the middle", lambda x: x.exp().mean(1, keepdim=True),
              [(5, 4, 9)]),
    Composite("softplus", F.softplus, [(7, 33)], scale=9),
    Composite("softplus with a threshold", lambda x: F.softplus(x, 0.5, 2.0), [(7, 33)], scale=5),
    Composite("mish", F.mish, [(7, 33)], scale=5),
    Composite("log-sigmoid", F.logsigmoid, [(7, 33)], scale=9),
    # A trace of open sizes takes these apart.
    Composite("shrinkage", lambda x: F.softshrink(x, 0.3) + F.hardshrink(x * 2, 0.7), [(7, 33)],
              reads_sizes=True),
    Composite("threshold", lambda x: F.threshold(x, 0.25, -2.0), [(7, 33)]),
    Composite("rectifier with a slope to learn", F.prelu, [(7, 33), (1,)]),
    Composite("rectifier with a slope for each channel", F.prelu, [(4, 5, 6), (5,)]),
    Composite("interpolation",
              lambda x, y: torch.lerp(x, y, 0.2) + torch.lerp(x, y, 0.7),
              [(5, 9), (9,)]),
    Composite("extrapolation", lambda x, y: torch.lerp(x, y, -0.8), [(5, 9), (5, 9)]),
    Composite("products that are added", lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
              [(5, 9), (5, 9), (9,)]),
    Composite("bounds that are tensors",
              lambda x, y: torch.clamp_min(x, y) + torch.clamp_max(x * 2, y.flip(0)),
              [(5, 9), (9,)]),
    Composite("norm of rows", lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
              [(5, 9)]),
    Composite("norm of everything", lambda x: torch.linalg.vector_norm(x), [(5, 9)]),
    Composite("norm of columns", lambda x: torch.linalg.vector_norm(x, dim=0), [(5, 9)]),
    Composite("sum of absolute numbers", lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
              [(5, 9)]),
    Composite("variance of rows", lambda x: x.var(-1), [(5, 9)], reads_sizes=True),
    Composite("variance of two dims", lambda x: x.var((2, 1), keepdim=True, correction=0),
              [(3, 4, 5)], reads_sizes=True),
    Composite("deviation of rows", lambda x: x.std(-1, keepdim=True), [(5, 9)], reads_sizes=True),
    Composite("variance and mean", lambda x: torch.cat(torch.var_mean(x, -1)), [(5, 9)],
              reads_sizes=True),
    Composite("deviation and mean",
              lambda x: torch.cat(torch.std_mean(x, -1, correction=2, keepdim=True)),
              [(5, 9)], reads_sizes=True),
    Composite("logarithm of sums", lambda x: x.logsumexp(-1), [(5, 9)]),
    Composite("logarithm of sums of two dims", lambda x: x.logsumexp((1, 2), keepdim=True),
              [(3, 4, 5)], scale=100),
    Composite("distances of rows", F.pairwise_distance, [(5, 9), (5, 9)]),
    Composite("divergence",
              lambda x, y: F.kl_div(x, y.softmax(-1).detach(), reduction="sum"), [(5, 9), (5, 9)]),
    Composite("cosine similarity", F.cosine_similarity, [(5, 9), (5, 9)]),
    Composite("clamp", lambda x: x.clamp(-0.5, 0.75), [(5, 9)]),
    Composite("clamp from below", lambda x: x.clamp(min=0.25), [(5, 9)]),
    Composite("clamp from above", lambda x: x.clamp(max=0.25), [(5, 9)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "is_sum"),
    [
        (lambda x: x.exp().mean(), True),
        (lambda x: x.exp().mean(0), True),
        (lambda x: x.exp().mean((0, 1)), True),
        (lambda x: x.exp().mean(-1), False),  # a word of regions
        (lambda x: x.mean(), False),  # nothing that a region could compute with it
        (lambda x: x.flatten(0, 1).mean(0), False),
    ],
)
def test_means_become_sums_of_what_regions_compute(call, is_sum):
    graph = convert(call, floats(5, 4, 9))
    _C.run_pass("expand_composites", graph)
    graph.verify("test")
    assert ("ReduceSum" in ops_of(graph)) == is_sum
    assert ("ReduceMean" in ops_of(graph)) != is_sum


def dropout(x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    result, mask = torch.ops.aten.native_dropout(x, 0.3, True)
    return [result, torch.ops.aten.native_dropout_backward(gradient, mask, 1 / 0.7), mask]


def assert_near(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Compare results with those in float64, by the largest number of each if it is above one."""
    for ours, exact in zip(got, want, strict=True):
        near, exact = TOLERANCE.get(ours.dtype, 0), exact.double()
        largest = max([1, *exact[exact.isfinite()].abs().flatten().tolist()])
        torch.testing.assert_close(
            ours.double(), exact, rtol=near, atol=near * largest, equal_nan=True
        )


def expand(graph: _C.Graph, stays: Sequence[str] = ()) -> _C.Graph:
    """Give a graph after expand_composites, in which nothing is left but `stays`."""
    expanded = graph.clone()
    assert _C.run_pass("expand_composites", expanded) > 0 or stays
    expanded.verify("test")
    # Formulas of norms have means of rows, which are words of regions.
    left = EXPANSIONS & set(ops_of(expanded)) - {"ReduceMean"}
    assert left <= set(stays), left
    return expanded


def run_all(
    graph: _C.Graph, inputs: Sequence[torch.Tensor], check: Callable[[list[torch.Tensor]], None]
) -> None:
    """Check the results of a graph of small operators, and of it fused on each instruction set."""
    given = dict(zip(graph.input_names, inputs, strict=True))
    fused = regions.fuse(graph)
    for each, isa in ((graph, ""), *((fused, isa) for isa in ISAS)):
        torch.manual_seed(0)
        results = regions.run_by_name(each, given, isa)
        check([results[name] for name in graph.output_names])


@pytest.mark.parametrize("dtype", DTYPES, ids=regions.NAMES.get)
@pytest.mark.parametrize("composite", COMPOSITES, ids=str)
def test_composite(composite: Composite, dtype: torch.dtype) -> None:
    inputs = composite.inputs(dtype)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    want = composite.with_gradients(*exact)
    graph = convert(composite.with_gradients, *inputs)
    if dtype in (torch.bfloat16, torch.float16) and "embedding" in composite.name:
        assert _C.run_pass("expand_composites", graph) == 0  # PyTorch's kernel adds in float32
        return
    run_all(expand(graph, composite.stays), inputs, lambda got: assert_near(got, want))


@pytest.mark.parametrize(
    "composite", [each for each in COMPOSITES if not each.reads_sizes], ids=str
)
def test_composite_of_unknown_sizes(composite: Composite) -> None:
    inputs = composite.inputs(torch.float32)
    want = composite.with_gradients(*(x.double() if x.is_floating_point() else x for x in inputs))
    graph = convert(composite.with_gradients, *inputs, dynamic=True)
    run_all(expand(graph, composite.stays), inputs, lambda got: assert_near(got, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=regions.NAMES.get)
def test_dropout_draws_as_it_did(dtype: torch.dtype) -> None:
    inputs = [floats(20, 30).to(dtype), floats(30, 20).mT.to(dtype)]
    graph = convert(dropout, *inputs)
    torch.manual_seed(0)
    want = list(_C.run(graph, dict(zip(graph.input_names, inputs, strict=True))).values())
    assert 0 < want[2].sum() < want[2].numel()
    run_all(expand(graph), inputs, lambda got: assert_near(got, want))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all_stays(share: float) -> None:
    graph = convert(lambda x: torch.ops.aten.native_dropout(x, share, True)[0], torch.ones(3, 4))
    assert _C.run_pass("expand_composites", graph) == 0


def test_every_expansion_has_a_case() -> None:
    seen = set(ops_of(convert(dropout, torch.ones(3, 4), torch.ones(3, 4))))
    for composite, dtype in itertools.product(COMPOSITES, (torch.float32, torch.bfloat16)):
        for dynamic in {False, not composite.reads_sizes}:
            graph = convert(composite.with_gradients, *composite.inputs(dtype), dynamic=dynamic)
            seen |= set(ops_of(graph)) - set(composite.stays)
    assert seen >= EXPANSIONS


SPECIAL = torch.tensor([
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 20.0, -20.0, 60.0,
    -60.0, 1e-30, -1e-30, 3e38, -3e38,
])  # fmt: skip
AT_ENDS = {
    "softplus": F.softplus,
    "softplus with a threshold": lambda x: F.softplus(x, 2.0, 1.0),
    "mish": F.mish,
    "log-sigmoid": F.logsigmoid,
    "soft shrinkage": lambda x: F.softshrink(x, 0.5),
    "hard shrinkage": lambda x: F.hardshrink(x, 0.5),
    "threshold": lambda x: F.threshold(x, 0.5, 3.0),
    "exponential units": lambda x: F.elu(x, 0.7) + F.selu(x) + F.celu(x, 1.3),
    "slope to learn": lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    "squared error": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none"),
    "Huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.5),
    "smooth": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=0.5),
    "binary": lambda x: binary(x, torch.full_like(x, 0.25), reduction="none"),
    "bound": lambda x: torch.clamp_min(x, torch.full_like(x, 0.5)),
    "mean": lambda x: (x * 2).mean(0),
    "logarithm of sums": lambda x: x.logsumexp(-1),
    "logarithm of sums of all kinds": lambda x: torch.stack(
        [x[:, 0], x[:, 0].flip(0)], -1
    ).logsumexp(-1),
    "deviation": lambda x: x.std(-1),
    "variance of one": lambda x: x[:, :1].var(-1),
    "logarithm times zero": lambda x: torch.xlogy(x.flip(0), x.abs()),
    "norm": lambda x: torch.linalg.vector_norm(x * 2, dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=regions.NAMES.get)
@pytest.mark.parametrize("name", AT_ENDS)
def test_ends_of_pieces_and_what_is_not_finite(name: str, dtype: torch.dtype) -> None:
    """As PyTorch's kernels in the same dtype, whose squares overflow as well."""

    def with_gradient(x, dy):
        result, pull = torch.func.vjp(AT_ENDS[name], x)
        return [result, *pull(dy.expand(result.shape))]

    # Gradients of shrinkage at NaN are others in PyTorch's vectors than in its single numbers.
    numbers = SPECIAL[1:] if "shrinkage" in name else SPECIAL
    if name == "deviation":  # PyTorch adds up in float64
        numbers = SPECIAL[SPECIAL.abs() != 3e38]
    inputs = [numbers.to(dtype)[:, None].repeat(1, 3), torch.tensor(1.5, dtype=dtype)]
    graph = convert(with_gradient, *inputs)
    run_all(
        expand(graph),
        inputs,
        lambda got: torch.testing.assert_close(got, with_gradient(*inputs), equal_nan=True),
    )
