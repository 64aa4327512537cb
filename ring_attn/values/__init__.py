"""Plain values: checks of users' arguments, values from outside, properties, tables of models."""
