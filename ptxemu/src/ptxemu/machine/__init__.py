"""Grids, clusters, CTAs, warps and their registers."""
