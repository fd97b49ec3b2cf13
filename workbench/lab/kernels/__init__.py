"""Kernels that lay an MMA open, in CuTe DSL; nothing of production imports them."""
