"""Rows and states that pass between ranks along the sequence: halos, runs, recurrences."""
