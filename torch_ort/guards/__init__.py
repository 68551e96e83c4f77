"""Guards: what a call is compared with a capture by, and what makes a capture impossible."""
