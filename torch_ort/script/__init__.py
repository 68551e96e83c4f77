"""TorchScript under a trace: scripts are read in C++ and replayed call by call."""
