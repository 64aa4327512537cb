"""Predicts cost and time of a call, for all ranks at once, and chooses its strategy."""
