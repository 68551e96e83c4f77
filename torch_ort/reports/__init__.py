"""What the compiler did and what a step costs: `torch_ort.explain` and `torch_ort.profile`."""
