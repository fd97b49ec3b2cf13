"""Compressed entries: pooling of tokens, norm, rotation, and their gradients."""
