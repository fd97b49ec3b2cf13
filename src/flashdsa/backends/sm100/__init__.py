"""Kernels for Blackwell GPUs (sm_100a)."""
