"""Serving engines run a model through flashdsa, beside their own kernels and transformers."""
