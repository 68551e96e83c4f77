"""What every room may use: options, counters, places in the user's code, kinds of refusals."""
