"""Sparsity metadata of A as the lanes of a warp give it, and the warning about undefined values."""

from __future__ import annotations

import numpy as np

from ptxemu.events import Agent
from ptxemu.machine.state import Cta
from ptxemu.numerics import sparsity
from ptxemu.numerics.dtypes import U2, Array
from ptxemu.syntax.ast import Instruction

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
        return sparsity.nibbles(halves)[..., :_NIBBLES_OF_HALF].reshape(16, -1)
    pairs = chosen.reshape(8, -1, 2).transpose(2, 0, 1)
    return sparsity.nibbles(pairs).reshape(16, -1)


def warn_of_undefined(
    cta: Cta, agent: Agent, instruction: Instruction, metadata: Array, type_: str
) -> None:
    """Complain of metadata that has no meaning."""
    wrong = sparsity.undefined(metadata, type_)
    if wrong is not None:
        message = (
            f"{instruction.opcode}: sparsity metadata 0b{wrong:04b} has no meaning for .{type_}"
        )
        cta.machine.complain("warning", "sparsity-metadata-undefined", message, agent, instruction)
