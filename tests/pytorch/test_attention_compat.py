"""What choices of attention's kernels need of private names of torch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from torch_ort import _C
from torch_ort.pytorch import attention_compat, dispatch_compat
from torch_ort.pytorch.dispatch_compat import Leaf
from torch_ort.rules.answers import form_of, rehearsal
from torch_ort.rules.forms import spec_of

OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


def order() -> list[int]:
    return torch._C._get_sdp_priority_order()


def test_the_order_of_kernels_is_as_it_was():
    before = order()
    for kernel, backend in attention_compat.KERNELS.items():
        with attention_compat.preferring(kernel):
            assert order() == [int(backend), *(each for each in before if each != int(backend))]
            with attention_compat.preferring("flash"):
                assert order()[0] == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
            assert order()[0] == int(backend)
        with pytest.raises(ValueError, match="inside"), attention_compat.preferring(kernel):
            raise ValueError("inside")
    assert order() == before
    assert len({*before}) == len(before)


def test_settings_of_the_user_stay():
    with torch.nn.attention.sdpa_kernel([]), attention_compat.preferring("efficient"):
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()


def test_the_kernel_that_pytorch_chooses():
    x = torch.randn(1, 2, 4, 8)
    assert attention_compat.kernel_of(x, x, x) == "flash"  # as the CPU's is called, too
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_compat.kernel_of(x, x, x, None, 0.0, True, enable_gqa=False) is None


def attend(x: torch.Tensor) -> list[int]:
    return form_of(F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)).sizes


@pytest.mark.parametrize("calls", [attend, lambda x: attend(x.requires_grad_())])
def test_calls_of_a_capture_are_seen(calls):
    seen = []

    def preferred(*args, **kwargs):
        seen.append(([each.shape for each in args[:3]], args[0].dtype, args[4]))

    before = dict(OPERATOR.py_kernels)
    with rehearsal() as make, attention_compat.preferred_in_capture(preferred):
        assert calls(make(spec_of(torch.empty(2, 3, 4, 8)))) == [2, 3, 4, 8]
        with torch.autocast("cpu", torch.bfloat16):
            calls(make(spec_of(torch.empty(2, 3, 4, 8))))
        thread = threading.Thread(
            target=lambda: F.scaled_dot_product_attention(*3 * [torch.randn(1, 1, 2, 8)])
        )
        thread.start()
        thread.join()
    sizes = 3 * [(2, 3, 4, 8)]
    assert seen == [(sizes, torch.float32, 0.25), (sizes, torch.bfloat16, 0.25)]
    assert OPERATOR.py_kernels == before


def test_what_is_preferred_comes_first():
    seen = []

    class Notes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(order()[0])
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 3, 4, 8)
    with (
        attention_compat.preferred_in_capture(lambda *args, **kwargs: "efficient"),
        dispatch_compat.enable_python_dispatcher(),
        Notes(),
    ):
        F.scaled_dot_product_attention(x, x, x)
    assert {*seen} == {int(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)}


class Other(torch.Tensor):
    pass


def test_tensors_that_stand_for_plain_ones():
    plain = torch.ones(2, 3)
    with rehearsal() as make:
        recorded = make(spec_of(plain))
    sizes = list(plain.shape)
    with FunctionalTensorMode():
        traced = FunctionalTensor.to_functional(plain)
    for each in (plain, torch.nn.Parameter(plain), recorded, traced):
        assert attention_compat.is_plain(each)
    leaf = Leaf(sizes, _C.contiguous_strides(sizes), plain.dtype, plain.device)
    for each in (plain.as_subclass(Other), leaf, plain.to_sparse()):
        assert not attention_compat.is_plain(each)
