"""Checks of what users pass to attention and decoding; each raises an error that says the cause."""
