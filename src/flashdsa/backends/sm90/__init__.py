"""Launches of Hopper kernels on tensors: choice of the compiled plan and of the clusters."""
