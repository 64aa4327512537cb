"""What only makers of the package need: the compiler over all kernels, and its rules."""
