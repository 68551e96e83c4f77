"""The command `python -m torch_ort.convergence.merge_activation_summary`: compares two runs."""

from torch_ort.onnxruntime_training.convergence.merge_activation_summary import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
