"""Benches beside peers: flashdsa's loop with further callables, one file an operation."""
