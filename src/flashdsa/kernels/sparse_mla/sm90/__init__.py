"""Sparse MLA for Hopper."""
