"""The geometry of tiles of keys in shared memory, as data that every plan of attention holds."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa import problem
from flashdsa.plan import SmemRegion, row_tiles

BF16, FP32 = 2, 4
"""Bytes of a number."""
CHUNK = row_tiles.CHUNK_COLUMNS
"""bf16 in a span of the 128-byte swizzle: columns of a chunk."""
ROWS = 64
"""(query, head) pairs of a work item: the M of a wgmma."""
Q_CHUNK_BYTES = ROWS * row_tiles.ROW_BYTES
"""Bytes of a chunk of Q."""
TILES = 2
"""Key tiles of a step: one for each consumer's scores."""
SLICE_CHUNKS = 2
LAST_STEP_OF_ITEM = 1
"""Flag of a step: no step of its work item follows."""
LAST_STEP_OF_CTA = 2
"""Flag of a step: none of the CTA's follows."""
HALF_STEP = 4
"""Flag of an item's last step that has no key of tile 1, in plans that do not draw items."""
FLAG_BITS = 2
"""Bits of a step's flags; above them the number of an item that was drawn, at its last step."""


@dataclass(frozen=True)
class Tile:
    """Rows of keys, cut into chunks [keys][64 columns] with the 128-byte swizzle.

    All properties are Python numbers, known when a kernel is compiled.

    Attributes:
        d_qk: columns of a key. d_v: the first of them, which are its value. keys: rows.
    """

    d_qk: int = problem.D_QK
    d_v: int = problem.D_V
    keys: int = 64

    def __post_init__(self) -> None:
        """Check that chunks, and slices of half of the value, are whole.

        Raises:
            ValueError: names the sizes.
        """
        halves = self.d_v % (2 * SLICE_CHUNKS * CHUNK) == 0
        if self.d_qk % CHUNK or self.keys % 32 or not halves or self.d_v > self.d_qk:
            raise ValueError(f"no tile has {self}")

    @property
    def suffix(self) -> str:
        """Part of a variant's name: its columns, unless they are those of DeepSeek-V3.2."""
        return "" if self.d_qk == problem.D_QK else f"_{self.d_qk}"

    @property
    def chunks(self) -> int:
        return self.d_qk // CHUNK

    @property
    def value_chunks(self) -> int:
        """Chunks of the value, the first ones."""
        return self.d_v // CHUNK

    @property
    def chunk_bytes(self) -> int:
        return self.keys * row_tiles.ROW_BYTES

    @property
    def bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def q_bytes(self) -> int:
        """Bytes of Q of an item, in chunks likewise."""
        return self.chunks * Q_CHUNK_BYTES

    @property
    def half_dims(self) -> int:
        """Dims of half of the value: those of one consumer."""
        return self.d_v // 2

    @property
    def half_chunks(self) -> int:
        """Chunks of the low half; the high half has as many of the value, and those after it."""
        return self.half_dims // CHUNK

    @property
    def slices(self) -> int:
        """Slices of a tile: each is announced, and its scores are computed, when it has come."""
        return -(-self.chunks // SLICE_CHUNKS)

    @property
    def low_slices(self) -> tuple[int, ...]:
        return tuple(range(self.half_chunks // SLICE_CHUNKS))

    @property
    def high_slices(self) -> tuple[int, ...]:
        """Slices of the high half, RoPE columns among them."""
        return tuple(range(len(self.low_slices), self.slices))

    def chunks_of(self, slice_: int) -> range:
        """Chunks of a slice; the last slice may have fewer."""
        return range(slice_ * SLICE_CHUNKS, min((slice_ + 1) * SLICE_CHUNKS, self.chunks))

    @property
    def step_keys(self) -> int:
        return TILES * self.keys

    @property
    def mask_words(self) -> int:
        return self.keys // 32

    @property
    def p_bytes(self) -> int:
        """Bytes of P of a tile: 16-bit, of each row."""
        return ROWS * self.keys * BF16

    @property
    def has_rope(self) -> bool:
        """Whether columns follow the value's: no product with V reads their chunk."""
        return self.chunks > self.value_chunks

    @property
    def p0(self) -> tuple[str, int]:
        """Region, and offset in it, of P of tile 0: the tile's RoPE chunk, or after P of tile 1."""
        return ("k", self.value_chunks * self.chunk_bytes) if self.has_rope else ("p", self.p_bytes)

    @property
    def with_p0(self) -> str:
        """Addition to the name of the keys' region, for people."""
        return "; P of tile 0 besides" if self.has_rope else ""

    @property
    def p_region(self) -> SmemRegion:
        """Shared memory region of P of tile 1, and of P of tile 0 unless the keys have room."""
        if self.has_rope:
            return SmemRegion("p", self.p_bytes, 1024, "P of tile 1, [64, 64] SW128")
        return SmemRegion("p", TILES * self.p_bytes, 1024, "P of both tiles, [64, 64] SW128")


WITHOUT_ROPE = Tile(d_qk=problem.D_V)
"""DeepSeek-V4's rows, which are K and V alike."""
