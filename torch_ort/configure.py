"""`python -m torch_ort.configure`: a set-up step of ONNX Runtime Training's with nothing to do."""

from __future__ import annotations

TEXT = (
    "torch_ort: there is nothing to configure and nothing to build: "
    "the engine is part of the installed package"
)

if __name__ == "__main__":
    print(TEXT)
