"""The names that the option `disable` takes besides those of passes."""

from __future__ import annotations

# What rounds elsewhere than eager's kernels do, or has these add up in another order. Without it,
# and with `exact_random`, results have eager's own bits. `options.disable` calls it `own_kernels`.
OWN_KERNELS = (
    "channels_last",
    "chunk_losses",
    "drop_round_trips",
    "expand_composites",
    "fuse_attention",
    "fuse_regions",
    "multiply_pixels",
    "products",
    "row_sparsity",
    "widen_products",
)

# What `options.disable` may name besides passes: parts of the memory plan, kernels, and the
# recorder.
OTHER_SWITCHES = (
    "reorder",
    "in_place",
    "place_parts",
    "deliver_gradients",
    "region_kernels",
    "products",
    "own_kernels",
    "recorder",
)


def with_own_kernels(names: tuple[str, ...]) -> tuple[str, ...]:
    """Put what `own_kernels` stands for in its place."""
    if "own_kernels" not in names:
        return names
    return tuple(dict.fromkeys((*(name for name in names if name != "own_kernels"), *OWN_KERNELS)))
