"""Kernels to callables: compiled in advance into one shared object, or in this process."""
