"""Tiles, budgets and barriers of the indexer over shared keys, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.plan import NUM_HEADS
from flashdsa.kernels.indexer.sizes import BIN_GROUP, MAX_CLUSTER
from flashdsa.kernels.indexer.sm90.plan import BLOCK
from flashdsa.plan import Arrives, Barrier, Role, Sm90Plan, SmemRegion
from flashdsa.problem import INDEX_HEAD_DIM

COLUMNS = {64: 256, 32: 256, 16: 128}
"""Columns of a product: the heads of all queries of a tile, by heads of a query. 16 queries would
leave each too little of the workspace."""
TILE_KEYS = 64
"""Rows of a product."""
SCALES_ALIGNED = 4
"""A tile's first key is a multiple of it: TMA brings scales by 16 bytes."""
SPAN_BYTES = 128
"""Bytes of a row in shared memory: a span of the 128-byte swizzle."""
QUERY_GROUP = 4
"""Queries that neighbouring columns belong to, one for each lane of a quad."""
MAX_TOPK = 2048
CHUNK = 1024
"""Scores that a warp reads at once."""
CHUNK_MASKS = CHUNK // WARP_SIZE
"""Words with a bit for each of them."""
CANDIDATES = 128
"""Scores about the cut-off that a team compares one by one."""
HISTOGRAM_BINS = 8192
"""Bins of all queries of a tile."""
ROUND_BINS = 2 * CANDIDATES
"""Bins of a team, for an exact search; they overlay the candidates, which were too many."""
SCRATCH_WORDS = 4
"""Scratch words of a team."""
SHARED_SCRATCH_WORDS = 24
"""The same if CTAs share tiles; see smem_views.py for those of a round, and teams.py."""
SAMPLE_TILES = 2
"""Key tiles that every CTA of a cluster scores, for the window of scores; see teams.py."""
INDEX_BYTES = 2
"""Bytes of an index in a segment. The indices of a query's best wait where its bins were."""
SEGMENTS = {64: 16_384, 32: 8192, 16: 8192}
"""Scores of a query that are kept until they are ranked, by heads of a query."""
WHOLE = {64: 28_672, 32: 12_288, 16: 12_288}
"""Scores of a query that fit without scores of earlier segments, by heads of a query."""
LOGS = {64: 6144, 32: 3072, 16: 3072}
"""Scores of earlier segments that may be among the best and have room, by heads of a query. Logs
and segments fill less than 64 MB for 132 CTAs."""
DELAY_NS = 300
"""Delay of the second warpgroup: half of a key tile's time, approximately."""
DTYPES = ("float8_e4m3fn", "bfloat16")
WORD = 4


@dataclass(frozen=True)
class PrefillPlan(Sm90Plan):
    """One compiled kernel: choices, then derived values.

    A *team* is the warps that rank a query together.

    Attributes:
        num_heads: 16, 32 or 64. dtype: of queries and keys.
        scores_only: write the scores, rank nothing.
        of_blocks: of the scores alone: the best one of each block of BLOCK keys. Ranges begin at
            row 0.
        shared: a tile is a cluster's, whose CTAs have a stretch of its keys each.
        segment_keys: scores of a query that are kept until they are ranked; 0: as many as fit.
        log_keys: scores of a query that are kept of earlier segments; 0: as many as fit.
        load_registers, score_registers: of a thread.
    """

    num_heads: int = 64
    dtype: str = "float8_e4m3fn"
    scores_only: bool = False
    of_blocks: bool = False
    segment_keys: int = 0
    log_keys: int = 0
    shared: bool = False
    load_registers: int = 40
    score_registers: int = 232

    def __post_init__(self) -> None:
        if self.num_heads not in NUM_HEADS:
            raise ValueError(f"num_heads: expected 16, 32 or 64; got {self.num_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {DTYPES}; got {self.dtype}")
        if self.segment % CHUNK:
            raise ValueError(f"segment_keys: {self.segment_keys} is no multiple of {CHUNK}")
        if max(self.segment, self.whole) > 2 ** (8 * INDEX_BYTES):
            raise ValueError(f"segment_keys: indices do not fit in {INDEX_BYTES} bytes")
        if self.bins * WORD < MAX_TOPK * INDEX_BYTES:
            raise ValueError("HISTOGRAM_BINS: no room for the indices of a query's best")
        if self.shared and self.scores_only:
            raise ValueError("shared: scores that are not ranked need no cluster")
        if self.of_blocks and not self.scores_only:
            raise ValueError("of_blocks: blocks are scored by a plan with scores_only")
        super().__post_init__()

    @property
    def name(self) -> str:
        kinds = {
            "logits": self.scores_only,
            "blocks": self.of_blocks,
            "shared": self.shared,
            f"h{self.num_heads}": True,
        }
        dtype = "fp8" if self.is_fp8 else "bf16"
        return "_".join(("prefill", *(name for name, so in kinds.items() if so), dtype))

    @property
    def is_fp8(self) -> bool:
        """Whether keys have scales."""
        return self.dtype == "float8_e4m3fn"

    @property
    def entry_keys(self) -> int:
        return BLOCK if self.of_blocks else 1

    @property
    def columns(self) -> int:
        return COLUMNS[self.num_heads]

    @property
    def tile_queries(self) -> int:
        return self.columns // self.num_heads

    @property
    def groups(self) -> int:
        """Groups of `QUERY_GROUP` queries in a tile: scores that a lane has of a key."""
        return self.tile_queries // QUERY_GROUP

    @property
    def teams(self) -> int:
        return min(self.tile_queries, self.select_warps)

    @property
    def team_warps(self) -> int:
        return self.select_warps // self.teams

    @property
    def chunks_ahead(self) -> int:
        """Chunks that a warp loads while it votes on one; 1 if it has few of them."""
        return 2 if self.team_warps == 1 else 1

    @property
    def chunks_written(self) -> int:
        """Chunks whose indices a warp writes at the same time; even."""
        return 4 // self.team_warps

    @property
    def chunks_logged(self) -> int:
        """Chunks whose entries go to the log at the same time, if their indices have room."""
        return 4 * self.team_warps

    @property
    def bins(self) -> int:
        return HISTOGRAM_BINS // self.tile_queries

    @property
    def bin_groups(self) -> int:
        """Groups of bins of a query, for the first message between CTAs."""
        return self.bins // BIN_GROUP

    @property
    def bin_bits(self) -> int:
        return self.bins.bit_length() - 1

    @property
    def most_parts(self) -> int:
        """CTAs that may share a tile: as many as have room for their messages."""
        if not self.shared:
            return 1
        return MAX_CLUSTER if self.is_fp8 or self.num_heads != 32 else MAX_CLUSTER // 2

    @property
    def sample_tiles(self) -> int:
        """Key tiles that a CTA scores besides its own."""
        return SAMPLE_TILES if self.shared else 0

    @property
    def scratch_words(self) -> int:
        return SHARED_SCRATCH_WORDS if self.shared else SCRATCH_WORDS

    @property
    def segment(self) -> int:
        """Scores of a query that are kept until they are ranked."""
        return self.segment_keys or SEGMENTS[self.num_heads]

    @property
    def whole(self) -> int:
        """Keys of a tile up to which it has one segment."""
        return self.segment_keys or WHOLE[self.num_heads]

    @property
    def log(self) -> int:
        """Capacity of a query's log: scores of earlier segments, and their rows."""
        return self.log_keys or LOGS[self.num_heads]

    @property
    def log_chunks(self) -> int:
        return -(-self.log // CHUNK)

    @property
    def row_words(self) -> int:
        """Words of a query in the workspace: rows of the log, its scores, a segment's; or one
        segment."""
        return self.log + self.log_chunks * CHUNK + self.segment

    @property
    def masks(self) -> int:
        """Words of bits of a team: of all scores of a query in the workspace."""
        return max(self.log_chunks * CHUNK + self.segment, self.whole) // WARP_SIZE

    @property
    def workspace_words(self) -> int:
        return self.tile_queries * self.row_words

    @property
    def chunks(self) -> int:
        """Spans of a row of queries or keys."""
        return INDEX_HEAD_DIM * (1 if self.is_fp8 else 2) // SPAN_BYTES

    @property
    def key_chunk_bytes(self) -> int:
        """A span of all keys of a stage."""
        return TILE_KEYS * SPAN_BYTES

    @property
    def query_chunk_bytes(self) -> int:
        """A span of all columns of a tile."""
        return self.columns * SPAN_BYTES

    @property
    def stages(self) -> int:
        """Key tiles in flight; even, so that a stage is always read by the same warpgroup. Messages
        of CTAs that share tiles have the place of two of bf16 keys."""
        return 8 if self.is_fp8 else 6 - 2 * self.shared

    @property
    def in_turns(self) -> bool:
        """Whether the warpgroups multiply in turns; see `wait_for_turn`, score.py."""
        return not self.is_fp8

    @property
    def delay_ns(self) -> int:
        """Nanoseconds by which the second warpgroup starts a segment later; see
        `delay_second_group` (score.py)."""
        return DELAY_NS if self.is_fp8 and self.columns == max(COLUMNS.values()) else 0

    @property
    def query_stages(self) -> int:
        """Tiles of queries in shared memory. Messages of CTAs that share tiles are in the place of
        the second one: the next queries may come while these are ranked."""
        return 2 if self.is_fp8 and not self.shared else 1

    @property
    def select_warps(self) -> int:
        return 2 * WARPGROUP_SIZE // WARP_SIZE

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        keys = self.stages * self.chunks * self.key_chunk_bytes
        queries = self.query_stages * self.chunks * self.query_chunk_bytes
        rank = [
            SmemRegion("histogram", HISTOGRAM_BINS * WORD, 16, "bins, of every query"),
            SmemRegion("masks", self.teams * self.masks * WORD, 16, "a bit a score: it wins"),
            SmemRegion("maybes", self.teams * self.masks * WORD, 16, "a bit a score: it may"),
            SmemRegion(
                "candidates", self.teams * ROUND_BINS * WORD, 16, "keys and indices, or bins"
            ),
            SmemRegion(
                "scratch", self.teams * self.scratch_words * WORD, 16, "counts of the teams"
            ),
            SmemRegion("samples", 2 * self.select_warps * self.tile_queries * WORD, 16, "extremes"),
            SmemRegion("windows", 2 * self.tile_queries * WORD, 16, "scores to bins"),
            SmemRegion("logged", self.tile_queries * WORD, 16, "scores in the logs"),
        ]
        scales = [SmemRegion("scales", self.stages * TILE_KEYS * WORD, 128, "fp32, of keys")]
        return [
            SmemRegion("queries", queries, 1024, "columns of a tile, SW128"),
            SmemRegion("keys", keys, 1024, "a ring of 64 rows each, SW128"),
            *(scales if self.is_fp8 else []),
            *([] if self.scores_only else rank),
            *(self.messages if self.shared else []),
        ]

    @property
    def messages(self) -> list[SmemRegion]:
        """Regions that the CTAs of a cluster write in each other, and what is sent there."""
        teams, parts = self.teams * WORD, self.most_parts
        fine, coarse = teams * parts * BIN_GROUP, teams * parts * self.bin_groups
        return [
            SmemRegion("fine", fine, 16, "received: bins of a group"),
            SmemRegion("coarse", coarse, 16, "received: groups of bins"),
            SmemRegion("received", teams * 2 * CANDIDATES, 16, "received: keys and entries"),
            SmemRegion("above", teams * parts, 16, "received: entries above the last bin"),
            SmemRegion("own_coarse", teams * self.bin_groups, 16, "what is sent to coarse"),
        ]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The warps that score and rank, and the warpgroup of the one that loads."""
        return (
            Role("score", 2 * WARPGROUP_SIZE, self.score_registers, "scores, the best, their rows"),
            Role("load", WARPGROUP_SIZE, self.load_registers, "queries and keys, by one warp"),
        )

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        score, load = self.roles
        one, group, warps = Arrives.ONE_THREAD, Arrives.WARPS_OF_ONE_GROUP, Arrives.EVERY_WARP
        keys = self.chunks * self.key_chunk_bytes + self.is_fp8 * TILE_KEYS * WORD
        queries = self.chunks * self.query_chunk_bytes
        return (
            Barrier("key_full", self.stages, load, one, score, keys, "64 keys are there"),
            Barrier("key_empty", self.stages, score, group, load, 0, "they have been read"),
            Barrier("query_full", self.query_stages, load, one, score, queries, "a tile is there"),
            Barrier("query_empty", self.query_stages, score, warps, load, 0, "its keys are scored"),
            *(self.message_barriers if self.shared else ()),
        )

    @property
    def message_barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers of the messages to each team."""
        score, _ = self.roles
        one, teams, parts = Arrives.ONE_THREAD, self.teams, self.most_parts * WORD
        coarse, fine = parts * self.bin_groups, parts * BIN_GROUP
        most = parts + 2 * CANDIDATES * WORD
        return (
            Barrier("coarse_full", teams, score, one, score, coarse, "groups' counts"),
            Barrier("fine_full", teams, score, one, score, fine, "bins' counts"),
            Barrier("received_full", teams, score, one, score, most, "candidates, counts above"),
        )


RANKING, SCORING = (
    tuple(
        PrefillPlan(num_heads, dtype, **choice)
        for choice, dtype, num_heads in product(choices, DTYPES, reversed(NUM_HEADS))
    )
    for choices in (
        ({}, {"shared": True}),
        ({"scores_only": True}, {"scores_only": True, "of_blocks": True}),
    )
)
"""Plans that rank the keys of a query's range, and those that score them, or blocks of them."""
