"""Everything of PyTorch's that the package uses and that is not public."""
