"""Reads FX graphs of ATen calls into `_C.Graph`: nodes, layouts of outputs, programs."""
