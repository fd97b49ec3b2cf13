"""Sparse decode for Hopper of at most 32 heads, which are the columns of its products."""
