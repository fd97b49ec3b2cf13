"""Common parts of the Hopper attention kernels: tiles, products, softmax, copies, consumers."""
