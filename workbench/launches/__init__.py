"""One small launch of a kernel, for traces."""
