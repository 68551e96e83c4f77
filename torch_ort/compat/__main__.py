"""The command `python -m torch_ort.compat install|uninstall|status`."""

from torch_ort.onnxruntime_training.compat.command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
