"""Samplers that give all ranks the same amount of work at each step (docs/samplers.md)."""
