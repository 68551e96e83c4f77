"""Names for users of ONNX Runtime Training, by its old paths: `torch_ort.utils.data`."""
