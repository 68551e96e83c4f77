"""Integration with Accelerate, Transformers and other libraries that train models.

Nothing here imports those libraries before the user does.
"""
