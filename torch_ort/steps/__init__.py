"""How captured graphs run: forward, backward, the first one of each, and once more."""
