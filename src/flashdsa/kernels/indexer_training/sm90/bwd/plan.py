"""Tiles, budgets, barriers and roles of the Hopper backward of the index scores, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion, row_tiles
from flashdsa.problem import INDEX_HEAD_DIM

ROWS = TILE_KEYS = row_tiles.TILE_ROWS
"""(query, head) rows of a block, the M of a wgmma, and keys of a tile."""
BF16, FP32 = 2, 4
CHUNKS = INDEX_HEAD_DIM // row_tiles.CHUNK_COLUMNS
BLOCK_BYTES = CHUNKS * row_tiles.CHUNK_BYTES
"""Bytes of 64 rows of Q, or of a tile of keys: one chunk after the other."""
MATRIX_BYTES = ROWS * TILE_KEYS * BF16
MATRIX_BUFFERS = 2
NUM_HEADS = (64, 32, 16)
BLOCKS = (4, 2)
"""Blocks of a group: each of two warpgroups has a half of them."""
LARGE_HEADS = 64
"""Minimum heads for groups of four blocks: they are slower with fewer, whatever their queries have
in common."""
MULTIPLIERS = 2
STAGES = {4: 4, 2: 6}
"""Tiles of keys in shared memory, by a group's blocks."""
RANGE_KEYS = 131_072
"""Keys of which the lists' kernel has a bit each in shared memory."""
OWN_SLOTS = {2: 4, 4: 2, 8: 1}
"""Slots of each query that a thread of the lists' kernel has in registers, by a group's queries."""
TABLE_WORDS = {2: 8_192, 4: 16_384, 8: 32_768}
"""Gradients of a range of list entries in that kernel's shared memory, by a group's queries."""
LIST_THREAD_LIMIT = 1024
"""Threads of an SM in that kernel, so that each may have 64 registers."""
LIST_THREADS = {2: 512, 4: 512, 8: 1024}
"""Threads of a CTA in that kernel: an SM has room for two CTAs with up to four queries, and they
hide each other's waits."""
MOST_SAMPLES = 128
"""Groups by which the larger ones are chosen."""
MOST_PARTS = 264
"""Most parts of the groups of a last round: two for each SM of an H200."""
MOST_PARTS_OF_GROUP = 8
PART_TILES = 3
"""Time that a part takes besides its tiles, in tiles."""
CHOICE_WORDS = 4
"""Words of the scratch before the samples and the lists: one number, and room to align them."""


@dataclass(frozen=True)
class BwdPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    Attributes:
        num_heads: H. blocks: of 64 rows of Q, in a group of neighbouring queries.
        ordered: a row of dK for each entry of the lists is written, and added by another kernel.
        load_registers, multiply_registers: of a thread.
    """

    num_heads: int = 64
    blocks: int = 4
    ordered: bool = False
    load_registers: int = 40
    multiply_registers: int = 232

    def __post_init__(self) -> None:
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected one of {NUM_HEADS}; got {self.num_heads}")
        if self.blocks not in BLOCKS:
            raise ValueError(f"blocks: expected one of {BLOCKS}; got {self.blocks}")
        if self.chosen and self.num_heads < LARGE_HEADS:
            raise ValueError(f"blocks: expected {min(BLOCKS)} of {self.num_heads} heads; got 4")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"indexer_bwd_h{self.num_heads}_group{self.queries}" + "_ordered" * self.ordered

    @property
    def queries(self) -> int:
        """Neighbouring queries of a group."""
        return self.blocks * ROWS // self.num_heads

    @property
    def chosen(self) -> bool:
        """Whether the device chooses it: the larger groups, if they have enough in common. Its
        variant serves calls of the smaller groups, too."""
        return self.blocks == max(BLOCKS)

    @property
    def own_blocks(self) -> int:
        """Blocks of a warpgroup that multiplies."""
        return self.blocks // MULTIPLIERS

    @property
    def stages(self) -> int:
        """Tiles of keys in shared memory."""
        return STAGES[self.blocks]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a tile's gradients: of its keys' scores, [query][key] fp32."""
        return self.queries * TILE_KEYS * FP32

    @property
    def table_places(self) -> int:
        """List entries whose gradients of each query the lists' kernel holds in shared memory."""
        return TABLE_WORDS[self.queries] // self.queries

    @property
    def list_threads(self) -> int:
        """Threads of a CTA of the lists' kernel."""
        return LIST_THREADS[self.queries]

    @property
    def own_slots(self) -> int:
        """Slots of each query that a thread of the lists' kernel has in registers; the rest is read
        again."""
        return OWN_SLOTS[self.queries]

    def capacity(self, topk: Any) -> Any:
        """Capacity of a group's list: room for all its slots, in whole tiles; int or Int32."""
        return (self.queries * topk + (TILE_KEYS - 1)) // TILE_KEYS * TILE_KEYS

    def list_bytes(self, topk: int) -> int:
        """Bytes of a group: numbers of its keys, their gradients, two counts."""
        return FP32 * (self.capacity(topk) * (1 + self.queries) + 2)

    @property
    def rows(self) -> int:
        """(query, head) rows of a group."""
        return self.blocks * ROWS

    def parts_at(self, groups: Any, topk: Any) -> Any:
        """Index of the parts' dQ in the scratch, a multiple of 4, behind the choice and the lists;
        int or Int32."""
        of_groups = groups * (self.capacity(topk) * (1 + self.queries) + 2)
        return (CHOICE_WORDS + 2 * MOST_SAMPLES + of_groups + 3) // 4 * 4

    def scratch_words(self, num_queries: int, topk: int) -> int:
        """Words that a launch for `num_queries` queries needs: its choice, the lists and the parts.
        The smaller groups' overlay the larger ones' and need less."""
        groups = -(-num_queries // self.queries)
        parts = 0 if self.ordered else min(MOST_PARTS_OF_GROUP * groups, MOST_PARTS)
        return self.parts_at(groups, topk) + parts * self.rows * (INDEX_HEAD_DIM + 1)

    def lists_in(self, scratch: Any, groups: int, topk: int) -> tuple[Any, Any]:
        """Views of a launch's scratch, a torch tensor: the lists' keys (groups, capacity) and the
        number of keys in each list (groups,)."""
        capacity, first = self.capacity(topk), CHOICE_WORDS + 2 * MOST_SAMPLES
        counts = first + groups * capacity * (1 + self.queries)
        rows = scratch[first : first + groups * capacity].view(groups, capacity)
        return rows, scratch[counts : counts + groups]

    @property
    def smaller(self) -> BwdPlan:
        """The plan of the smaller groups, which are taken where these are not."""
        return replace(self, blocks=min(BLOCKS))

    @property
    def buffers(self) -> list[SmemRegion]:
        matrices = MATRIX_BUFFERS * self.blocks * MATRIX_BYTES
        return [
            SmemRegion("q", self.blocks * BLOCK_BYTES, 1024, "Q of a group, 64 x 64 SW128"),
            SmemRegion("k", self.stages * BLOCK_BYTES, 1024, "keys of tiles, 64 x 64 SW128"),
            SmemRegion("a", matrices, 1024, "gradients of q k, row by key, SW128, of two tiles"),
            SmemRegion("gradients", self.stages * self.gradient_bytes, 16,
                       "of the scores, query by key"),
            SmemRegion("rows", self.stages * TILE_KEYS * FP32, 16, "numbers of the keys"),
        ]  # fmt: skip

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return (
            Role("load", WARPGROUP_SIZE, self.load_registers, "Q, keys, their gradients"),
            Role("multiply", MULTIPLIERS * WARPGROUP_SIZE, self.multiply_registers,
                 "q k and dQ of half the blocks, dK of half the dims and its addition, dW"),
        )  # fmt: skip

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        The barriers of Q complete a phase for each item that has keys. Every thread arrives at
        k_free for what it has read itself: compute-sanitizer's racecheck does not see what a warp's
        lanes did before one of them arrives for all.
        """
        load, multiply = self.roles
        every, warps = Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        return (
            Barrier("k_full", self.stages, load, every, multiply, 0, "a tile is there"),
            Barrier("k_free", self.stages, multiply, every, load, 0, "a tile has been read"),
            Barrier("q_full", 1, load, every, multiply, 0, "Q is there"),
            Barrier("q_free", 1, multiply, warps, load, 0, "Q has been read"),
        )
