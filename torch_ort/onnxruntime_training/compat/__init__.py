"""The import paths of ONNX Runtime Training, beside an installed ONNX Runtime for inference.

`python -m torch_ort.compat install` places them. old_names.py is the table of what stands where,
placing.py writes and removes the files.
"""
