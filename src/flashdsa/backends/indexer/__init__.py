"""The indexer on GPUs: launches that differ between architectures by the kernels only."""
