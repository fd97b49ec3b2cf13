"""Hopper's backward: P and dS of each tile through device memory, then two grouped products."""
