"""Calls of other libraries for the draws, one file an operation, and two benches of their own."""
