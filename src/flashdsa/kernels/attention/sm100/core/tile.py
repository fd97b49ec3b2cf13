"""The geometry of a tile of keys that a pair of CTAs shares, as data that both plans hold."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa import problem
from flashdsa.plan.row_tiles import CHUNK_COLUMNS, ROW_BYTES

BF16, FP32 = 2, 4
"""Bytes of a number."""
CLUSTER = 2
"""CTAs of a pair."""
PAIR_ROWS = 128
"""(query, head) rows of a pair: the M of an MMA, and the lanes of tensor memory."""
BOX_DIMS = CHUNK_COLUMNS
"""bf16 in a span of the 128-byte swizzle: columns of a box."""
GROUPS = (1, 2, 4, 8)
"""Neighbouring queries that share the rows of a pair."""
HEADS = tuple(PAIR_ROWS // group for group in GROUPS)
"""Heads of a query."""


@dataclass(frozen=True)
class PairTile:
    """Keys of which each CTA has half of the value dims and half of the RoPE dims.

    All properties are Python numbers, known when a kernel is compiled.

    Attributes:
        keys: rows. d_qk: columns of a key. d_v: the first of them, which are its value.
    """

    keys: int
    d_qk: int = problem.D_QK
    d_v: int = problem.D_V

    def __post_init__(self) -> None:
        """Raises ValueError, which names the sizes, unless boxes, and both halves, are whole."""
        if self.d_v % (CLUSTER * BOX_DIMS) or self.rope_dims != BOX_DIMS or self.keys % 32:
            raise ValueError(f"no pair has {self}")

    @property
    def dims(self) -> int:
        return self.d_v // CLUSTER

    @property
    def rope_dims(self) -> int:
        return self.d_qk - self.d_v

    @property
    def own_rope_dims(self) -> int:
        return self.rope_dims // CLUSTER

    @property
    def boxes(self) -> int:
        """Boxes of a CTA's value dims; the RoPE dims follow them."""
        return self.dims // BOX_DIMS

    @property
    def box_bytes(self) -> int:
        return self.keys * ROW_BYTES

    @property
    def value_bytes(self) -> int:
        """Bytes of a CTA's value dims."""
        return self.boxes * self.box_bytes

    @property
    def bytes(self) -> int:
        """Bytes of a CTA's part: value dims, then RoPE dims."""
        return self.value_bytes + self.keys * self.own_rope_dims * BF16

    @property
    def mask_words(self) -> int:
        return self.keys // 32
