"""Blocks of given scores, and tokens of listed blocks, ranked."""
