"""What a call is compared with, and what keeps it from being captured."""
