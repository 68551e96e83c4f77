"""Results of operators without running them: symbolic sizes, rules, PyTorch's fake tensors."""
