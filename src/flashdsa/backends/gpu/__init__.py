"""A CUDA device for backends: loaded kernels, streams, the driver's answers."""
