"""Plain values: checks of users' arguments, values from files and the environment, properties."""
