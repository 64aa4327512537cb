"""Other packages' names and interfaces over ring_attention: one module per package."""
