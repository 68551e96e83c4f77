"""Times PyTorch's kernels of attention on CUDA for one kind of call."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_ort.pytorch.attention_compat import KERNELS, allowed_kernels, kernel_of, preferring

_logger = logging.getLogger("torch_ort.attention")
T = TypeVar("T")

# As in csrc/run/tuning.cpp, where the reasons are.
_ENOUGH_US = 30e3
_MANY_ROUNDS = 200
_SETTLED_ROUNDS = 5
_SETTLED = 0.95

# Before each run the GPU fills this memory so often. Meanwhile the host queues all kernels of the
# run, so that its own time does not count, and the caches of the GPU hold nothing of the run.
_HEAD_START_BYTES = 64 << 20
_HEAD_START_FILLS = 16

_DROPOUT = 0.1


class Layout(NamedTuple):
    """A tensor's sizes, strides and dtype."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """Give the layout as text."""
        sizes, strides = "x".join(map(str, self.sizes)), ",".join(map(str, self.strides))
        return f"{str(self.dtype).removeprefix('torch.')} {sizes} ({strides})"


@dataclass(frozen=True)
class Call:
    """A kind of call: what the time of a kernel, and whether it can run, depend on."""

    query: Layout
    key: Layout
    value: Layout
    mask: Layout | None
    has_dropout: bool
    is_causal: bool
    enable_gqa: bool
    gradients: tuple[str, ...]  # the tensors that get one, by their names here

    def text(self, device: torch.device) -> str:
        """Give the kind as text: with all else that a choice depends on, the key in files."""
        layouts = {"query": self.query, "key": self.key, "value": self.value, "mask": self.mask}
        parts = [f"{name} {layout.text}" for name, layout in layouts.items() if layout is not None]
        flags = {
            "dropout": self.has_dropout,
            "causal": self.is_causal,
            "grouped heads": self.enable_gqa,
            f"gradients of {' '.join(self.gradients)}": bool(self.gradients),
        }
        parts += [name for name, is_set in flags.items() if is_set]
        parts += [f"without {name}" for name in KERNELS if name not in allowed_kernels()]
        cudnn = torch.backends.cudnn.version()
        return ", ".join([*parts, torch.cuda.get_device_name(device), f"cuDNN {cudnn}"])


class Times(NamedTuple):
    """The kernel that PyTorch chooses, and the fastest run of each that can run, in us."""

    own: str
    us: dict[str, float]


def measure(call: Call, device: torch.device, most_ms: int) -> Times | None:
    """Time the kernels for a kind of call; None: there is nothing to choose from."""
    return _apart(lambda: _measure(call, device, most_ms))


def have_order_set(device: torch.device) -> None:
    """Have PyTorch set its order of kernels, which it does in the first call of a process."""
    tensor = Layout((1, 1, 8, 8), (64, 64, 8, 1), torch.float16)
    call = Call(tensor, tensor, tensor, None, False, False, False, ())
    _apart(lambda: _kernel_of(_Tensors(call, device)))


def _apart(function: Callable[[], T]) -> T:
    """Call a function on a thread that knows nothing of the capture that runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class _Tensors:
    """Arguments of a kind of call. Their numbers are random, from a generator of their own."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        layouts = {"query": call.query, "key": call.key, "value": call.value, "mask": call.mask}
        made = {
            name: None if layout is None else self._random(layout, device)
            for name, layout in layouts.items()
        }
        self.differentiated = [made[name].requires_grad_() for name in call.gradients]
        self.args = (*made.values(), _DROPOUT if call.has_dropout else 0.0, call.is_causal)
        self.settings = {"enable_gqa": call.enable_gqa}

    def _random(self, layout: Layout, device: torch.device) -> torch.Tensor:
        last = sum((n - 1) * stride for n, stride in zip(layout.sizes, layout.strides, strict=True))
        if layout.dtype == torch.bool:
            memory = torch.ones(last + 1, dtype=torch.bool, device=device)
        else:
            memory = torch.empty(last + 1, dtype=layout.dtype, device=device)
            memory.normal_(generator=self._generator)
        return memory.as_strided(layout.sizes, layout.strides)


class Run:
    """Computes a call by one kernel, and its gradients if they are wanted."""

    def __init__(self, kernel: str, tensors: _Tensors) -> None:
        self.kernel = kernel
        self._tensors = tensors
        self._gradient: torch.Tensor | None = None  # of the result

    def __call__(self) -> torch.Tensor:
        """Run once."""
        tensors = self._tensors
        with preferring(self.kernel):
            result = scaled_dot_product_attention(*tensors.args, **tensors.settings)
        if tensors.differentiated:
            if self._gradient is None:
                self._gradient = torch.ones_like(result)
            torch.autograd.grad(result, tensors.differentiated, self._gradient)
        return result.detach()


def _kernel_of(tensors: _Tensors) -> str | None:
    return kernel_of(*tensors.args, **tensors.settings)


def _measure(call: Call, device: torch.device, most_ms: int) -> Times | None:
    """Time the kernels, and leave the state of the GPU's generator as it was."""
    with torch.cuda.device(device):
        state = torch.cuda.get_rng_state() if call.has_dropout else None
        try:
            return _measure_here(call, device, most_ms)
        # What PyTorch chooses fails as well: so may the user's call, or there is no memory to try.
        except RuntimeError as error:
            _logger.info("attention: nothing is measured: %s: %s", type(error).__name__, error)
            return None
        finally:
            if state is not None:
                torch.cuda.set_rng_state(state)


def _measure_here(call: Call, device: torch.device, most_ms: int) -> Times | None:
    tensors = _Tensors(call, device)
    own = _kernel_of(tensors)  # first, since it may set the order
    if own is None:
        return None
    others = [name for name in allowed_kernels() if name != own and _can_run(name, tensors)]
    runs = [Run(own, tensors)]
    if others:
        like = runs[0]()
        runs += [run for run in (Run(name, tensors) for name in others) if _gives(run, like)]
    if len(runs) == 1:
        return None
    us = time_in_turns(runs, most_ms, Stopwatch(device).microseconds)
    return Times(own, us) if own in us else None


def _can_run(kernel: str, tensors: _Tensors) -> bool:
    with preferring(kernel):
        return _kernel_of(tensors) == kernel


def _gives(run: Run, like: torch.Tensor) -> bool:
    """Run once, and tell whether the result lies as that of the kernel that PyTorch chooses.

    The program may have asked how it lies, or view it in another shape.
    """
    result = _tried(run)
    if result is None or _strides(result) == _strides(like):
        return result is not None
    _logger.info(
        "attention: %s is left out: strides of its result: got %s, want %s",
        run.kernel, result.stride(), like.stride(),
    )  # fmt: skip
    return False


def _strides(x: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _tried(run: Run, call: Callable[[Run], Any] = lambda run: run()) -> Any:
    """Give what a call of a run gives; None if the kernel fails, which a log says."""
    try:
        return call(run)
    except RuntimeError as error:  # out of memory is one
        words = f"{type(error).__name__}: {error}"
        _logger.info("attention: %s is left out: %s", run.kernel, words)
        return None


class Stopwatch:
    """Tells how long runs take on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(_HEAD_START_BYTES, dtype=torch.uint8, device=device)

    def microseconds(self, run: Run) -> float:
        """Run once and give the time."""
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        for _ in range(_HEAD_START_FILLS):
            self._memory.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1000 * begin.elapsed_time(end)


def _now_us() -> float:
    return 1e6 * time.perf_counter()


def time_in_turns(
    runs: list[Run],
    most_ms: float,
    microseconds: Callable[[Run], float],
    now_us: Callable[[], float] = _now_us,
) -> dict[str, float]:
    """Run kernels in turns until the fastest time of each is stable; give those times.

    After the first round, begins none that would exceed `most_ms` milliseconds in all if it took as
    long as the last one; 0: no limit. A kernel that fails is left out from then on.
    """
    limit = 1000 * most_ms or math.inf
    fastest = {run.kernel: math.inf for run in runs}
    start = end = now_us()
    last_faster = 0  # the last round in which a kernel became faster
    for number in range(1, _MANY_ROUNDS + 1):
        begin = end
        for run in [run for run in runs if run.kernel in fastest]:
            us = _tried(run, microseconds)
            if us is None:
                del fastest[run.kernel]
                continue
            if us < _SETTLED * fastest[run.kernel]:
                last_faster = number
            fastest[run.kernel] = min(fastest[run.kernel], us)
        end = now_us()
        is_settled = end - start >= _ENOUGH_US and number - last_faster >= _SETTLED_ROUNDS
        if len(fastest) < 2 or is_settled or (end - start) + (end - begin) > limit:
            break
    return fastest
