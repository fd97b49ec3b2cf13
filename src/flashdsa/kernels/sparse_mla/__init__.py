"""Sparse MLA attention."""
