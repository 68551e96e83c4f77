"""`torch_ort.utils.data`, where the package torch_ort of ONNX Runtime Training had its samplers."""
