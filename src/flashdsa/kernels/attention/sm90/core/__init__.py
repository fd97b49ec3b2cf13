"""What the Hopper attention kernels share: tiles, softmax, products, gather, epilogue."""
