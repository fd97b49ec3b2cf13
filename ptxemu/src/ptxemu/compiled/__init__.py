"""Blocks of pure instructions, and weak accesses between them, as machine code of llvmlite.

The definitions in `ptxemu.isa` stay the meaning: what is compiled here gives the same bits, and
what is not known here is left to them.
"""
