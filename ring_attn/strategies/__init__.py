"""Strategies, one file each: functions from a call to the programs of its ranks."""
