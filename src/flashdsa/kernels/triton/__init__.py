"""Kernels in Triton, for GPUs that have no kernels of their own. Nothing here imports Triton."""
