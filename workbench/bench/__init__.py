"""Benches beside peers."""
