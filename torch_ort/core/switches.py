"""The names that the option `disable` takes besides those of passes."""

from __future__ import annotations

from torch_ort import _C

# What rounds elsewhere than eager PyTorch's kernels, or adds in another order: passes, and choices
# of kernels. Without them, and with `exact_random`, results have the bits of eager PyTorch.
# `options.disable` calls them `own_kernels`.
_ROUNDING_PASSES = (each.name for each in _C.passes() if each.rounds_elsewhere)
OWN_KERNELS = tuple(sorted((*_ROUNDING_PASSES, "choose_attention", "products")))

# The names besides passes that `options.disable` knows: parts of the memory plan, kernels, and the
# recorder.
OTHER_SWITCHES = (
    "reorder",
    "in_place",
    "place_parts",
    "deliver_gradients",
    "region_kernels",
    "products",
    "choose_attention",
    "own_kernels",
    "recorder",
)


def with_own_kernels(names: tuple[str, ...]) -> tuple[str, ...]:
    """Put what `own_kernels` stands for in its place."""
    if "own_kernels" not in names:
        return names
    return tuple(dict.fromkeys((*(name for name in names if name != "own_kernels"), *OWN_KERNELS)))
