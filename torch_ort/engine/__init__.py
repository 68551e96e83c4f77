"""Graphs as programs of the engine: passes, plan, files, dumps; who is told of them."""
