"""Developer tools: compilation of all kernels, rules for machine code, faults, releases."""
