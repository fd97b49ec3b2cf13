"""The union of the keys of neighbouring queries, which kernels of both architectures read."""
