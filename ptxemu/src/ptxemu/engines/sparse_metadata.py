"""Sparsity metadata of A as the lanes of a warp give it, and the warning about undefined values."""

from __future__ import annotations

import numpy as np

from ptxemu.events import Agent
from ptxemu.machine.state import Cta
from ptxemu.numerics.dtypes import F8, U2, U4, Array
from ptxemu.syntax.ast import Instruction

# Structured sparsity of A: which of its columns the kept numbers are, as metadata says.
#
# PTX ISA, "Warp-level matrix instructions for sparse matrix": four bits of metadata, two indices of
# two bits, say for every four units of a row which two are kept. A unit is an element; of 4-bit
# types a pair of elements; of tf32 half an element, so that of two elements one is kept.

_INDEX_BITS = 2
_NIBBLE_SHIFTS = np.arange(0, 32, 4, dtype=U4)
MEANINGFUL = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110)
"""The only values of four bits that are defined, for all types but tf32."""
MEANINGFUL_TF32 = (0b0100, 0b1110)


def nibbles(words: Array) -> Array:
    """The eight four-bit values of each 32-bit word, lowest first: shape (..., 8)."""
    return (words[..., None].astype(U4) >> _NIBBLE_SHIFTS) & U4.type(15)


def undefined(metadata: Array, type_: str) -> int | None:
    """A value of the metadata that has no meaning, if there is one."""
    meaningful = MEANINGFUL_TF32 if type_ == "tf32" else MEANINGFUL
    wrong = metadata[~np.isin(metadata, meaningful)]
    return int(wrong.flat[0]) if wrong.size else None


def expanded(kept: Array, metadata: Array, type_: str) -> Array:
    """The dense rows (m, k) of A from the numbers kept (m, k / 2).

    Args:
        kept: float64; metadata: (m, chunks), four bits each; type_: the type of A.

    Where two indices of a chunk are equal, which is undefined, both numbers count.
    """
    rows, count = kept.shape
    chunks = metadata.shape[1]
    first = (metadata & 3).astype(np.intp)
    second = (metadata >> _INDEX_BITS).astype(np.intp)
    if type_ == "tf32":
        dense = np.zeros((rows, chunks, 2), F8)
        places = first >> 1
        np.put_along_axis(dense, places[..., None], kept[..., None], axis=2)
        return dense.reshape(rows, 2 * count)
    per_unit = count // (2 * chunks)
    units = kept.reshape(rows, chunks, 2, per_unit)
    dense = np.zeros((rows, chunks, 4, per_unit), F8)
    row, chunk = np.ogrid[:rows, :chunks]
    dense[row, chunk, first] = units[:, :, 0]
    dense[row, chunk, second] += units[:, :, 1]
    return dense.reshape(rows, 2 * count)


# Metadata as the lanes of a warp give it.

_NARROW = 8
_NIBBLES_OF_HALF = 4


def rows_of_metadata(words: Array, givers: slice, bits: int) -> Array:
    """Four-bit values (16 rows, chunks along k) from the words (32,) of a warp's lanes.

    Args:
        givers: which lanes of every four give metadata; bits: of an element of A.

    Of types of 16 and 32 bits a word's low half is of row g = lane / 4, its high half of row g + 8,
    lane after lane along k. Of narrower types a whole word is of row g + 8(lane % 2), and the third
    and fourth lane have the second half of k.
    """
    chosen = words.reshape(8, 4)[:, givers]
    if bits > _NARROW:
        halves = np.ascontiguousarray(chosen).view(U2).reshape(8, -1, 2).transpose(2, 0, 1)
        return nibbles(halves)[..., :_NIBBLES_OF_HALF].reshape(16, -1)
    pairs = chosen.reshape(8, -1, 2).transpose(2, 0, 1)
    return nibbles(pairs).reshape(16, -1)


def warn_of_undefined(
    cta: Cta, agent: Agent, instruction: Instruction, metadata: Array, type_: str
) -> None:
    """Complain of metadata that has no meaning."""
    wrong = undefined(metadata, type_)
    if wrong is not None:
        message = (
            f"{instruction.opcode}: sparsity metadata 0b{wrong:04b} has no meaning for .{type_}"
        )
        cta.machine.complain("warning", "sparsity-metadata-undefined", message, agent, instruction)
