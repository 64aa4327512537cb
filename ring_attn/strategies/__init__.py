"""Plan + transport + backend + state as forward and backward: one file for each strategy."""
