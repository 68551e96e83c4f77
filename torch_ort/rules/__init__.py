"""What operators give, told without running them: sizes as symbols, rules, PyTorch's fakes."""
