"""The command `python -m torch_ort.compat`, and what the files that it places import."""
