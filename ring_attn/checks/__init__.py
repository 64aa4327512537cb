"""Check the arguments that users pass to attention and decoding."""
