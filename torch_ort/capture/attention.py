"""Attention in a capture: each call on CUDA gets the kernel that was measured to be the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torch_ort.engine import attention, tuning
from torch_ort.engine.attention_times import Call, Layout
from torch_ort.fallback import asked_for
from torch_ort.options import Options
from torch_ort.pytorch.attention_compat import is_plain, preferred_in_capture
from torch_ort.rules.symbols import size_hint


@contextmanager
def attention_chosen(options: Options) -> Iterator[None]:
    """Capture in the block with chosen kernels, if options ask for choices or there are some."""
    if "choose_attention" in options.disable or not torch.cuda.is_initialized():
        yield
        return
    if options.tuning_results_path:
        with asked_for():
            tuning.read(options.tuning_results_path)
    if not options.enable_tuning and not attention.choices():
        yield
        return
    with preferred_in_capture(partial(_preferred, options)):
        yield


def _preferred(
    options: Options, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """Name the kernel for a call of a capture; None: PyTorch decides."""
    tensors = {"query": query, "key": key, "value": value, "mask": attn_mask}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    # Kernels draw other masks of dropout, and not all of them repeat their gradients bit for bit.
    is_bound = dropout_p > 0 and options.exact_random
    if is_bound or torch.are_deterministic_algorithms_enabled() or not _are_fused(given):
        return None
    layouts = {name: _layout(tensor) for name, tensor in given.items()}
    if None in layouts.values():
        return None
    with_gradients = torch.is_grad_enabled()
    gradients = [name for name, tensor in given.items() if with_gradients and tensor.requires_grad]
    call = Call(
        **{"mask": None, **layouts}, has_dropout=dropout_p > 0, is_causal=is_causal,
        enable_gqa=enable_gqa, gradients=tuple(gradients),
    )  # fmt: skip
    may_measure = options.enable_tuning and not torch.cuda.is_current_stream_capturing()
    most_ms = options.max_tuning_duration_ms if may_measure else None
    return attention.kernel_for(call, query.device, most_ms)


def _are_fused(tensors: dict[str, torch.Tensor]) -> bool:
    """Tell whether tensors are of a form that a fused kernel may take."""
    return (
        all(is_plain(each) and each.device.type == "cuda" for each in tensors.values())
        and all(tensors[name].dim() == 4 for name in ("query", "key", "value"))
    )  # fmt: skip


def _layout(tensor: torch.Tensor) -> Layout | None:
    """Give the layout of a tensor in the captured call; None where it is not known or empty."""
    sizes, strides = _numbers(tensor.shape), _numbers(tensor.stride())
    if sizes is None or strides is None or 0 in sizes:
        return None
    return Layout(sizes, strides, tensor.dtype)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    numbers = [size_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes]
    return None if None in numbers else tuple(numbers)
