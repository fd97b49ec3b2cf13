"""Bit fields that tensor-core instructions take in registers, as dataclasses.

`WgmmaDescriptor` and `Tcgen05Descriptor` describe a matrix in shared memory,
`InstructionDescriptor` and `BlockScaledInstructionDescriptor` a tcgen05.mma, and `ZeroColumnMask`
which columns of B a tcgen05.mma.ws takes as zero.
"""

from ptxemu.descriptors.instruction import (
    BLOCK_SCALED_KINDS,
    KINDS,
    PLAIN_KINDS,
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    decode_instruction,
)
from ptxemu.descriptors.shared_memory import Swizzle, Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.zero_mask import ZeroColumnMask

__all__ = [
    "BLOCK_SCALED_KINDS",
    "KINDS",
    "PLAIN_KINDS",
    "BlockScaledInstructionDescriptor",
    "InstructionDescriptor",
    "Swizzle",
    "Tcgen05Descriptor",
    "WgmmaDescriptor",
    "ZeroColumnMask",
    "decode_instruction",
]
