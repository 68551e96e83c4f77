"""Every rule beside the real operator: sizes, strides and dtype, with known and symbolic sizes."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torch_ort import _C
from torch_ort.pytorch.dispatch_compat import RESIZING
from torch_ort.rules import shape_rules
from torch_ort.rules.forms import Integer, NoRule, Spec, in_order, spec_of

aten = torch.ops.aten


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give a tensor with numbers that suit indices as well."""
    return torch.zeros(shape, dtype=dtype) if not dtype.is_floating_point else torch.ones(shape)


def ints(*shape: int) -> torch.Tensor:
    return t(*shape, dtype=torch.int64)


def last(*shape: int) -> torch.Tensor:
    kept = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.ones(shape).to(memory_format=kept)


def case(operator: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple, dict]:
    """Give an operator, the default overload if none is named, with its arguments."""
    is_packet = isinstance(operator, torch._ops.OpOverloadPacket)
    return operator.default if is_packet else operator, args, kwargs


def cases(operator: Any, *rows: tuple) -> list[tuple[Any, tuple, dict]]:
    """Give an operator with one row of arguments after the other."""
    return [case(operator, *row) for row in rows]


# By name: how many dims an image has, and what stands between its sizes and factors.
RESIZED = [(name, int(name[-2]), () if "nearest" in name else (False,)) for name in RESIZING]

# Each with the operator's arguments; the ids are those of the operators.
CASES: list[tuple[Any, tuple, dict]] = [
    *cases(aten.add.Tensor, (t(2, 3), t(3)), (t(2, 3), t(2, 1)), (t(2, 3), 1.5),
        (t(3, 2).t(), t(3, 2).t()), (t(3, 2).t(), t(2, 3)), (t(2, 3), t(3, 2).t()),
        (ints(2, 3), t(2, 3)), (t(2, 3), torch.ones((), dtype=torch.float64))),
    *cases(aten.mul.Tensor, (last(2, 3, 4, 5), last(2, 3, 4, 5)), (last(2, 3, 4, 5), t(3, 1, 1)),
        (t(2, 3).expand(4, 2, 3), t(4, 2, 3))),
    *cases(aten.relu, (t(2, 3, 4).permute(2, 0, 1),), (t(4, 6)[:, ::2],),
        (t(2, 1).expand(2, 3),)),
    case(aten.gelu, t(2, 3)),
    case(aten.gelu_backward, t(2, 3), t(2, 3)),
    case(aten.sigmoid, ints(2, 3)),
    case(aten.eq.Scalar, t(2, 3), 1),
    case(aten.where.self, t(2, 3) > 0, t(2, 3), t(3)),
    *cases(aten.masked_fill.Scalar, (t(2, 3), t(2, 1) > 0, 0.0), (t(3, 2).t(), t(2, 3) > 0, 0.0)),
    case(aten.masked_fill.Tensor, t(3, 2).t(), t(3, 2).t() > 0, t()),
    case(aten.pow.Scalar, 2, t(3, 2).t()),
    case(aten.mvlgamma, t(3, 2).t() + 3, 2),
    case(aten.pow.Tensor_Scalar, t(2, 3), 2),
    case(aten.clone, t(3, 2).t()),
    case(aten.zeros_like, t(3, 2).t()),
    case(aten.resize_as, t(3, 2).t(), t(2, 3)),
    case(aten.normal.Tensor_Tensor, t(3, 2).t(), t(3, 2).t()),
    case(aten.normal.Tensor_float, t(3, 2).t(), 0.5),
    case(aten.normal.float_Tensor, 1.0, t(3, 2).t()),
    *cases(aten.bernoulli.p, (t(3, 2).t(), 0.5), (t(2, 3), 0.5)),
    case(aten.native_dropout, t(2, 3), 0.5, True),
    *cases(aten.native_dropout_backward, (t(2, 3), t(2, 3) > 0, 2.0),
        (t(3, 2).t(), t(3, 2).t() > 0, 2.0)),
    *cases(aten.mse_loss_backward, (t(), t(3, 2).t(), t(2, 3), 1), (t(), t(2, 3), t(2, 3), 1),
        (t(), t(3, 2).t(), t(3, 2).t(), 2)),
    *cases(aten.huber_loss_backward, (t(3), t(2, 3), t(2, 1), 0, 0.5),
        (t(), t(3, 2).t(), t(2, 3), 1, 1.0)),
    *cases(aten.smooth_l1_loss_backward, (t(), t(0, 3), t(0, 3), 1, 0.5),
        (t(2, 3), t(2, 3), t(3, 2).t(), 0, 0.5)),
    case(aten.detach, t(2, 3)),
    case(aten.t, t(2, 3)),
    case(aten.transpose.int, t(2, 3, 4), 0, -1),
    case(aten.permute, t(2, 3, 4), [2, 0, -2]),
    *cases(aten.view, (t(2, 3, 4), [6, 4]), (t(2, 3, 4), [2, -1])),
    case(aten._unsafe_view, t(2, 3, 4), [-1]),
    *cases(aten.expand, (t(2, 1, 4), [2, 3, 4]), (t(4), [2, 3, -1])),
    *cases(aten.unsqueeze, (t(2, 3), 0), (t(2, 3), 1), (t(2, 3), -1)),
    *cases(aten.squeeze.dim, (t(2, 1, 3), 1), (t(2, 1, 3), 0)),
    case(aten.squeeze, t(1, 2, 1)),
    case(aten.squeeze.dims, t(1, 2, 1), [0]),
    case(aten.squeeze_copy, t(1, 2, 1, 3).mT),
    case(aten.squeeze_copy.dim, t(2, 1, 3), 1),
    case(aten.squeeze_copy.dims, t(1, 2, 1), [0, 1]),
    *cases(aten.slice.Tensor, (t(6, 3), 0, 1, 4), (t(6, 3), 0, -3, 9223372036854775807),
        (t(6, 3), 0, 0, 100, 2), (t(6, 3), 1, 2, 1)),
    case(aten.select.int, t(2, 3, 4), 1, -1),
    case(aten.split_with_sizes, t(6, 3), [1, 5]),
    case(aten.split.Tensor, t(7, 3), 3),
    case(aten.unbind.int, t(3, 2), 0),
    *cases(aten.cat, ([t(2, 3), t(4, 3)],), ([t(2, 3), ints(2, 1)], -1),
        ([t(2, 3, 4, 6)[..., 3:], t(2, 3, 4, 6)[..., :3]], -1),
        ([t(2, 3, 4).transpose(0, 2), t(4, 3, 2)],), ([last(2, 3, 4, 5), t(2, 3, 4, 5)], 1),
        ([last(2, 3, 4, 5), last(2, 3, 4, 5)], 1), ([last(2, 3, 4, 5, 6), last(2, 3, 4, 2, 6)], 3),
        ([last(2, 6, 4, 5)[:, :3], last(2, 3, 4, 5)], 1)),
    *cases(aten.glu, (last(2, 4, 3, 5), 1), (t(4, 2).t(),), (t(4, 6)[:, ::3], 0)),
    *cases(aten.roll, (t(2, 3, 4, 5).transpose(1, 2), [1], [-1]),
        (last(2, 3, 4, 5), [2, 1], [1, 2])),
    *cases(aten.stack, ([t(2, 3), t(2, 3)], 1), ([t(3, 2).t(), t(3, 2).t()], -1)),
    case(aten.embedding, t(10, 4), ints(2, 3)),
    case(aten.embedding_dense_backward, t(2, 3, 4), ints(2, 3), 10, -1, False),
    case(aten.slice_backward, t(3, 3), [6, 3], 0, 1, 4, 1),
    case(aten.select_backward, t(2, 4), [2, 3, 4], 1, 0),
    case(aten.gather, t(2, 3), 1, ints(2, 2)),
    *cases(aten.index.Tensor, (t(2, 3, 4), [ints(5, 6)]), (t(2, 3, 4), [None, ints(6, 5).t()]),
        (t(2, 3, 4), [ints(5, 1), None, ints(6)])),
    *cases(aten.index_put, (t(2, 3), [ints(5)], t(5, 3)),
        (t(6, 4).t()[:, ::2], [None, ints(2)], t(4, 2), True)),
    *cases(aten.mm, (t(2, 3), t(4, 3).t()), (t(3, 2).t(), t(3, 4))),
    case(aten.bmm, t(5, 2, 3), t(5, 4, 3).transpose(1, 2)),
    case(aten.addmm, t(4), t(2, 3), t(3, 4)),
    *cases(aten.sum.dim_IntList, (t(2, 3, 4), [0, 2]), (t(2, 3, 4).permute(2, 0, 1), [0], True),
        (last(2, 3, 4, 5), [1]), (ints(2, 3), [0]), (t(2, 3), [], True)),
    case(aten.mean.dim, last(2, 3, 4, 5), [2, 3]),
    case(aten.sum, t(2, 3)),
    case(aten.mean, t(2, 3)),
    case(aten.amax, t(2, 3, 4), [1]),
    case(aten._softmax, t(2, 3), -1, False),
    case(aten._log_softmax, t(2, 3), 1, False),
    case(aten._softmax_backward_data, t(2, 3), t(2, 3), 1, torch.float32),
    *cases(aten.native_layer_norm, (t(2, 3, 4), [4], t(4), t(4), 1e-5),
        (t(2, 4, 3).transpose(1, 2), [4], t(4), None, 1e-5)),
    case(aten.native_layer_norm_backward, t(2, 3, 4), t(2, 4, 3).transpose(1, 2), [4], t(2, 3, 1),
        t(2, 3, 1), t(4), t(4), [True, True, False]),
    *cases(aten._fused_rms_norm, (t(2, 3, 4), [4], t(4), 1e-5), (t(2, 3, 4), [3, 4], None, None),
        (t(2, 3, 4).bfloat16(), [4], t(4).bfloat16(), None),
        (t(2, 3, 4).double(), [4], None, 1e-5)),
    *cases(aten.native_group_norm, (t(2, 4, 3), t(4), t(4), 2, 4, 3, 2, 1e-5),
        (last(2, 4, 3, 5), t(4), t(4), 2, 4, 15, 2, 1e-5),
        (t(2, 4, 3, dtype=torch.bfloat16), t(4), None, 2, 4, 3, 2, 1e-5)),
    *cases(aten.native_group_norm_backward,
        (last(2, 4, 3, 5), last(2, 4, 3, 5), t(2, 2), t(2, 2), t(4), 2, 4, 15, 2, [True] * 3),
        (t(2, 4, 3), t(2, 4, 3), t(2, 2), t(2, 2), t(4), 2, 4, 3, 2, [True] * 3),
        (*(t(2, 4, 3, dtype=torch.bfloat16) for _ in range(2)), t(2, 2), t(2, 2), t(4), 2, 4, 3, 2,
        [True] * 3)),
    case(aten.nll_loss_forward, t(2, 3), ints(2), None, 1, -100),
    case(aten.nll_loss_backward, t(), t(2, 3), ints(2), None, 1, -100, t()),
    case(aten.log_sigmoid_forward, t(3, 2).t()),
    case(aten.log_sigmoid_backward, t(2, 3), t(3, 2).t(), t(2, 3)),
    *cases(aten.softshrink_backward, (t(2, 3), t(3, 2).t(), 0.5), (t(2, 3), t(2, 3), 0.5)),
    case(aten.upsample_nearest1d, t(2, 3, 4), [8]),
    case(aten.upsample_linear1d, t(2, 3, 4), [7], False),
    case(aten.upsample_linear1d_backward, t(2, 3, 7), [7], [2, 3, 4], False),
    case(aten.upsample_nearest2d, t(2, 3, 4, 5), [8, 5], 2.0, None),
    *cases(aten.upsample_bilinear2d, (last(2, 3, 4, 5), [8, 6], True),
        (t(2, 7, 4, 5)[:, 2:5], [8, 6], True), (last(2, 7, 4, 5)[:, 2:5], [8, 6], True)),
    case(aten.upsample_bilinear2d_backward, last(2, 3, 8, 6), [8, 6], [2, 3, 4, 5], True),
    case(aten.upsample_bicubic2d_backward, t(2, 3, 8, 6), [8, 6], [2, 3, 4, 5], True),
    case(aten.upsample_bicubic2d, t(2, 4, 3, 5).transpose(1, 2), [8, 6], True),
    case(aten.upsample_trilinear3d, t(2, 3, 2, 4, 5), [3, 8, 6], True),
    case(aten.upsample_nearest3d, last(2, 7, 2, 4, 5)[:, 2:5], [3, 8, 6]),
    case(aten._upsample_nearest_exact3d, t(2, 3, 2, 4, 5), [3, 8, 6]),
    case(aten.binary_cross_entropy_with_logits, t(2, 3), t(2, 3), None, None, 1),
    *cases(aten._native_batch_norm_legit_functional,
        (t(2, 4, 3).transpose(1, 2), t(3), t(3), t(3), t(3), True, 0.1, 1e-5),
        (t(2, 3, 4, 5), t(3), t(3), t(3), t(3), True, 0.1, 1e-5)),
    case(aten.native_batch_norm_backward, t(2, 3, 4), t(2, 3, 4), t(3), t(3), t(3), t(3), t(3),
        True, 1e-5, [True] * 3),
    *cases(aten.convolution, (t(2, 3, 8, 9), t(4, 3, 3, 3), t(4), [2], [1], [1], False, [0], 1),
        (t(2, 4, 8), t(4, 1, 3), None, [1], [0], [2], False, [0], 4),
        (t(2, 4, 5, 5), t(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
    case(aten.convolution_backward, t(2, 4, 8, 9), t(2, 3, 8, 9), t(4, 3, 3, 3), [4], [1, 1],
        [1, 1], [1, 1], False, [0, 0], 1, [True] * 3),
    case(aten.hardshrink_backward, t(3, 2).t(), t(3, 2).t(), 0.5),
    *cases(aten.threshold_backward, (t(3, 2).t(), t(2, 3), 0.5), (t(2, 3), t(3, 2).t(), 0.5)),
    *cases(aten.full, ([2, 3], 1.0), ([2, 3], True), ([], 3)),
    case(aten.arange, 5),
    case(aten.scalar_tensor, 2),
    case(aten.arange.start_step, 2, 5, 1),
    case(aten.new_zeros, t(2, 3), [4]),
    case(aten.clone, t(3, 2).t(), memory_format=torch.contiguous_format),
    case(aten.clone, t(2, 3, 4, 5), memory_format=torch.channels_last),
    case(aten._to_copy, t(3, 2).t(), dtype=torch.float64),
    case(aten._to_copy, t(2, 3), dtype=torch.bfloat16),
    case(aten.full_like, t(2, 3), 2.0, dtype=torch.int64),
    *(
        case(loss, x, target, reduction)
        for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss)
        for x in (t(3, 2).t(), t(4, 6)[:, ::2][:2], t(2, 3).bfloat16())
        for target in (t(2, 3), t(3, 2).t().double())
        for reduction in (0, 1, 2)
    ),
    *(
        case(aten.native_group_norm, last(2, 4, 3, 5).bfloat16(), w, b, 2, 4, 15, 2, 1e-5)
        for w, b in ((None, None), (t(4), None), (None, t(4)), (t(4).bfloat16(), t(4).bfloat16()))
    ),
    *(
        case(
            aten.native_group_norm_backward, *(last(2, 4, 3, 5).bfloat16() for _ in range(2)),
            t(2, 2).bfloat16(), t(2, 2).bfloat16(), w, 2, 4, 15, 2, [True, *2 * [w is not None]],
        )
        for w in (None, t(4).bfloat16())
    ),
    *(case(aten.stack, [last(2, 3, 4, 5), last(2, 3, 4, 5)], dim) for dim in range(5)),
    *(case(aten.glu, t(2, 4, 6), dim) for dim in (0, 1, -1)),
    *(case(aten.roll, last(2, 3, 4, 5), [2], [dim]) for dim in (0, 1, 3)),
    *(
        case(aten._native_batch_norm_legit.no_stats, x, t(4), t(4), True, 0.1, 1e-5)
        for x in (t(2, 4), t(3, 4, 2).transpose(0, 2), last(2, 4, 3, 5), t(2, 4, 3, 5).mT)
    ),
    *(
        case(aten._native_batch_norm_legit_functional, x, t(4), t(4), t(4), t(4), True, 0.1, 1e-5)
        for x in (last(2, 4, 3, 5), t(2, 4, 3, 5).mT, t(3, 4, 2).transpose(0, 2))
    ),
    *(
        case(aten.native_batch_norm_backward, t(*x.shape), x, t(4), t(4), t(4), t(4), t(4), True,
            1e-5, [True] * 3)
        for x in (last(2, 4, 3, 5), t(2, 4, 3, 5).mT, t(3, 4, 2).transpose(0, 2))
    ),
    *(
        case(aten.upsample_bilinear2d_backward, g, [8, 6], [2, 3, 4, 5], True)
        for g in (t(2, 7, 8, 6)[:, 2:5], last(2, 7, 8, 6)[:, 2:5], t(3, 1, 1).expand(2, 3, 8, 6),
            t(2, 3, 9, 6)[:, :, 1:], last(2, 3, 9, 7)[..., 1:, :-1])
    ),
    # Under autocast the parameters and statistics stay in float32.
    *(
        row
        for dtype in (torch.float16, torch.bfloat16)
        for x in [t(2, 3, 4).to(dtype)]
        for row in (
            case(aten._native_batch_norm_legit_functional, x, *[t(3)] * 4, True, 0.1, 1e-5),
            case(aten.native_batch_norm_backward, x, x, *[t(3)] * 5, True, 1e-5, [True] * 3),
        )
    ),
    *(
        case(aten.convolution, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        for x in (t(2, 3, 8, 9), last(2, 3, 8, 9))
        for w in (t(4, 3, 3, 3), last(4, 3, 3, 3), t(4, 3, 1, 1))
    ),
    *(
        case(aten.convolution_backward, t(2, 4, 8, 9), x, w, [4], [1, 1], [1, 1], [1, 1], False,
            [0, 0], 1, [True, True, False])
        for x in (t(2, 3, 8, 9), last(2, 3, 8, 9))
        for w in (t(4, 3, 3, 3), last(4, 3, 3, 3))
    ),
    case(aten.isin.Tensor_Tensor, ints(3, 2).t(), ints(4), invert=True),
    *(
        row
        for x in (t(5, 4), t(4, 5).t())
        for reduction, loss in ((0, t(5)), (1, t()), (2, t()))
        for row in (
            case(aten.multi_margin_loss, x, ints(5), 1, 1.0, None, reduction),
            case(aten.multi_margin_loss_backward, loss, x, ints(5), 1, 1.0, t(4), reduction),
            case(aten.multilabel_margin_loss_forward, x, ints(5, 4), reduction),
            case(aten.multilabel_margin_loss_backward, loss, x, ints(5, 4), reduction, t(5, 4)),
        )
    ),
    *(
        case(getattr(aten, name), make(2, 3, *[4] * n), [7] * n, *corners)
        for name, n, corners in RESIZED
        for make in ([t, last] if n > 1 else [t])
    ),
    *(
        case(getattr(aten, f"{name}_backward"), make(2, 3, *[7] * n), [7] * n, [2, 3, *[4] * n],
            *corners)
        for name, n, corners in RESIZED
        for make in ([t, last] if n > 1 else [t])
    ),
    *(
        case(aten._scaled_dot_product_flash_attention_for_cpu, query, t(2, 4, 7, 8), t(2, 4, 7, 8))
        for query in (t(2, 4, 6, 8), t(2, 6, 4, 8).transpose(1, 2),
            t(2, 6, 3, 4, 8)[:, :, 0].transpose(1, 2), t(8, 2, 4, 6).permute(1, 2, 3, 0),
            t(2, 4, 6, 8).double().float())
    ),
    *(
        case(aten._scaled_dot_product_flash_attention_for_cpu_backward, x, x, x, x, x,
            t(2, 6, 4).transpose(1, 2), 0.0, is_causal)
        for x in (t(2, 4, 6, 8), t(2, 6, 4, 8).transpose(1, 2))
        for is_causal in (False, True)
    ),
    case(aten.zeros, [2, 3], dtype=torch.int64),
    case(aten.arange.start, 2, 5, dtype=torch.float32),
    case(aten.scalar_tensor, True, dtype=torch.bool),
]  # fmt: skip
IDS = [f"{func}-{i}" for i, (func, _, _) in enumerate(CASES)]


def specs(value: Any) -> Any:
    """Replace tensors by what is known of them without their numbers."""
    return pytree.tree_map_only(torch.Tensor, spec_of, value)


def answer(func: Any, args: tuple, kwargs: dict) -> list[Spec]:
    rule = shape_rules.find(func)
    return list(
        pytree.tree_leaves(
            rule(*args, **kwargs), is_leaf=lambda leaf: isinstance(leaf, Spec | Integer)
        )
    )


def assert_is(spec: Spec | None, real: torch.Tensor | None) -> None:
    if not isinstance(real, torch.Tensor):
        got = _C.size_value(spec.size) if isinstance(spec, Integer) else spec
        assert got == real
        return
    assert [_C.size_value(n) for n in spec.sizes] == list(real.shape)
    # Strides of dims of one number, or of none at all, are read by nothing.
    got = [_C.size_value(n) for n in spec.strides]
    if real.numel():
        kept = [d for d, size in enumerate(real.shape) if size != 1]
        assert [got[d] for d in kept] == [real.stride()[d] for d in kept]
    assert spec.dtype == real.dtype
    assert spec.device == real.device


@pytest.mark.parametrize(("func", "args", "kwargs"), CASES, ids=IDS)
def test_with_known_sizes(func, args, kwargs):
    want = pytree.tree_leaves(func(*args, **kwargs), is_leaf=lambda leaf: leaf is None)
    got = answer(func, specs(args), specs(kwargs))
    assert len(got) == len(want)
    for spec, real in zip(got, want, strict=True):
        assert_is(spec, real)


class Symbols:
    """Gives every size larger than 1 a symbol; equal sizes have the same, so that shapes fit."""

    def __init__(self) -> None:
        self.table = _C.SizeSymbols()
        self._made: dict[int, Any] = {}

    def size(self, size: int) -> Any:
        if size < 2:
            return size
        if size not in self._made:
            self._made[size] = self.table.symbol(f"s{size}", size, is_size=True)
        return self._made[size]

    def spec(self, tensor: torch.Tensor) -> Spec:
        sizes = [self.size(n) for n in tensor.shape]
        order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride()[d])
        strides = in_order(sizes, order)
        values = [_C.size_value(n) for n in strides]
        if values != list(tensor.stride()):  # expanded, or with gaps
            strides = list(tensor.stride())
        return Spec(sizes, strides, tensor.dtype, tensor.device)


@pytest.mark.parametrize(("func", "args", "kwargs"), CASES, ids=IDS)
def test_with_symbolic_sizes(func, args, kwargs):
    want = pytree.tree_leaves(func(*args, **kwargs), is_leaf=lambda leaf: leaf is None)
    symbols = Symbols()
    given = pytree.tree_map_only(torch.Tensor, symbols.spec, (args, kwargs))
    try:
        got = answer(func, *given)
    except NoRule:
        # Fixed numbers of parts, and lists of sizes that do not follow the symbols.
        assert func in (aten.split.Tensor, aten.view.default)
        return
    for spec, real in zip(got, want, strict=True):
        assert_is(spec, real)


def layouts(draw: Callable, shape: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Draw a tensor of a shape: dims in any order in memory, some expanded, some with gaps."""
    order = draw(st.permutations(range(len(shape))))
    stored = [shape[d] * draw(st.sampled_from([1, 1, 2])) for d in order]
    tensor = torch.ones(stored, dtype=dtype)
    for position, d in enumerate(order):
        tensor = tensor.narrow(position, 0, shape[d])
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    for d in range(len(shape)):
        if draw(st.integers(0, 5)) == 0:
            tensor = tensor.narrow(d, 0, 1).expand(shape)
    return tensor


@st.composite
def operands(draw: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    first = layouts(draw, shape)
    kept = draw(st.integers(0, len(shape)))
    second = layouts(draw, [1 if draw(st.integers(0, 4)) == 0 else n for n in shape[kept:]])
    return (first, second) if draw(st.booleans()) else (second, first)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(operands())
def test_elementwise_of_any_layouts(pair):
    want = torch.add(*pair)
    (got,) = answer(aten.add.Tensor, specs(pair), {})
    assert_is(got, want)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(operands())
def test_one_operand_of_any_layout(pair):
    for tensor in pair:
        assert_is(answer(aten.relu.default, (spec_of(tensor),), {})[0], torch.relu(tensor))
        assert_is(answer(aten.clone.default, (spec_of(tensor),), {})[0], tensor.clone())


def pointwise_operators() -> list[Any]:
    """Give those that a recording may meet: composites reach it as what they are made of."""
    packets = [getattr(aten, name) for name in sorted(dir(aten))]
    operators = [
        getattr(packet, name)
        for packet in packets if hasattr(packet, "overloads")
        for name in packet.overloads()
    ]  # fmt: skip
    return [
        operator
        for operator in operators
        if torch.Tag.pointwise in operator.tags
        and not operator._schema.is_mutable
        and shape_rules.find(operator)
        and not operator._can_decompose()
    ]


def call_of(operator: Any, tensors: Sequence[torch.Tensor]) -> tuple[list, dict] | None:
    """Make up arguments: the tensors one after the other, a number for what else is needed."""
    numbers = {"number": 2, "int": 1, "float": 0.5, "bool": False, "str": "none"}
    given, args, kwargs = iter(tensors), [], {}
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind != "Tensor" and (argument.has_default_value() or kind not in numbers):
            if argument.has_default_value():
                continue
            return None
        value = next(given) if kind == "Tensor" else numbers[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


@pytest.mark.parametrize("which", ["all transposed", "the first", "the second"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_pointwise_operators_lie_as_their_kernels_say(dtype, which):
    rows = (torch.rand(2, 3, 4) * 0.5 + 0.25) * (1 if dtype.is_floating_point else 8)
    rows = rows.to(dtype)
    other = rows.movedim(-1, 0).contiguous().movedim(0, -1)
    places = {"all transposed": range(4), "the first": [0], "the second": [1]}[which]
    tensors = [other if i in places else rows for i in range(4)]
    tried = 0
    for operator in pointwise_operators():
        call = call_of(operator, tensors)
        if call is None or ("backward" in str(operator) and not dtype.is_floating_point):
            continue
        try:
            want = operator(*call[0], **call[1])
        except (RuntimeError, TypeError, IndexError):  # not for this dtype
            continue
        with contextlib.suppress(NoRule):
            (got,) = answer(operator, specs(call[0]), specs(call[1]))
            assert_is(got, want)
            tried += 1
    assert tried > 60


@st.composite
def indexings(draw: Callable) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    x = layouts(draw, draw(st.lists(st.integers(2, 4), min_size=1, max_size=4)))
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    indices: list[torch.Tensor | None] = []
    for _ in range(draw(st.integers(1, x.dim()))):
        kept = draw(st.integers(0, len(shape)))
        own = [1 if draw(st.integers(0, 4)) == 0 else n for n in shape[kept:]]
        is_left_out = draw(st.booleans())
        indices.append(None if is_left_out else layouts(draw, own, torch.int64))
    hypothesis.assume(any(index is not None for index in indices))
    return x, indices


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(indexings())
def test_indexing_of_any_layouts(drawn):
    x, indices = drawn
    (got,) = answer(aten.index.Tensor, (spec_of(x), specs(indices)), {})
    assert_is(got, aten.index.Tensor(x, indices))


def test_a_size_that_is_1_by_chance_is_guarded():
    table = _C.SizeSymbols()
    a, b = table.symbol("a", 1, is_size=True), table.symbol("b", 4, is_size=True)
    x, y = (Spec([n], [1], torch.float32, torch.device("cpu")) for n in (a, b))
    (result,) = answer(aten.add.Tensor, (x, y), {})
    assert [_C.size_text(n) for n in result.sizes] == ["b"]
    assert table.guards() == ["(a == 1)"]


def test_sizes_that_are_equal_by_chance_are_guarded():
    table = _C.SizeSymbols()
    a, b = table.symbol("a", 4, is_size=True), table.symbol("b", 4, is_size=True)
    x, y = (Spec([n], [1], torch.float32, torch.device("cpu")) for n in (a, b))
    answer(aten.add.Tensor, (x, y), {})
    assert table.guards() == ["(a == b)"]


def test_sizes_that_do_not_fit_are_left_to_pytorch():
    x, y = spec_of(t(2, 3)), spec_of(t(2, 4))
    with pytest.raises(NoRule):
        answer(aten.add.Tensor, (x, y), {})
    with pytest.raises(NoRule):
        answer(aten.mm.default, (x, y), {})


# Operators that a GPU alone has, and images. They are made when a test runs: there may be no GPU.


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


def heads(rows: int, width: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give [batch, heads, rows, width], as a model makes it of rows of heads."""
    return on_gpu(2, rows, 3, width, dtype=dtype).transpose(1, 2)


def efficient(rows: int = 40, width: int = 16, **settings: Any) -> tuple:
    named = {"bias": None, "with_sums": True, "dropout": 0.0} | settings
    operator = aten._scaled_dot_product_efficient_attention.default
    return operator, (heads(40), heads(rows), heads(rows, width), *named.values())


def efficient_backward() -> tuple:
    forward, (query, key, value, *_) = efficient(24)
    given = (heads(40), query, key, value, None, *forward(query, key, value, None, True))
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    return operator, (*given, 0.0, [True, True, True, False])


def flash(dropout: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> tuple:
    operator = aten._scaled_dot_product_flash_attention.default
    return operator, (*(heads(rows, dtype=dtype) for rows in (40, 24, 24)), dropout)


def flash_backward() -> tuple:
    forward, qkv = flash()
    output, *others, _ = forward(*qkv)
    seed, offset = others[-2:]
    operator = aten._scaled_dot_product_flash_attention_backward.default
    given = (torch.ones_like(output), *qkv[:3], output, *others[:-2], 0.0, False, seed, offset)
    return operator, given


def cudnn(rows: int = 24, with_sums: bool = True) -> tuple:
    operator = aten._scaled_dot_product_cudnn_attention.default
    given = (heads(n, dtype=torch.bfloat16) for n in (40, rows, rows))
    return operator, (*given, None, with_sums)


def cudnn_backward() -> tuple:
    forward, qkv = cudnn()
    output, sums, *lengths, seed, offset, _ = forward(*qkv)
    operator = aten._scaled_dot_product_cudnn_attention_backward.default
    given = (torch.ones_like(output), *qkv[:3], output, sums, seed, offset, None, *lengths)
    return operator, (*given, 0.0, False)


def cell(name: str, gates: int, dtype: torch.dtype = torch.float32) -> tuple:
    parts = [on_gpu(3, 4 * gates, dtype=dtype) for _ in range(2)]
    return getattr(aten, name).default, (*parts, on_gpu(3, 4, dtype=dtype))


def lstm_backward() -> tuple:
    state, gates = on_gpu(3, 4), on_gpu(3, 16)
    operator = aten._thnn_fused_lstm_cell_backward_impl.default
    return operator, (state, None, state, state, gates, True)


GPU_CASES: dict[str, Callable[[], tuple]] = {
    "efficient attention": efficient,
    "efficient attention, other keys": lambda: efficient(24, 20),
    "efficient attention, dropout": lambda: efficient(dropout=0.5),
    "efficient attention, no log-sums": lambda: efficient(with_sums=False),
    "efficient attention, backward": efficient_backward,
    "flash attention": flash,
    "flash attention, dropout": lambda: flash(0.5, torch.float16),
    "flash attention, backward": flash_backward,
    "cuDNN attention": cudnn,
    "cuDNN attention, as many keys": lambda: cudnn(40),
    "cuDNN attention, no log-sums": lambda: cudnn(with_sums=False),
    "cuDNN attention, backward": cudnn_backward,
    "LSTM cell": lambda: cell("_thnn_fused_lstm_cell", 4),
    "LSTM cell, backward": lstm_backward,
    "GRU cell": lambda: cell("_thnn_fused_gru_cell", 3, torch.bfloat16),
    "GRU cell, backward": lambda: (
        aten._thnn_fused_gru_cell_backward.default, (on_gpu(3, 4), on_gpu(3, 20), True)
    ),
    "images": lambda: (aten.upsample_nearest1d.default, (on_gpu(2, 3, 4), [8])),
    "images, backward": lambda: (
        aten.upsample_bilinear2d_backward.default,
        (on_gpu(2, 3, 8, 6).to(memory_format=torch.channels_last), [8, 6], [2, 3, 4, 5], True),
    ),
}  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbols"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu(name, symbolic):
    func, args = GPU_CASES[name]()
    want = pytree.tree_leaves(func(*args), is_leaf=lambda leaf: leaf is None)
    symbols = Symbols()
    describe = symbols.spec if symbolic else spec_of
    got = answer(func, *pytree.tree_map_only(torch.Tensor, describe, (args, {})))
    for spec, real in zip(got, want, strict=True):
        assert_is(spec, real)


@pytest.mark.parametrize(
    "numbers", [(0, 0j, False, 0), (1, True, 1 + 0j, True, 1), (1.5, 1.5 + 0j, 1.5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
def test_equal_numbers_of_other_types_give_other_dtypes(dtype, numbers):
    x = torch.ones(2, dtype=dtype)
    for number in numbers:
        (made,) = answer(aten.add.Tensor, [spec_of(x), number], {})
        assert made.dtype == (x + number).dtype, number
