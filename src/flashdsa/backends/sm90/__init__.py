"""Tensors to Hopper kernels: choice of the compiled plan, workspace, launch."""
