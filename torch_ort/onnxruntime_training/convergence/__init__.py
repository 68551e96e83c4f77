"""Statistics of activations and gradients, to compare a run of the engine with one in PyTorch."""
