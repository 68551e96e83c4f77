"""Operators of PyTorch that ONNX has not, or under another name, in files that onnxruntime runs.

| what                                             | has to give                                |
| ------------------------------------------------ | ------------------------------------------ |
| exponentials, pieces, arithmetic, reductions     | eager's numbers, by onnxruntime            |
| losses, norms, orders, places, parts, images     | the same                                   |
| with a named size                                | the same, for another size                 |
| corner cases: zeros, infinities, NaN, signs      | eager's                                    |
| what ONNX cannot say                             | an error that names the operator           |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.checker
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_ort

Function = Callable[[Tensor], object]


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def image(x: Tensor) -> Tensor:
    return x[None, None]


def assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 1
    x[1:3] = x[2:] * 2
    x[-1, -1] = x[0, 1]
    return x


EXPONENTIALS: dict[str, Function] = {
    "log1p": lambda x: x.abs().log1p(),
    "expm1": torch.expm1,
    "exp2": torch.exp2,
    "log2": lambda x: x.abs().log2(),
    "log10": lambda x: x.abs().log10(),
    "erfc": torch.erfc,
    "logit": lambda x: x.sigmoid().logit(),
    "logit within": lambda x: x.logit(eps=0.1),
    "xlogy": lambda x: torch.xlogy(x, x.abs()),
    "logaddexp": lambda x: torch.logaddexp(x, 3 - x),
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "log_sigmoid": F.logsigmoid,
    "sinc": torch.sinc,
    "logsumexp": lambda x: x.logsumexp(1),
}
PIECES: dict[str, Function] = {
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.3, -5.0),
    "celu": lambda x: F.celu(x, 1.5),
    "glu": lambda x: F.glu(x[:, :4], 1),
    "clamp by tensors": lambda x: torch.clamp(x, x - 1, x.flip(1)),
    "clamp below a tensor": lambda x: torch.clamp(x, max=x.flip(1)),
    "nan_to_num": lambda x: torch.nan_to_num(x / 0.0),
    "heaviside": lambda x: torch.heaviside(x.round(), x),
    "isfinite": lambda x: (x / x.round()).isfinite(),
}
ARITHMETIC: dict[str, Function] = {
    "trunc": lambda x: (3 * x).trunc(),
    "frac": lambda x: (3 * x).frac(),
    "remainder": lambda x: torch.remainder(x, -0.7),
    "remainder of tensors": lambda x: torch.remainder(x, x.flip(1) + 4),
    "floor_divide": lambda x: x // 0.7,
    "floor_divide of integers": lambda x: (10 * x).long() // 3,
    "round to decimals": lambda x: x.round(decimals=2),
    "sgn": torch.sgn,
    "atan2": lambda x: torch.atan2(x, x.flip(1)),
    "hypot": lambda x: torch.hypot(x, x.flip(1)),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "lerp by a tensor": lambda x: torch.lerp(x, x + 1, x.abs()),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 3, value=2),
}
REDUCTIONS: dict[str, Function] = {
    "var": lambda x: x.var(1),
    "var of all": lambda x: x.var(),
    "var with a correction": lambda x: x.var((0, 1), correction=0, keepdim=True),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, 0, keepdim=True),
    "largest norm": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "smallest norm": lambda x: torch.linalg.vector_norm(x, -math.inf, 1),
    "norm of three": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "count": lambda x: torch.linalg.vector_norm(x.round(), 0, 1),
    "aminmax": lambda x: x.aminmax(dim=1),
    "sum of truths": lambda x: (x > 0).sum(1),
    "sum of integers": lambda x: x.round().to(torch.int32).sum(),
    "cosine": lambda x: F.cosine_similarity(x, x + 1),
    "cdist": lambda x: torch.cdist(x, x + 1),
}
LOSSES: dict[str, Function] = {
    "mse": lambda x: F.mse_loss(x, 2 * x),
    "mse, summed": lambda x: F.mse_loss(x, 2 * x, reduction="sum"),
    "huber": lambda x: F.huber_loss(x, x.flip(1), delta=0.7),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.flip(1), reduction="none", beta=0.3),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(1).sigmoid()),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x.flip(1).sigmoid(), pos_weight=torch.tensor(2.0)
    ),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.flip(1).softmax(1), reduction="batchmean"),
}
NORMS: dict[str, Function] = {
    "group norm": lambda x: F.group_norm(x[:, :4], 2),
    "group norm of images": lambda x: F.group_norm(
        x[None], 2, torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.0, 1, 2, 3])
    ),
    "instance norm": lambda x: F.instance_norm(x[None]),
}
ORDERS: dict[str, Function] = {
    "sort": lambda x: x.sort(1),
    "sort, descending": lambda x: x.sort(0, descending=True),
    "argsort": lambda x: x.argsort(1),
    "topk": lambda x: x.topk(3, 1),
    "topk, smallest": lambda x: x.topk(2, 0, largest=False),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(0, keepdim=True),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all": lambda x: x.argmin(),
    "take along": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 1])),
    "one_hot": lambda x: F.one_hot(x.argmax(1), 5),
}
PLACES: dict[str, Function] = {
    "index": lambda x: x[:, [0, 2, -1]],
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "assigned": assigned,
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 0]), x[:, :2], alpha=2),
    "flip": lambda x: x.flip(0, 1),
    "roll": lambda x: x.roll((1, -2), (0, 1)),
    "roll of all": lambda x: x.roll(3),
    "diagonal": lambda x: x.diagonal(1),
    "diagonal below": lambda x: x[None].diagonal(-1, 1, 2),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "linspace": lambda x: x + torch.linspace(0, 2, 5),
    "eye": lambda x: x @ torch.eye(5, 3),
    "bilinear form": lambda x: F.bilinear(x, x, torch.full((2, 5, 5), 0.3), torch.ones(2)),
}
IMAGES: dict[str, Function] = {
    "reflected": lambda x: F.pad(image(x), (1, 2, 3, 0), mode="reflect"),
    "replicated": lambda x: F.pad(image(x), (1, 2, 3, 0), mode="replicate"),
    "circular": lambda x: F.pad(image(x), (1, 2, 3, 0), mode="circular"),
    "bilinear": lambda x: F.interpolate(image(x), size=(7, 9), mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(
        image(x), size=(7, 9), mode="bilinear", align_corners=True
    ),
    "bilinear, factor": lambda x: F.interpolate(image(x), scale_factor=1.7, mode="bilinear"),
    "nearest": lambda x: F.interpolate(image(x), scale_factor=3),
    "bicubic": lambda x: F.interpolate(image(x), size=(8, 9), mode="bicubic"),
    "linear": lambda x: F.interpolate(x[None], size=8, mode="linear"),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(image(x), (2, 1)),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(image(x), (2, 5)),
    "shuffled": lambda x: F.pixel_shuffle(x.reshape(1, 4, 1, 5), 2),
    "unshuffled": lambda x: F.pixel_unshuffle(x[:, :4].reshape(1, 1, 4, 4), 2),
    "sampled": lambda x: F.grid_sample(
        image(x), x[None, :, :4].reshape(1, 2, 4, 2), align_corners=False
    ),
    "sampled, nearest": lambda x: F.grid_sample(
        image(x), x[None, :, :4].reshape(1, 2, 4, 2), "nearest", "border", align_corners=True
    ),
    "affine": lambda x: F.affine_grid(x[None, :2, :3], (1, 1, 4, 5), align_corners=False),
}
FAMILIES = {
    "exponentials": EXPONENTIALS, "pieces": PIECES, "arithmetic": ARITHMETIC, "losses": LOSSES,
    "reductions": REDUCTIONS, "norms": NORMS, "orders": ORDERS, "places": PLACES, "images": IMAGES,
}  # fmt: skip
CASES = [
    pytest.param(function, id=f"{family}-{name}")
    for family, functions in FAMILIES.items()
    for name, function in functions.items()
]
# Those that depend on the number of rows only as a size.
BY_ROWS = ["log1p", "softplus", "glu", "remainder", "var", "std_mean", "largest norm", "cosine",
           "huber", "bce", "group norm", "sort", "topk", "max", "index", "index_add", "flip",
           "unfold", "diagonal", "nonzero", "roll of all", "linspace", "eye", "circular",
           "bilinear", "bicubic"]  # fmt: skip


def by_onnxruntime(path: Path, x: Tensor) -> list[Tensor]:
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return [torch.from_numpy(np.asarray(each)) for each in session.run(None, {name: x.numpy()})]


def check(module: nn.Module, path: Path, x: Tensor) -> None:
    want = module(x)
    want = list(want) if isinstance(want, tuple) else [want]
    for ours, theirs in zip(by_onnxruntime(path, x), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("function", CASES)
def test_files_give_eagers_numbers(function: Function, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, x, module = tmp_path / "net.onnx", torch.randn(4, 5), Applied(function).eval()
    torch_ort.export_onnx(module, path, (x,))
    check(module, path, x)
    check(module, path, torch.randn(4, 5))


@pytest.mark.filterwarnings("ignore:.*the file is right for sizes from")
@pytest.mark.parametrize("name", BY_ROWS)
def test_named_sizes_may_be_others(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (function,) = [each[name] for each in FAMILIES.values() if name in each][:1]
    path, x, module = tmp_path / "net.onnx", torch.randn(6, 5), Applied(function).eval()
    torch_ort.export_onnx(module, path, (x,), dynamic={"x": {0: "rows"}})
    for rows in (6, 8, 5):
        check(module, path, torch.randn(rows, 5))


SPECIAL = torch.tensor([[0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 30.0, -30.0, 0.5]])


@pytest.mark.parametrize(
    "name",
    ["xlogy", "softplus", "log_sigmoid", "hardshrink", "softshrink", "threshold", "nan_to_num",
     "isfinite", "trunc", "heaviside"],
)  # fmt: skip
def test_corners(name: str, tmp_path: Path) -> None:
    (function,) = [each[name] for each in FAMILIES.values() if name in each][:1]
    path, module = tmp_path / "net.onnx", Applied(function).eval()
    torch_ort.export_onnx(module, path, (SPECIAL,))
    check(module, path, SPECIAL)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.median(1)[0], "aten::median"),
        (torch.lgamma, "aten::lgamma"),
        (lambda x: torch.fft.rfft(x).abs(), "aten::_fft_r2c"),
        (lambda x: x.roll(9, 0), "aten::roll"),
    ],
)
def test_what_onnx_cannot_say(function: Function, operator: str, tmp_path: Path) -> None:
    with pytest.raises(torch_ort.Unsupported, match=operator):
        torch_ort.export_onnx(Applied(function), tmp_path / "net.onnx", (torch.randn(4, 5),))
