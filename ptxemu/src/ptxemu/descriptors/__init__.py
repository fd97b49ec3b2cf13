"""Bit fields that tensor-core instructions and tensor copies take, as dataclasses.

`decode` and `encode` convert between them and bits:

    WgmmaDescriptor, Tcgen05Descriptor: a matrix in shared memory
    InstructionDescriptor, BlockScaledInstructionDescriptor: what a tcgen05.mma does
    ZeroColumnMask: which columns of B a tcgen05.mma.ws takes as zero
    TensorMap, Im2colMap: what a tensor copy moves (a CUtensorMap)

`encode_tiled` makes the tensor map that cuTensorMapEncodeTiled would.
`gather_operand` reads a matrix out of an image of shared memory through its descriptor, as the
tensor core does; `operand_addresses` says where each of its elements lies.
"""

from ptxemu.descriptors.codec import (
    AnyDescriptor,
    decode,
    encode,
    gather_operand,
    operand_addresses,
)
from ptxemu.descriptors.instruction import (
    BLOCK_SCALED_KINDS,
    KINDS,
    PLAIN_KINDS,
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    decode_instruction,
)
from ptxemu.descriptors.matrix_layout import Major
from ptxemu.descriptors.shared_memory import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.swizzle import Swizzle
from ptxemu.descriptors.tensor_map import Im2colMap, TensorMap, encode_tiled
from ptxemu.descriptors.zero_mask import ZeroColumnMask

__all__ = [
    "BLOCK_SCALED_KINDS",
    "KINDS",
    "PLAIN_KINDS",
    "AnyDescriptor",
    "BlockScaledInstructionDescriptor",
    "Im2colMap",
    "InstructionDescriptor",
    "Major",
    "Swizzle",
    "Tcgen05Descriptor",
    "TensorMap",
    "WgmmaDescriptor",
    "ZeroColumnMask",
    "decode",
    "decode_instruction",
    "encode",
    "encode_tiled",
    "gather_operand",
    "operand_addresses",
]
