"""Functions of the package torch_ort of ONNX Runtime Training, for scripts written for it."""
