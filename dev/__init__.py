"""Tools of the package's makers: the compiler over all kernels, its rules, and releases."""
