"""The MMA lab: small kernels that show what the tensor cores do with their operands."""
