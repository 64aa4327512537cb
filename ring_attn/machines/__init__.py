"""Machines over programs: `run`, `count`, `time`, `check` and `draw`, each for all strategies."""
