"""Who holds which positions, who sees which, and what follows: pure data and plain torch."""
