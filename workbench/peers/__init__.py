"""Builders of other libraries' kernels."""
