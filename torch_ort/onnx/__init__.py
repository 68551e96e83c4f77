"""ONNX files as modules of PyTorch."""
