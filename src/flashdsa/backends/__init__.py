"""Implementations of the operations and the data by which one of them is chosen."""
