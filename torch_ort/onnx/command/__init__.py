"""The command `python -m torch_ort.onnx`: what a file needs, a trial, fine-tuning, differences."""
