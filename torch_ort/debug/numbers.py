"""Whether two runs of one computation give the same numbers up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

# How far a result may be off, relative to its largest number, whatever the noise is.
_ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-16,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}
_NOISE_FACTOR = 64.0
# If both sides of a comparison are almost equal, it may be decided differently. So these few
# elements may be anything.
_ALLOWED_ELEMENTS = 1e-4

Results = Mapping[str, torch.Tensor | None]


class Difference(NamedTuple):
    """A result in which two runs differ: how many of its elements, and the one furthest off."""

    name: str
    count: int
    size: int
    place: tuple[int, ...]
    got: float
    want: float

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.place))}]"
        return (
            f"'{self.name}': {self.count} of {self.size} elements differ; the worst, {where}: got "
            f"{self.got:.8g}, want {self.want:.8g}"
        )


def with_noise(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give copies of tensors whose floating-point numbers differ in their last digit."""
    generator = torch.Generator().manual_seed(0)
    noisy = {}
    for name, tensor in inputs.items():
        noisy[name] = tensor.clone()
        if tensor.is_floating_point():
            signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
            scale = 1 + torch.finfo(tensor.dtype).eps * signs.double()
            noisy[name] = (tensor.double() * scale).to(tensor.dtype)
    return noisy


def differences(got: Results, want: Results, noisy: Results) -> list[Difference]:
    """List the results that differ by more than rounding.

    `noisy`: what the reference gives for inputs that differ in their last digit. How far that is
    from `want` tells how much a difference of rounding can grow on the way to each result.
    """
    found = []
    for name, exact in want.items():
        ours, near = got.get(name), noisy.get(name)
        if exact is None or ours is None:
            continue
        if ours.shape != exact.shape:
            found.append(Difference(name, 1, 1, (), float("nan"), float("nan")))
            continue
        if (difference := _difference(name, ours, exact, near)) is not None:
            found.append(difference)
    return found


def _difference(
    name: str, got: torch.Tensor, want: torch.Tensor, noisy: torch.Tensor | None
) -> Difference | None:
    if want.numel() == 0:
        return None
    if want.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
        noisy = None if noisy is None else torch.view_as_real(noisy.resolve_conj())
    dtype = want.dtype
    ours, exact = got.detach().cpu().double(), want.detach().cpu().double()
    near = exact if noisy is None else noisy.detach().cpu().double()
    is_finite = exact.isfinite() & near.isfinite()
    largest = exact[is_finite].abs().max().item() if is_finite.any() else 0.0
    noise = (near - exact)[is_finite].abs().max().item() if is_finite.any() else 0.0
    allowed = _NOISE_FACTOR * noise + _ROUNDING.get(dtype, 0.0) * largest
    is_same = (ours == exact) | (ours == near) | (ours.isnan() & exact.isnan())
    is_open = exact.isfinite() != near.isfinite()
    off = (ours - exact).abs().nan_to_num(float("inf"), float("inf"))
    is_wrong = ~(is_same | is_open | (off <= allowed))
    count = int(is_wrong.sum())
    if count <= int(_ALLOWED_ELEMENTS * want.numel()):
        return None
    worst = int(torch.where(is_wrong, off, -1.0).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    return Difference(
        name, count, want.numel(), place, ours.flatten()[worst].item(),
        exact.flatten()[worst].item(),
    )  # fmt: skip


def names_of(found: Sequence[Difference]) -> str:
    """Give the differences as lines."""
    return "\n".join(f"  {each}" for each in found)
