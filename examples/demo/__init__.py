"""A small byte model with DeepSeek Sparse Attention learns Python's own text."""
