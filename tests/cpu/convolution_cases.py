"""Sizes and steps of convolutions that the kernels of the engine are tested with."""

from __future__ import annotations

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu.gradients import last, result_size

# Batch, channels, [depth,] height, width; rows of the weight, groups; window, stride, padding,
# dilation.
CASES = {
    "3x3": ((2, 16, 12, 11), (24, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "more places, rows and columns than a block has":
        ((3, 70, 14, 13), (490, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "three channels": ((2, 3, 20, 19), (10, 1), (7, 7), (2, 2), (3, 3), (1, 1)),
    "channels of several taps in a panel": ((2, 5, 9, 8), (7, 1), (3, 2), (1, 1), (1, 0), (1, 1)),
    "groups": ((2, 24, 7, 9), (36, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    "each channel by itself": ((2, 6, 7, 9), (6, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one pixel": ((3, 20, 5, 6), (17, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    "strides over pixels": ((2, 32, 9, 10), (16, 1), (1, 1), (3, 2), (0, 0), (1, 1)),
    "all of both": ((3, 18, 11, 10), (14, 2), (5, 3), (2, 3), (4, 1), (2, 3)),
    "pads wider than windows": ((2, 18, 9, 8), (20, 1), (3, 3), (1, 1), (4, 6), (3, 3)),
    "small images": ((9, 33, 2, 2), (40, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "taps that no pixel is under": ((2, 8, 2, 3), (8, 1), (5, 5), (1, 1), (2, 2), (1, 1)),
    "one image of one channel": ((1, 1, 6, 6), (1, 1), (2, 2), (1, 1), (0, 0), (1, 1)),
    "no images": ((0, 8, 6, 6), (4, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "volumes": ((2, 16, 5, 8, 7), (24, 1), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strides of volumes": ((2, 20, 6, 9, 10), (13, 1), (3, 2, 3), (2, 3, 2), (1, 0, 2), (1, 1, 2)),
    "groups of volumes": ((1, 12, 7, 6, 5), (9, 3), (2, 3, 3), (1, 2, 1), (0, 2, 1), (3, 1, 1)),
    "one plane": ((3, 17, 1, 6, 7), (5, 1), (3, 1, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    "no rows": ((2, 8, 6, 6), (0, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
}  # fmt: skip

# Attributes that do not fit the operands of "3x3", and the words of the error behind the op's name.
UNFIT = [
    ({"strides": (2, 2)}, "the operands do not fit together"),
    ({"pads": (1,)}, "pads: got 1 numbers, want 2"),
    ({"strides": (0, 1)}, "strides: got 0, want 1 to 1048576"),
    ({"pads": (4, 1)}, "pads: got 4, want at most the 3 pixels that a window reaches over"),
    ({"groups": 0}, "groups: got 0 for 16 channels, 24 rows, and weights of 16"),
    ({"groups": 2}, "groups: got 2 for 16 channels, 24 rows, and weights of 16"),
]


def numbers(case: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a gradient of the result and an image, both channels-last."""
    (batch, channels, *image), (rows, _), *rest = case
    result = [result_size(*each) for each in zip(image, *rest, strict=True)]
    shapes = (batch, rows, *result), (batch, channels, *image)
    dy, x = (last(torch.randn(shape, dtype=dtype)) for shape in shapes)
    return dy, x


def settings_text(case: tuple, **attrs) -> str:
    """Write the attributes of a node; `attrs` are others, or others than those of the case."""
    _, (_, groups), _, stride, padding, dilation = case
    known = {"strides": stride, "pads": padding, "dilations": dilation, "groups": groups} | attrs
    return ", ".join(
        f"{key} = {list(value) if isinstance(value, tuple) else value}"
        for key, value in known.items()
    )


# Of one dim: pixels, window, stride, padding and dilation.
DIM = st.tuples(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3)
)


@st.composite
def any_case(draw: st.DrawFn, most_channels: int, most_rows: int) -> tuple:
    """Draw a case of a few small images or volumes, with so many channels and rows of a group."""
    dims = draw(st.lists(DIM, min_size=2, max_size=3))
    channels, rows = draw(st.integers(1, most_channels)), draw(st.integers(1, most_rows))
    batch, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    image, window, stride, padding, dilation = zip(*dims, strict=True)
    reach = [(size - 1) * step for size, step in zip(window, dilation, strict=True)]
    assume(all(pad <= most for pad, most in zip(padding, reach, strict=True)))
    case = ((batch, channels * groups, *image), (rows * groups, groups), window, stride, padding,
            dilation)  # fmt: skip
    assume(all(result_size(*each) > 0 for each in zip(image, *case[2:], strict=True)))
    return case
