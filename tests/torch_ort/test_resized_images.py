"""Operators that PyTorch's traces would compute in Python run as eager's kernels, on both roads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from roads import ROADS, Applies

import torch_ort
from torch_ort.engine import watchers

SMOOTH = {1: "linear", 2: "bilinear", 3: "trilinear"}
FORMS = [
    *((n, {"mode": SMOOTH[n], "align_corners": corners}) for n in SMOOTH for corners in (0, 1)),
    *((2, {"mode": "bicubic", "align_corners": corners}) for corners in (0, 1)),
    *((n, {"mode": mode}) for n in SMOOTH for mode in ("nearest", "nearest-exact")),
]
IDS = [f"{n}d-" + "-".join(map(str, form.values())) for n, form in FORMS]
SIZES = {"size": {"size": (7, 5, 3)}, "factors": {"scale_factor": (2.0, 1.5, 0.6)}}
LOSSES = {
    "hardshrink": lambda x, target: F.hardshrink(x, 0.4),
    "softshrink": lambda x, target: F.softshrink(x, 0.4),
    "multi_margin": lambda x, target: F.multi_margin_loss(x, target, reduction="none"),
    "multi_margin_squared": lambda x, target: F.multi_margin_loss(x, target, p=2, margin=0.3),
    "multilabel_margin": lambda x, target: F.multilabel_margin_loss(
        x, torch.stack([target, target - 1, target, target], 1)
    ),
}


@pytest.fixture(params=sorted(ROADS))
def road(request):
    return ROADS[request.param]


def image(dims: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(2, 3, *(4, 6, 5)[:dims], dtype=dtype)
    x.view(-1)[7], x.view(-1)[13], x.view(-1)[20] = torch.inf, -torch.inf, torch.nan
    return x.requires_grad_()


def step(call, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Give the result and the gradient of the input, for a gradient with an infinity."""
    y = call(x, *others)
    tangent = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    if tangent.numel() > 1:
        tangent.view(-1)[1] = torch.inf
    return y.detach(), *torch.autograd.grad(y, x, tangent)


def assert_as_eager(call, module, *inputs: torch.Tensor) -> None:
    for got, want in zip(step(call, *inputs), step(module, *inputs), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), module(*inputs), equal_nan=True)
    assert torch_ort.counters()["fallbacks"] == 0


def resizing(dims: int, form: dict, **sizes) -> Applies:
    form = {**form, **{name: v[:dims] if type(v) is tuple else v for name, v in sizes.items()}}
    if "align_corners" in form:
        form["align_corners"] = bool(form["align_corners"])
    return Applies(lambda x: F.interpolate(x, **form))


@pytest.mark.hands_over("floats that depend on sizes, by a factor that no few bits tell")
@pytest.mark.parametrize("sizes", sorted(SIZES))
@pytest.mark.parametrize(("dims", "form"), FORMS, ids=IDS)
def test_resized_as_in_eager(road, dims, form, sizes):
    module = resizing(dims, form, **SIZES[sizes])
    assert_as_eager(road(module), module, image(dims))


@pytest.mark.hands_over("floats that depend on sizes, by a factor that no few bits tell")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{"scale_factor": 2}, {"scale_factor": 1.7, "recompute_scale_factor": True}]
)
def test_other_factors_and_dtypes(road, sizes, dtype):
    module = resizing(2, {"mode": "bilinear"}, **sizes)
    assert_as_eager(road(module), module, image(2, dtype))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_channels_last(road, mode):
    module = resizing(2, {"mode": mode}, scale_factor=2)
    call = road(module)
    x = image(2).detach().to(memory_format=torch.channels_last).requires_grad_()
    assert_as_eager(call, module, x)
    assert call(x).stride() == module(x).stride()


@pytest.mark.parametrize("sizes", [{"scale_factor": 2}, {"scale_factor": 1.5}, {"size": (9, 3)}])
def test_one_graph_for_all_sizes(road, sizes):
    module = resizing(2, {"mode": "bilinear"}, **sizes)
    call = road(module)
    for h, w in ((4, 6), (5, 7), (8, 3), (2, 9)):
        assert_as_eager(call, module, torch.randn(2, 3, h, w, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_activations_as_in_eager(road, name):
    module = Applies(LOSSES[name])
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).clone()
    x[0, 1], x[1, 2], x[2, 3] = torch.inf, -torch.inf, torch.nan
    assert_as_eager(road(module), module, x.requires_grad_(), torch.tensor([1, 3, 0, 2, 1]))


def test_the_kernel_is_one_node(road):
    module = resizing(2, {"mode": "bilinear", "align_corners": True}, scale_factor=2)
    call = road(module)
    with watchers.watching() as programs:
        step(call, image(2))
    ops = [name for name, *_ in programs[0].session.steps()]
    assert len(ops) == 2, ops  # forward and backward


@pytest.mark.hands_over("the recorder is off")
def test_captures_of_aotautograd(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    for mode in ("bilinear", "bicubic"):
        module = resizing(2, {"mode": mode}, scale_factor=1.5)
        assert_as_eager(road(module), module, image(2))
