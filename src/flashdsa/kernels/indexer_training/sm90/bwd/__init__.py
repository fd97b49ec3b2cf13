"""Gradients of the index scores at given slots."""
