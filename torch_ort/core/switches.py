"""Names that may be switched off and are no passes."""

from __future__ import annotations

# What `options.disable` may name besides passes: parts of the memory plan, and the recorder.
OTHER_SWITCHES = (
    "reorder",
    "in_place",
    "place_parts",
    "deliver_gradients",
    "region_kernels",
    "recorder",
)
