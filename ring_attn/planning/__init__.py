"""What a call costs and how long it takes, for all ranks at once; and the strategy to take."""
