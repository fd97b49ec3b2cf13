"""The Triton backend: kernels for GPUs that have none of their own, launched there or on ptxemu."""
