"""Rows of the best by score: each query's list is sorted in place."""
