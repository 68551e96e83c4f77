"""What belongs to optimizers beside their steps: configurations, schedules, overflow checks."""
