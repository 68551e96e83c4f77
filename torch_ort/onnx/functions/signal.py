"""Fourier transforms, and the windows and filters that go with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import dtype_of, of_onnx


def _complex(x: Tensor) -> Tensor:
    """Read (..., 1) or (..., 2) as real or complex numbers."""
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())


def _transformed(transform: Callable, x: Tensor, length: Any = None, axis: int = -1) -> Tensor:
    """Transform along an axis; also an empty batch, which PyTorch's libraries refuse."""
    axis = axis % x.ndim
    empty = [i for i, size in enumerate(x.shape) if size == 0 and i != axis]
    if not empty:
        return transform(x, length, axis)
    padded = F.pad(x, [int(i in empty) * end for i in reversed(range(x.ndim)) for end in (0, 1)])
    result = transform(padded, length, axis)
    for i in empty:
        result = result.narrow(i, 0, 0)
    return result


@of_onnx("DFT", numbers=(1, 2))
def dft(
    x: Tensor, dft_length: Sequence[int] | None = None, axis_input: Sequence[int] | None = None, *,
    axis: int | None = None, inverse: int = 0, onesided: int = 0, opset: int,
) -> Tensor:  # fmt: skip
    """Transform along an axis; real and imaginary parts are the last dim.

    Before opset 20 the axis is an attribute, with another default.
    """
    if axis_input is not None:
        axis = axis_input[0]
    elif axis is None:
        axis = -2 if opset >= 20 else 1
    axis = axis % x.ndim
    given = _complex(x)
    length = dft_length[0] if dft_length else None
    if onesided and inverse:
        return _transformed(torch.fft.irfft, given, length, axis).unsqueeze(-1)
    if onesided:
        return torch.view_as_real(_transformed(torch.fft.rfft, given, length, axis))
    transform = torch.fft.ifft if inverse else torch.fft.fft
    # The inverse of real numbers is a lazy conjugate.
    return torch.view_as_real(_transformed(transform, given, length, axis).resolve_conj())


@of_onnx("STFT", numbers=(1, 3))
def stft(
    signal: Tensor, frame_step: Sequence[int], window: Tensor | None = None,
    frame_length: Sequence[int] | None = None, *, onesided: int = 1,
) -> Tensor:  # fmt: skip
    """Transform frames of a signal (batch, length, 1 or 2); gives (batch, frames, bins, 2)."""
    x = _complex(signal) if signal.ndim == 3 else signal
    whole = x.shape[1] if window is None else window.shape[0]
    length = frame_length[0] if frame_length else whole
    frames = x.unfold(1, length, frame_step[0])
    if window is not None:
        frames = frames * window
    if onesided and not frames.is_complex():
        return torch.view_as_real(_transformed(torch.fft.rfft, frames))
    bins = _transformed(torch.fft.fft, frames)
    return torch.view_as_real(bins[..., : length // 2 + 1] if onesided else bins)


def _cosines(
    size: Sequence[int], factors: Sequence[float], periodic: int, output_datatype: int
) -> Tensor:
    """Sum cosines of the multiples of an angle that runs once around the window."""
    angles = torch.arange(size[0], dtype=torch.float64) * (2 * math.pi / _turn(size, periodic))
    terms = [factor * torch.cos(i * angles) for i, factor in enumerate(factors)]
    return torch.stack(terms).sum(0).to(dtype_of(output_datatype))


def _turn(size: Sequence[int], periodic: int) -> int:
    """Give the number of steps in which the angle runs around."""
    count = size[0] if periodic else size[0] - 1
    if count == 0:
        raise _C.UserError("window: size: got 1, want more, or a periodic one")
    return count


def _window_types(
    size: Sequence[int], *, output_datatype: int = 1, periodic: int = 1
) -> list[tuple[torch.dtype, list[int]]]:
    _turn(size, periodic)
    return [(dtype_of(output_datatype), [size[0]])]


@of_onnx("HannWindow", numbers=(0,), types=_window_types)
def hann_window(size: Sequence[int], *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    """1/2 - cos / 2."""
    return _cosines(size, (0.5, -0.5), periodic, output_datatype)


@of_onnx("HammingWindow", numbers=(0,), types=_window_types)
def hamming_window(size: Sequence[int], *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    """25/46 - 21/46 cos."""
    return _cosines(size, (25 / 46, -21 / 46), periodic, output_datatype)


@of_onnx("BlackmanWindow", numbers=(0,), types=_window_types)
def blackman_window(size: Sequence[int], *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    """0.42 - cos / 2 + 0.08 of the double angle's."""
    return _cosines(size, (0.42, -0.5, 0.08), periodic, output_datatype)


@of_onnx("MelWeightMatrix", numbers=(0, 1, 2, 3, 4))
def mel_weight_matrix(
    num_mel_bins: Sequence[int], dft_length: Sequence[int], sample_rate: Sequence[int],
    lower_edge_hertz: Sequence[float], upper_edge_hertz: Sequence[float], *,
    output_datatype: int = 1,
) -> Tensor:  # fmt: skip
    """Triangles over the bins of a spectrum, between points that lie evenly on the mel scale.

    Rows are bins of the spectrum, columns those of the scale 2595 log10(1 + f / 700).
    """
    spectrum = dft_length[0] // 2 + 1
    low, high = (2595 * math.log10(1 + f[0] / 700) for f in (lower_edge_hertz, upper_edge_hertz))
    step = (high - low) / (num_mel_bins[0] + 2)  # as ONNX's definition has it
    points = [700 * (10 ** ((low + i * step) / 2595) - 1) for i in range(num_mel_bins[0] + 2)]
    bins = [int((dft_length[0] + 1) * f // sample_rate[0]) for f in points]
    weights = torch.zeros(spectrum, num_mel_bins[0], dtype=torch.float64)
    for i in range(num_mel_bins[0]):
        first, middle, last = bins[i : i + 3]
        if middle == first:
            weights[middle, i] = 1
        for j in range(first, middle + 1):
            if middle > first:
                weights[j, i] = (j - first) / (middle - first)
        for j in range(middle, last):
            if last > middle:
                weights[j, i] = (last - j) / (last - middle)
    return weights.to(dtype_of(output_datatype))
