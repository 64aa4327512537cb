"""ring_attention under the names and interfaces of other packages: one module for each."""
