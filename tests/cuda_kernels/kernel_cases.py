"""Regions of every kind that the generator of CUDA knows, with what they give in float64.

Sizes are such that rows, columns and sums do not come out even: the last block, line, strip and
vector of each kernel are parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import regions
import torch

from torch_ort import _C

Tensors = Mapping[str, torch.Tensor]
LAST, FIRST = "int64[1] last = {-1}", "int64[1] first = {0}"
SEED = 1234567890123
RATIO, PIXELS = "torch_ort.SizeRatio", 'denominator = "P"'


@dataclass(frozen=True)
class Case:
    """A region, inputs for it, and what it makes of them in float64.

    `near` is what results may be off by, relative to the largest of them, beside the rounding of
    their dtype.
    """

    inputs: Mapping[str, str]
    nodes: Sequence[str]
    outputs: Sequence[str]
    given: Callable[[], dict[str, torch.Tensor]]
    want: Callable[..., dict[str, torch.Tensor]]
    constants: Sequence[str] = (LAST, FIRST)
    types: Mapping[str, str] = field(default_factory=dict)
    near: float = 2e-6
    tells_fault: bool = False  # in the call after it

    def graph(self) -> _C.Graph:
        """Give the region alone."""
        names = " ".join(self.nodes)
        used = [each for each in self.constants if each.split()[1] in names]
        graph = regions.read(self.inputs, self.nodes, self.outputs, used, dict(self.types))
        result = regions.fuse(graph)
        _C.run_pass("remove_dead", result)  # what a region has its own copies of
        assert regions.ops(result) == ["Region"], regions.ops(result)
        return result

    def wanted(self) -> dict[str, torch.Tensor]:
        """Give what the region should make of its inputs, in float64."""
        given = self.given()
        wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        return self.want(**wide)

    def compare(self, got: Tensors, wanted: Tensors) -> None:
        """Raise AssertionError if a result is not what it should be."""
        for name, want in wanted.items():
            scale = want.double().abs().nan_to_num(0, 0, 0).amax().item()
            rtol = regions.TOLERANCE.get(got[name].dtype)
            regions.assert_near(got[name], want, rtol, atol=self.near * scale)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def philox_mask(count: int, stream: int, keep: float) -> torch.Tensor:
    """Give the mask of so many elements as Philox 4x32-10 makes it, in arithmetic of Python's."""
    words: list[int] = []
    low = 0xFFFFFFFF
    for counter in range((count + 3) // 4):
        x = [counter, 0, stream & low, stream >> 32]
        keys = [SEED & low, SEED >> 32]
        for _ in range(10):
            first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
            x = [
                second >> 32 ^ x[1] ^ keys[0], second & low,
                first >> 32 ^ x[3] ^ keys[1], first & low,
            ]  # fmt: skip
            keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
        words += x
    return torch.tensor(words[:count]) < int(keep * 2**32)


def dropout(*shape: int) -> Case:
    """GELU, dropout and what is added to it: one run of memory, whose end is a part of a vector."""
    dtype = torch.bfloat16

    def want(x, r, seed):
        mask = philox_mask(x.numel(), stream=2, keep=0.75).view(x.shape)
        gelu = torch.nn.functional.gelu(x)
        return {"y": gelu * mask * 1.5 + r, "mask": mask}

    return Case(
        {"x": "bfloat16[N,C]", "r": "bfloat16[N,C]", "seed": "int64[1]"},
        [
            "[wide] f = Cast <to = 1> (x)",
            "[gelu] g = Gelu (f)",
            "[mask] mask = torch_ort.PhiloxMask <keep = 0.75, stream = 2> (seed)",
            "[kept] kept = Cast <to = 1> (mask)",
            "[drop] d = Mul (g, kept)",
            "[scale] s = Mul (d, share)",
            "[stream] w = Cast <to = 1> (r)",
            "[residual] a = Add (s, w)",
            "[short] y = Cast <to = 16> (a)",
        ],
        ["y", "mask"],
        lambda: {
            "x": numbers(*shape, dtype=dtype),
            "r": numbers(*shape, seed=1, dtype=dtype),
            "seed": torch.tensor([SEED]),
        },
        want,
        constants=["float share = {1.5}"],
        types={"mask": "bool[N,C]"},
    )


def bias_dropout(rows: int, columns: int) -> Case:
    """Rows and columns: numbers of columns stay in registers; the mask of a row's own number."""

    def want(x, b, m, seed):
        mask = philox_mask(x.numel(), stream=5 + 2**33, keep=0.5).view(x.shape)
        of_rows = philox_mask(x.shape[0], stream=1, keep=0.5)[:, None]
        return {"y": (x + b).tanh() * mask - m, "z": (x + b) * of_rows}

    return Case(
        {"x": "float[N,C]", "b": "float[C]", "m": "float[N,1]", "seed": "int64"},
        [
            "a = Add (x, b)",
            "t = Tanh (a)",
            "mask = torch_ort.PhiloxMask <keep = 0.5, stream = 8589934597> (seed)",
            "kept = Cast <to = 1> (mask)",
            "d = Mul (t, kept)",
            "y = Sub (d, m)",
            "of_rows = torch_ort.PhiloxMask <keep = 0.5, stream = 1> (seed)",
            "kept_rows = Cast <to = 1> (of_rows)",
            "z = Mul (a, kept_rows)",
        ],
        ["y", "z"],
        lambda: {
            "x": numbers(rows, columns),
            "b": numbers(columns, seed=1),
            "m": numbers(rows, 1, seed=2),
            "seed": torch.tensor(SEED),
        },
        want,
        types={"mask": "bool[N,C]", "of_rows": "bool[N,1]"},
    )


def softmax(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Case:
    def given():
        x = numbers(rows, columns, dtype=dtype)
        x[1, columns // 3] = torch.nan
        x[0] -= 1000  # nothing below zero, and nothing above it: extremes must not begin there
        x[2] += 1000
        return {"x": x}

    def want(x):
        a = -x
        least, largest = a.amin(-1, keepdim=True), a.amax(-1, keepdim=True)
        return {"y": a.softmax(-1), "least": least, "m": largest}

    return Case(
        {"x": regions.type_text(dtype, ("N", "C"))},
        [
            "[turn] a = Neg (x)",
            "[largest] m = ReduceMax (a, last)",
            "[shift] c = Sub (a, m)",
            "[exp] e = Exp (c)",
            "[sum] s = ReduceSum (e, last)",
            "[divide] y = Div (e, s)",
            "[least] least = ReduceMin (a, last)",
        ],
        ["y", "least", "m"],
        given,
        want,
        near=regions.TOLERANCE[dtype],
    )


def layer_norm_grad(rows: int, columns: int) -> Case:
    """Sums along rows, and over rows for each column; short floats come and go."""

    def want(g, x, w, mean, scale):
        n = (x - mean) * scale
        d = g * w
        dx = (d - d.mean(-1, keepdim=True) - n * (d * n).mean(-1, keepdim=True)) * scale
        return {"dx": dx, "dw": (g * n).sum(0), "db": g.sum(0)}

    def given():
        x = numbers(rows, columns, seed=1)
        return {
            "g": numbers(rows, columns, dtype=torch.bfloat16),
            "x": x,
            "w": numbers(columns, seed=2),
            "mean": x.mean(-1, keepdim=True),
            "scale": x.var(-1, correction=0, keepdim=True).add(1e-5).rsqrt(),
        }

    return Case(
        {
            "g": "bfloat16[N,C]", "x": "float[N,C]", "w": "float[C]",
            "mean": "float[N,1]", "scale": "float[N,1]",
        },
        [
            "[wide] h = Cast <to = 1> (g)",
            "[center] c = Sub (x, mean)",
            "[normal] n = Mul (c, scale)",
            "[weigh] d = Mul (h, w)",
            "[mean_1] m1 = ReduceMean (d, last)",
            "[product] p = Mul (d, n)",
            "[mean_2] m2 = ReduceMean (p, last)",
            "[part_1] a = Sub (d, m1)",
            "[part_2] b = Mul (n, m2)",
            "[parts] ab = Sub (a, b)",
            "[dx] dx = Mul (ab, scale)",
            "[of_weight] q = Mul (h, n)",
            "[dw] dw = ReduceSum <keepdims = 0> (q, first)",
            "[db] db = ReduceSum <keepdims = 0> (h, first)",
        ],
        ["dx", "dw", "db"],
        given,
        want,
    )  # fmt: skip


def norm_dropout(rows: int, columns: int) -> Case:
    """A norm of whole images, a mask, numbers of columns and rows, and sums of everything."""

    def want(x, w, seed):
        n = (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + 0.25).rsqrt()
        y = n * w * philox_mask(x.numel(), stream=3, keep=0.5).view(x.shape)
        mean = x.mean(-1, keepdim=True)
        return {"y": y, "mean": mean, "all": y.sum(), "means": mean.sum(), "most": y.amax(-1)}

    return Case(
        {"x": "bfloat16[N,C]", "w": "float[C]", "seed": "int64[1]"},
        [
            "f = Cast <to = 1> (x)",
            "mean = ReduceMean (f, last)",
            "c = Sub (f, mean)",
            "q = Mul (c, c)",
            "v = ReduceMean (q, last)",
            "e = Add (v, epsilon)",
            "d = Sqrt (e)",
            "i = Reciprocal (d)",
            "n = Mul (c, i)",
            "a = Mul (n, w)",
            "mask = torch_ort.PhiloxMask <keep = 0.5, stream = 3> (seed)",
            "kept = Cast <to = 1> (mask)",
            "y = Mul (a, kept)",
            "all = ReduceSum <keepdims = 0> (y)",
            "means = ReduceSum <keepdims = 0> (mean)",
            "most = ReduceMax <keepdims = 0> (y, last)",
        ],
        ["y", "mean", "all", "means", "most"],
        lambda: {
            "x": numbers(rows, columns, dtype=torch.bfloat16) + 3,
            "w": numbers(columns, seed=2),
            "seed": torch.tensor([SEED]),
        },
        want,
        constants=[LAST, "float epsilon = {0.25}"],
        types={"mask": "bool[N,C]", "mean": "float[N,1]"},
        near=5e-6,
    )


def labels_of(rows: int, columns: int) -> torch.Tensor:
    label = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(rows))
    label[0], label[-1] = 0, columns - 1
    label[1::4] = -100
    return label


def loss(rows: int, columns: int, gap: int = 0) -> Case:
    """A cross-entropy and the number of labels that count; there may be a gap between rows."""

    def given():
        x = numbers(rows, columns + gap)[:, :columns]
        x[0] -= 100  # where exponentials are nothing, or infinite
        x[2] += 100
        return {"x": x, "label": labels_of(rows, columns)}

    def want(x, label):
        valid = label != -100
        picked = x.log_softmax(-1).gather(1, label.where(valid, 0)[:, None])[:, 0].where(valid, 0.0)
        largest = x.amax(-1, keepdim=True)
        every = x.log_softmax(-1).sum()
        return {"sum": picked.sum(), "count": valid.sum().double(), "all": every, "m": largest}

    return Case(
        {"x": "float[N,C]", "label": "int64[N]"},
        [
            "[largest] m = ReduceMax (x, last)",
            "[shift] c = Sub (x, m)",
            "[exp] e = Exp (c)",
            "[sum] s = ReduceSum (e, last)",
            "[log] l = Log (s)",
            "[log_softmax] y = Sub (c, l)",
            "[pick] picked = torch_ort.RowPick <ignore_index = -100> (y, label)",
            "[valid] valid = torch_ort.RowValid <ignore_index = -100> (label)",
            "[weigh] counted = Mul (picked, valid)",
            "[loss] sum = ReduceSum <keepdims = 0> (counted)",
            "[count] count = ReduceSum <keepdims = 0> (valid)",
            "[all] all = ReduceSum <keepdims = 0> (y)",
        ],
        ["sum", "count", "all", "m"],
        given,
        want,
        types={"picked": "float[N]", "valid": "float[N]"},
        near=5e-6,
    )


def loss_grad(rows: int, columns: int) -> Case:
    def want(p, label, g):
        grad = p.exp() * (label != -100)[:, None] * g
        for row, column in enumerate(label.tolist()):
            if column >= 0:
                grad[row, column] -= g
        return {"y": grad}

    return Case(
        {"p": "float[N,C]", "label": "int64[N]", "g": "float"},
        [
            "[back] s = torch_ort.RowScatter <ignore_index = -100> (label, g)",
            "[valid] valid = torch_ort.RowValid <ignore_index = -100> (label)",
            "[weight] w = Mul (valid, g)",
            "[weights] ws = Unsqueeze (w, last)",
            "[exp] e = Exp (p)",
            "[product] q = Mul (e, ws)",
            "[difference] y = Sub (q, s)",
        ],
        ["y"],
        lambda: {
            "p": numbers(rows, columns).log_softmax(-1),
            "label": labels_of(rows, columns),
            "g": torch.tensor(0.37),
        },
        want,
        types={"s": "float[N,C]", "valid": "float[N]"},
    )


def infinite_exponentials(columns: int, dtype: torch.dtype = torch.float32) -> Case:
    """Largest numbers and sums of exponentials, where numbers are infinite or NaN."""

    def given():
        x = numbers(8, columns, dtype=dtype)
        x[1, : columns - 5] = -torch.inf  # whole threads have nothing
        x[2] = -torch.inf
        x[3, 7], x[4, -1] = torch.inf, torch.nan
        x[5] += 3e4  # as large as float16 permits
        x[6] = -torch.arange(columns) / 100.0  # the largest number is the first
        x[7] = torch.arange(columns) / 1000.0  # the last
        return {"x": x}

    def want(x):
        largest = x.amax(-1, keepdim=True)
        return {"m": largest, "s": (x - largest).exp().sum(-1, keepdim=True), "n": (-x).amax(-1)}

    kind = {torch.float32: "float", torch.bfloat16: "bfloat16"}[dtype]
    return Case(
        {"x": f"{kind}[N,C]"},
        [
            "w = Cast <to = 1> (x)",
            "m = ReduceMax (w, last)",
            "minus = Neg (w)",
            "n = ReduceMax <keepdims = 0> (minus, last)",
            "c = Sub (w, m)",
            "e = Exp (c)",
            "s = ReduceSum (e, last)",
        ],
        ["m", "s", "n"],
        given,
        want,
        types={"w": "float[N,C]"},
        near=0,
    )


def softmax_loss_grad(rows: int, columns: int, is_bad: bool = False) -> Case:
    """Sums along rows of what a label alone adds to, in rows that are read in a loop."""

    def given():
        label = labels_of(rows, columns)
        if is_bad:
            label[2], label[3] = columns, -1
        return {"p": numbers(rows, columns).log_softmax(-1), "label": label, "g": numbers(rows)}

    def want(p, label, g):
        outside = (label == columns) | (label == -1)
        counts = (label >= 0) & ~outside
        of_label = g.where(counts, 0.0).masked_fill(outside, torch.nan)
        back = torch.zeros_like(p).scatter(1, label.where(counts, 0)[:, None], of_label[:, None])
        back[outside] = torch.nan
        return {"y": back - p.exp() * of_label[:, None]}

    return Case(
        {"p": "float[N,C]", "label": "int64[N]", "g": "float[N]"},
        [
            "back = torch_ort.RowScatter <ignore_index = -100> (label, g)",
            "sum = ReduceSum (back, last)",
            "e = Exp (p)",
            "q = Mul (e, sum)",
            "y = Sub (back, q)",
        ],
        ["y"],
        given,
        want,
        types={"back": "float[N,C]"},
        tells_fault=is_bad,
    )


def column_dots(rows: int, columns: int) -> Case:
    """Sums over rows that end with a part of a vector, and begin at different places of vectors."""

    def want(x, y, m):
        p = x * y - m
        return {"a": p.sum(0), "b": (p * y).sum(0), "c": p.mean(-1)}

    return Case(
        {"x": "bfloat16[N,C]", "y": "bfloat16[N,C]", "m": "float[N,1]"},
        [
            "fx = Cast <to = 1> (x)",
            "fy = Cast <to = 1> (y)",
            "q = Mul (fx, fy)",
            "p = Sub (q, m)",
            "a = ReduceSum <keepdims = 0> (p, first)",
            "r = Mul (p, fy)",
            "b = ReduceSum <keepdims = 0> (r, first)",
            "c = ReduceMean <keepdims = 0> (p, last)",
        ],
        ["a", "b", "c"],
        lambda: {
            "x": numbers(rows, columns, dtype=torch.bfloat16),
            "y": numbers(rows, columns + 3, seed=1, dtype=torch.bfloat16)[:, :columns],
            "m": numbers(rows, 1, seed=2),
        },
        want,
        near=5e-6,
    )


def dots(rows: int, columns: int, dtype: torch.dtype, gaps: tuple[int, int, int]) -> Case:
    """Products of rows that begin at different places of vectors: each has another gap."""
    names = ("x", "y", "z")

    def want(x, y, z):
        return {"a": (x * y).sum(-1), "b": (x * y * z).amax(-1), "c": (x + z).sum()}

    def given():
        return {
            name: numbers(rows, columns + gap, seed=seed, dtype=dtype)[:, :columns]
            for seed, (name, gap) in enumerate(zip(names, gaps, strict=True))
        }

    return Case(
        {name: regions.type_text(dtype, ("N", "C")) for name in names},
        [
            *(f"f{name} = Cast <to = 1> ({name})" for name in names),
            "p = Mul (fx, fy)",
            "q = Mul (p, fz)",
            "s = Add (fx, fz)",
            "a = ReduceSum <keepdims = 0> (p, last)",
            "b = ReduceMax <keepdims = 0> (q, last)",
            "c = ReduceSum <keepdims = 0> (s)",
        ],
        ["a", "b", "c"],
        given,
        want,
        near=5e-6,
    )


def bad_labels(rows: int, columns: int) -> Case:
    """Labels and ids out of bounds give NaN, and are told of."""

    def given():
        label = labels_of(rows, columns)
        label[2], label[6] = columns, -1
        ids = torch.arange(rows) % 11
        ids[3], ids[7] = 11, -1
        return {
            "x": numbers(rows, columns),
            "label": label,
            "table": numbers(11, columns, seed=1),
            "ids": ids,
        }

    def want(x, label, table, ids):
        is_bad = (label == columns) | (label == -1)
        counts = (label >= 0) & ~is_bad
        picked = x.gather(1, label.where(counts, 0)[:, None])[:, 0].where(counts, 0.0)
        picked[is_bad] = torch.nan
        back = torch.zeros_like(x).scatter(1, label.where(counts, 0)[:, None], picked[:, None])
        back[is_bad] = torch.nan
        read = table[ids.clamp(0, 10)]
        read[(ids < 0) | (ids > 10)] = torch.nan
        return {"picked": picked, "y": back + x, "z": read + x}

    return Case(
        {"x": "float[N,C]", "label": "int64[N]", "table": "float[V,C]", "ids": "int64[N]"},
        [
            "a = Mul (x, one)",
            "picked = torch_ort.RowPick <ignore_index = -100> (a, label)",
            "back = torch_ort.RowScatter <ignore_index = -100> (label, picked)",
            "y = Add (back, a)",
            "read = Gather (table, ids)",
            "z = Add (read, a)",
        ],
        ["picked", "y", "z"],
        given,
        want,
        constants=["float one = {1}"],
        types={"picked": "float[N]", "back": "float[N,C]"},
        tells_fault=True,
    )


def embedding(sentences: int, length: int, columns: int) -> Case:
    """Rows of a table that ids name, and of another that all sentences share."""

    def want(table, ids, place):
        x = table[ids] + place
        return {"x": x, "y": x * (x.square().mean(-1, keepdim=True) + 0.25).rsqrt()}

    def given():
        table = numbers(11, columns)
        ids = torch.randint(11, (sentences, length), generator=torch.Generator().manual_seed(3))
        ids[0, 0], ids[-1, -1] = 10, 0
        return {"table": table, "ids": ids, "place": numbers(length, columns, seed=1)}

    return Case(
        {"table": "float[V,C]", "ids": "int64[N,L]", "place": "float[L,C]"},
        [
            "rows = Gather (table, ids)",
            "x = Add (rows, place)",
            "q = Mul (x, x)",
            "m = ReduceMean (q, last)",
            "e = Add (m, epsilon)",
            "r = Sqrt (e)",
            "i = Reciprocal (r)",
            "y = Mul (x, i)",
        ],
        ["x", "y"],
        given,
        want,
        constants=[LAST, "float epsilon = {0.25}"],
    )


def channel_sums(images: int, pixels: int, channels: int) -> Case:
    """Statistics of images whose channels stand last: sums over groups of rows, and an average."""

    def want(x, z, g):
        n = (x - z) * g
        share = 1 / pixels
        return {"y": n.relu(), "m": (n * share).sum(1), "q": (n * n).sum(1)}

    return Case(
        {"x": "float[N,P,C]", "z": "float[N,1,C]", "g": "float[C]"},
        [
            f"[share] share = {RATIO} <factor = 1.0, numerator = 1, {PIXELS}> ()",
            "[center] c = Sub (x, z)",
            "[scale] n = Mul (c, g)",
            "[relu] y = Relu (n)",
            "[average] a = Mul (n, share)",
            "[mean] m = ReduceSum <keepdims = 0> (a, middle)",
            "[square] s = Mul (n, n)",
            "[squares] q = ReduceSum <keepdims = 0> (s, middle)",
        ],
        ["y", "m", "q"],
        lambda: {
            "x": numbers(images, pixels, channels),
            "z": numbers(images, 1, channels, seed=1),
            "g": numbers(channels, seed=2),
        },
        want,
        constants=["int64[1] middle = {1}"],
        types={"share": "float"},
    )


def batch_norm(images: int, channels: int, pixels: int) -> Case:
    """Plain images: each row has the numbers of its channel."""

    def want(x, g, mean, w, b):
        n = x * w + b
        d = g * (n > 0)
        share = 0.5 / pixels
        return {"y": n.relu(), "s": (d * (x - mean)).sum(-1, keepdim=True) * share}

    def given():
        of_channels = {
            name: numbers(1, channels, 1, seed=seed) for seed, name in enumerate(("mean", "w", "b"))
        }
        shape = images, channels, pixels
        return {"x": numbers(*shape), "g": numbers(*shape, seed=4), **of_channels}

    return Case(
        {
            "x": "float[N,C,P]", "g": "float[N,C,P]",
            "mean": "float[1,C,1]", "w": "float[1,C,1]", "b": "float[1,C,1]",
        },
        [
            f"[share] share = {RATIO} <factor = 0.5, numerator = 1, {PIXELS}> ()",
            "[apply] n = torch_ort.MulAdd (x, w, b)",
            "[relu] y = Relu (n)",
            "[positive] z = Greater (n, zero)",
            "[gradient] d = Where (z, g, zero)",
            "[center] c = Sub (x, mean)",
            "[product] p = Mul (d, c)",
            "[sum] t = ReduceSum (p, last)",
            "[part] s = Mul (t, share)",
        ],
        ["y", "s"],
        given,
        want,
        constants=[LAST, "float zero = {0}"],
        types={"share": "float", "n": "float[N,C,P]"},
    )  # fmt: skip


def strided(rows: int, columns: int) -> Case:
    """Elements that lie apart, integers, truth values, float16, and parts of a larger result."""

    def want(x, i, b, h):
        chosen = torch.where(b, x * i, h)
        return {"y": torch.cat([chosen, x], 1), "more": chosen > h}

    return Case(
        {"x": "float[N,C]", "i": "int32[N,C]", "b": "bool[N,C]", "h": "float16[N,C]"},
        [
            "f = Cast <to = 1> (i)",
            "k = Cast <to = 1> (h)",
            "p = Mul (x, f)",
            "chosen = Where (b, p, k)",
            "y = Concat <axis = 1> (chosen, x)",
            "more = Greater (chosen, k)",
        ],
        ["y", "more"],
        lambda: {
            "x": numbers(columns, rows).mT,
            "i": numbers(rows, 2 * columns).mul(3).int()[:, ::2],
            "b": numbers(rows, columns, seed=4) > 0,
            "h": numbers(rows, columns, seed=5, dtype=torch.float16),
        },
        want,
    )


def heads(batch: int, length: int, count: int, width: int) -> Case:
    """What lies in pieces of some vectors each: heads of attention, turned by their places."""

    return Case(
        {"a": "float[B,H,L,W]", "b": "bfloat16[B,H,L,W]", "angle": "float[B,H,L,W]"},
        [
            "[turn] c = Cos (angle)",
            "[first] p = Mul (a, c)",
            "[wide] f = Cast <to = 1> (b)",
            "[other] s = Sin (angle)",
            "[second] q = Mul (f, s)",
            "[sum] y = Add (p, q)",
        ],
        ["y"],
        lambda: {
            "a": numbers(batch, length, count, width).transpose(1, 2),
            "b": numbers(batch, length, count, width, seed=1, dtype=torch.bfloat16).transpose(1, 2),
            "angle": numbers(batch, count, length, width, seed=2).mul(10.0).exp(),
        },
        lambda a, b, angle: {"y": a * angle.cos() + b * angle.sin()},
    )


CASES: dict[str, Callable[[], Case]] = {
    "dropout": functools.partial(dropout, 3, 1031),
    "bias_dropout": functools.partial(bias_dropout, 37, 72),
    "softmax": functools.partial(softmax, 37, 20),
    "softmax_of_long_rows": functools.partial(softmax, 5, 1100, torch.float64),
    "softmax_of_very_long_rows": functools.partial(softmax, 3, 17001),
    # Rows that begin within a vector and end within another, or only end so.
    "softmax_of_cut_rows": functools.partial(softmax, 9, 1031),
    "softmax_of_cut_short_floats": functools.partial(softmax, 9, 2027, torch.bfloat16),
    "loss_of_cut_rows": functools.partial(loss, 35, 1101),
    "loss_of_very_long_cut_rows": functools.partial(loss, 5, 20481),
    "loss_of_padded_rows": functools.partial(loss, 35, 1101, 3),
    "infinite_exponentials": functools.partial(infinite_exponentials, 1100),
    "infinite_exponentials_of_very_long_rows": functools.partial(infinite_exponentials, 17000),
    "infinite_exponentials_of_very_long_cut_rows": functools.partial(
        infinite_exponentials, 33001, torch.bfloat16
    ),
    "softmax_loss_grad": functools.partial(softmax_loss_grad, 9, 1101),
    "softmax_loss_grad_of_very_long_rows": functools.partial(softmax_loss_grad, 9, 20000),
    "softmax_loss_grad_of_very_long_cut_rows": functools.partial(softmax_loss_grad, 9, 20481),
    "bad_labels_of_very_long_rows": functools.partial(softmax_loss_grad, 9, 20481, True),
    "loss_grad_of_cut_rows": functools.partial(loss_grad, 37, 1301),
    # Rows of which each is cut in another way.
    "column_dots": functools.partial(column_dots, 75, 1301),
    "column_dots_of_very_long_rows": functools.partial(column_dots, 35, 17001),
    "dots": functools.partial(dots, 19, 1301, torch.float32, (0, 3, 1)),
    "dots_of_short_floats": functools.partial(dots, 19, 1301, torch.bfloat16, (0, 3, 2)),
    "dots_of_very_long_rows": functools.partial(dots, 3, 33001, torch.float16, (1, 7, 4)),
    # Few rows that are so long that several blocks share each.
    "softmax_of_split_rows": functools.partial(softmax, 3, 70016),
    "softmax_of_split_double_rows": functools.partial(softmax, 3, 66002, torch.float64),
    "loss_of_split_rows": functools.partial(loss, 5, 66304),
    "loss_of_split_cut_rows": functools.partial(loss, 3, 69633),
    "bad_labels_of_split_rows": functools.partial(bad_labels, 8, 65536),
    "embedding_of_split_rows": functools.partial(embedding, 2, 3, 66020),
    "norm_dropout": functools.partial(norm_dropout, 37, 72),
    "norm_dropout_of_very_long_rows": functools.partial(norm_dropout, 3, 33800),
    "norm_dropout_of_split_rows": functools.partial(norm_dropout, 3, 70144),
    "layer_norm_grad": functools.partial(layer_norm_grad, 75, 72),
    "layer_norm_grad_of_wide_rows": functools.partial(layer_norm_grad, 37, 800),
    "layer_norm_grad_of_long_rows": functools.partial(layer_norm_grad, 37, 5000),
    "layer_norm_grad_of_very_long_rows": functools.partial(layer_norm_grad, 35, 17000),
    "loss": functools.partial(loss, 75, 20),
    "loss_of_many_rows": functools.partial(loss, 17000, 3),
    "loss_of_long_rows": functools.partial(loss, 35, 1100),
    "loss_grad": functools.partial(loss_grad, 37, 300),
    "bad_labels": functools.partial(bad_labels, 13, 40),
    "embedding": functools.partial(embedding, 3, 13, 36),
    "channel_sums": functools.partial(channel_sums, 3, 45, 20),
    "channel_sums_of_many": functools.partial(channel_sums, 2, 300, 20),
    "batch_norm": functools.partial(batch_norm, 5, 3, 70),
    "heads": functools.partial(heads, 2, 5, 3, 16),
    "strided": functools.partial(strided, 37, 72),
}
