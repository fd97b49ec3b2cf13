"""Sizes of tiles of rows of bf16 as they lie in shared memory, for wgmma along their columns."""

TILE_ROWS = 64
ROW_BYTES = 128
"""Bytes of a row of a chunk, a span of the 128-byte swizzle: a tile is chunks [64 rows][64
columns], one after the other."""
CHUNK_COLUMNS = ROW_BYTES // 2
CHUNK_BYTES = TILE_ROWS * ROW_BYTES
