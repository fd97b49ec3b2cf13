"""Tensors to Hopper kernels: choice of the compiled plan and of the clusters, launch."""
