"""State spaces, addresses, swizzles, tensor maps and matrix descriptors."""
