"""The geometry of tiles of keys in shared memory."""

from __future__ import annotations

ROWS = 64
"""(query, head) pairs of a work item: the M of a wgmma."""
TILE_KEYS = 64
TILES = 2
"""Key tiles of a step: one for each consumer's scores."""
STEP_KEYS = TILES * TILE_KEYS
D_QK = 576
D_V = 512

BF16 = 2

FP32 = 4
CHUNK = 64
"""bf16 in a span of the 128-byte swizzle: columns of a chunk."""
CHUNK_BYTES = TILE_KEYS * CHUNK * BF16
CHUNKS = D_QK // CHUNK
TILE_BYTES = CHUNKS * CHUNK_BYTES
LEFT_CHUNKS = D_V // CHUNK // 2
"""Chunks of a tile's left half; the right half has the same number of value chunks, and the RoPE
chunk."""
HALF_DIMS = D_V // 2
"""Value dims of a consumer."""
PIECE_CHUNKS = 2
PIECES = -(-CHUNKS // PIECE_CHUNKS)
"""Pieces of a tile: each is announced, and its scores are computed, as soon as it has come."""
LEFT_PIECES = tuple(range(LEFT_CHUNKS // PIECE_CHUNKS))
RIGHT_PIECES = tuple(range(LEFT_CHUNKS // PIECE_CHUNKS, PIECES))
MASK_WORDS = TILE_KEYS // 32
LAST_OF_ITEM = 1
"""Flag of a step: no step of its work item follows."""
LAST_OF_ALL = 2
"""Flag of a step: none of the CTA's follows."""
