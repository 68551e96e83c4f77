"""The recorder: forward and backward of a function as one graph, by running it once."""
