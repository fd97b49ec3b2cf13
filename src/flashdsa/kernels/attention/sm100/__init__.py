"""Sparse MLA for Blackwell."""
