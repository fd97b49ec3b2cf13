"""Minimal kernels, one for each form in which a tensor-core instruction takes its operands."""
