"""Blocks of pure instructions as machine code, through llvmlite where it is installed.

The definitions in `ptxemu.isa` stay the meaning: what is compiled here gives the same bits, and
what is not known here is left to them.
"""

from ptxemu.compiled.block_function import compile_block

__all__ = ["compile_block"]
