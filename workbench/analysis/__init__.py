"""Result of the compiler for a kernel: registers, spills and instructions, read from its cubin."""
