"""What all other sub-packages may use: counters, lines of the user's program, kinds of errors."""
