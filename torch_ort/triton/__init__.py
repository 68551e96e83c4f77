"""Regions as kernels of Triton, in place of the engine's own (ORTMODULE_USE_TRITON=1)."""
