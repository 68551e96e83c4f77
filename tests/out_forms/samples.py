"""Real arguments for overloads: from PyTorch's operator database, forward and backward."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.out_forms.overloads import pairs, pairs_by_out
from tests.out_forms.proof import Call

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


class Collector(Protocol):
    """Takes calls and does something with them later."""

    def wants(self, call: Call) -> bool:
        """Tell whether there is not enough of its kind yet."""

    def take(self, call: Call) -> None:
        """Take a call whose tensors nobody writes into."""


class Watch(TorchDispatchMode):
    """Hands over each call that PyTorch makes of one of the pairs of a device, when it ends."""

    def __init__(self, device: str, collector: Collector) -> None:
        super().__init__()
        self._functional, self._out = pairs(device), pairs_by_out(device)
        self._device, self._collector = device, collector
        self._calls: list[Call] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for call in self._calls:
            self._collector.take(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._call(func, args, kwargs)
        if call is not None and self._is_usual(call) and self._collector.wants(call):
            self._calls.append(call.copy())
        return func(*args, **kwargs)

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Call | None:
        if func in self._functional:
            return Call(self._functional[func], args, kwargs)
        if func not in self._out:
            return None
        pair = self._out[func]
        named = {name: value for name, value in kwargs.items() if name not in pair.names}
        return Call(pair, args[: len(pair.functional._schema.arguments)], named)

    def _is_usual(self, call: Call) -> bool:
        return all(
            tensor.device.type == self._device
            and tensor.layout == torch.strided
            and type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.dtype in DTYPES
            for tensor in call.tensors()
        )


def watch_operator(
    operator: Any, dtypes: tuple[torch.dtype, ...], device: str, count: int, collector: Collector
) -> None:
    """Run `count` samples of an operator in each dtype, and their backward, under `Watch`."""
    torch.manual_seed(0)
    for dtype in dtypes:
        if not operator.supports_dtype(dtype, device):
            continue
        trains = operator.supports_autograd and dtype in operator.supported_backward_dtypes(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = operator.sample_inputs(device, dtype, requires_grad=trains)
            for sample in itertools.islice(samples, count):
                _run(operator, sample, Watch(device, collector))


def _run(operator: Any, sample: Any, watch: Watch) -> None:
    with watch:
        try:
            result = operator(sample.input, *sample.args, **sample.kwargs)
            roots = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.randn_like(root) for root in roots])
        except Exception:
            pass  # what the operator does not take, here, tells nothing about its overloads
