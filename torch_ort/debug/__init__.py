"""Finds what makes numbers wrong: `torch_ort.debug.compare`, `python -m torch_ort.debug x.py`."""

from torch_ort.debug.bisect import Finding, again
from torch_ort.debug.watch import Difference, checking, compare

__all__ = ["Difference", "Finding", "again", "checking", "compare"]
