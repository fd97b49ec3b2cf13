"""A CUDA device as what backends run on: loaded kernels, streams, what the driver says."""
