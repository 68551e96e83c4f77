"""What the package stands on in PyTorch that is not public."""
