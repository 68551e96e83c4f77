"""Private names of torch for attention: which kernel a call gets, and who decides it.

Each has a test in tests/pytorch/test_attention_compat.py, which fails when torch changes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from torch_ort.core.scopes import set_here
from torch_ort.pytorch import patches
from torch_ort.pytorch.private import DispatchKey, FunctionalTensor

# PyTorch's fused kernels of attention, by our names of them.
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
_NAMES = {int(backend): name for name, backend in KERNELS.items()}
_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_PLAIN = (torch.Tensor, torch.nn.Parameter, FunctionalTensor)

_order_lock = threading.RLock()
_thread = threading.local()  # `preferred`: tells which kernel a call is to have


def allowed_kernels() -> list[str]:
    """Name the kernels that the user's settings allow."""
    settings = torch.backends.cuda
    is_allowed = {
        "cudnn": settings.cudnn_sdp_enabled(),
        "efficient": settings.mem_efficient_sdp_enabled(),
        "flash": settings.flash_sdp_enabled(),
    }
    return [name for name in KERNELS if is_allowed[name]]


def kernel_of(*args: Any, **kwargs: Any) -> str | None:
    """Name the fused kernel that PyTorch chooses for a call with real tensors; None: none.

    The first time, PyTorch sets the order of kernels that is the GPU's own, whatever was set.
    """
    with _order_lock:
        return _NAMES.get(torch._fused_sdp_choice(*args, **kwargs))


@contextmanager
def preferring(kernel: str) -> Iterator[None]:
    """Let PyTorch choose a kernel in the block where it can run and the user allows it.

    The order of kernels is one for all threads, so it changes for as short as possible, and all
    kernels stay allowed. `sdpa_kernel` would not put back the places of those that are not.
    """
    first = int(KERNELS[kernel])
    with _order_lock:
        before = torch._C._get_sdp_priority_order()
        torch._C._set_sdp_priority_order([first, *(each for each in before if each != first)])
        try:
            yield
        finally:
            torch._C._set_sdp_priority_order(before)


@contextmanager
def preferred_in_capture(preferred: Callable[..., str | None]) -> Iterator[None]:
    """Let calls of attention in a capture have the kernel that `preferred` names for them.

    It is asked with the arguments of a call, after autocast. None leaves the choice to PyTorch.
    """
    kernels = {_OPERATOR: {DispatchKey.CompositeImplicitAutograd: _attend}}
    with set_here(_thread, "preferred", preferred), patches.KERNELS.by(kernels):
        yield


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    preferred = getattr(_thread, "preferred", None)  # threads of autograd have none
    kernel = None if preferred is None else preferred(*args, **kwargs)
    with nullcontext() if kernel is None else preferring(kernel):
        return _OPERATOR._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of a capture stands for a plain one of its sizes and strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
