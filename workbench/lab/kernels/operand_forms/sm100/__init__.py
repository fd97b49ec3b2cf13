"""Operand forms of tcgen05.mma."""
