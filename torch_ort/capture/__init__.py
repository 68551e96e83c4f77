"""Makers of graphs: from PyTorch programs to `_C.Graph`."""
