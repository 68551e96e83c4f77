"""Settings of an ORTModule from a JSON file."""

from torch_ort.ortmodule import load_from_json

__all__ = ["load_from_json"]
