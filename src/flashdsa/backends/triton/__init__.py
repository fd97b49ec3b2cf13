"""The Triton backend: kernels for every NVIDIA GPU since sm_80, and the launches of them."""
