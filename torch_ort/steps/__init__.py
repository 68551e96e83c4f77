"""Runs captured graphs: forward, backward, the first run of each, and a second derivative."""
