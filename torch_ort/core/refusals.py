"""Why a graph is not recorded, or not captured at all."""

from __future__ import annotations

from torch_ort import _C


class HandOver(Exception):
    """What a recording cannot do: the capture is made by AOTAutograd. The words say why."""


class Refused(HandOver):
    """PyTorch itself refuses the arguments of an operator; it does so again in earnest."""


class NoCapture(_C.Unsupported):
    """What AOTAutograd cannot do either."""
