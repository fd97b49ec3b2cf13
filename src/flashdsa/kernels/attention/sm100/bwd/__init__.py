"""The backward: dQ and dKV of sparse MLA."""
