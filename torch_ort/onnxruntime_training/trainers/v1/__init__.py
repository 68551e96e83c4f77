"""The second ORTTrainer: descriptions and options as dicts, the optimizer as a config.

ONNX Runtime Training had it as `onnxruntime.training.ORTTrainer`.
"""
