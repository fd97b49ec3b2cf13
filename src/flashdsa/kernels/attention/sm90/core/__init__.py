"""Parts of the Hopper attention kernels: tiles, softmax, products, gather, both consumers."""
