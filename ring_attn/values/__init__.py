"""Plain values: checks of those that users pass, from files and the environment; properties."""
