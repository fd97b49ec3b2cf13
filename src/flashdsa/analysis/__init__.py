"""What the compiler made of a kernel: registers, spills and instructions, read from its cubin."""
