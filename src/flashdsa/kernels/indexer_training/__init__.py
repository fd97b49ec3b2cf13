"""Kernels that train the indexer: the attention's target, the indexer's scores, their gradients."""
