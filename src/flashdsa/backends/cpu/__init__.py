"""The CPU backend: blocked torch code with bounded workspace, in the GPU kernels' order of work."""
