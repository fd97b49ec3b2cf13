"""Sizes of the decodes: an item's CTAs, the parts of O that they send each other, and the rules by
which tiles are divided by stream-K."""

from __future__ import annotations

from abc import abstractmethod

from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS, Tile
from flashdsa.plan import Sm90Plan, SmemRegion, registers_each
from flashdsa.row_formats import V32, RowFormat

F16 = 2
GROUP_DIMS = 8
"""Dims of O that a lane sends at once."""
GROUP_BYTES = GROUP_DIMS * F16
CLUSTER_SIZES = (16, 8, 7, 6, 5, 4, 3, 2, 1)
"""CTAs that may share an item; the key tiles then have room for all dims of O."""
MOST_CTAS = max(CLUSTER_SIZES)
MOST_WITH_A_TILE = 8
"""Tiles of an item up to which those CTAs share it that have one: their number is among
CLUSTER_SIZES, for which region k has room."""
OF_CLUSTERS = ("staged", "o_full", "ready", "done")
"""Barriers of messages, which a kernel of stream-K tiles has not."""
STATISTICS = 4
"""fp32 of a row that CTAs tell each other: maximum, sum, and the scale of each half of O."""
STATISTICS_BYTES = STATISTICS * FP32
CTA_STATISTICS_BYTES = ROWS * STATISTICS_BYTES
OVERHEAD_TILES = 2
"""Tiles that a query takes on the line besides its own: the time of its beginning and end."""
LEAST_SHARE = 4
"""Minimum tiles of the line for each group that takes part, so that no two cuts are at one tile."""
WHOLE_TILES = 5
"""Tiles of the line by which the longest share may grow so that no query is cut: the time of a
part's end and beginning, and of the merge."""
CUT_WORDS = 3
"""Words of a cut: its query, its tile in the query, and the query's position on the line."""
STREAM_K_WORDS = 2 * CUT_WORDS + 4
"""Words of a CTA's cuts, of the line's length, and of the CTA's place."""
ITEM_WORDS = 8
"""Words of a CTA's item and slots."""
CTA_SLOTS = 2
"""Slots of a CTA in the workspace: for its first stretch and for its last one, if they are
parts."""
STRETCH_BYTES = 16
"""Bytes of a stretch of a stream-K kernel: query, head, and parts of the item."""


class ClusterPlan(Sm90Plan):
    """Base of the decodes' plans, which are frozen dataclasses with a tile."""

    tile: Tile
    packed: bool
    form: RowFormat
    joined: bool = False
    single_cta = False
    """Whether one CTA has an item, and sends its rows itself."""
    single_cta_tiles = 1
    """Tiles of an item up to which one CTA of a cluster takes it sooner than several."""

    def __post_init__(self) -> None:
        """Raises BudgetError, which names the region or role that does not fit."""
        # setmaxnreg hands out only the registers that the CTA has at its launch.
        self.check(self.threads * registers_each(self.threads, SM90.registers))

    @property
    def suffix(self) -> str:
        """Part of a variant's name: its rows."""
        if not self.packed:
            return self.tile.suffix
        return "_packed" if self.form == V32 else f"_{self.form.name}"

    @property
    def extra_form(self) -> RowFormat | None:
        """The other format, if the sources have two."""
        return None

    @property
    def mixed(self) -> bool:
        """Whether two sources have packed rows of different formats."""
        return self.extra_form is not None

    @property
    def paged(self) -> bool:
        """Whether kv has three dimensions, pages with a stride; other rows follow each other."""
        return self.packed and self.form != V32

    @property
    @abstractmethod
    def group_heads(self) -> int:
        """Heads of an item."""

    def items(self, num_heads: int) -> int:
        return -(-num_heads // self.group_heads)

    @property
    def dim_groups(self) -> int:
        """Groups of dims of O."""
        return self.tile.d_v // GROUP_DIMS

    @property
    def staged_at(self) -> int:
        """Offset in region k of this CTA's O, after what other CTAs send: a share each, of as many
        groups as the largest one's."""
        sent = max(size * -(-self.dim_groups // size) for size in CLUSTER_SIZES)
        return max(self.tile.bytes, sent * self.group_heads * GROUP_BYTES)

    @property
    def cluster_buffers(self) -> list[SmemRegion]:
        tokens = SmemRegion(
            "tokens", 2 * MOST_CTAS * 4, 16, "words from each CTA that mean no more"
        )
        return [
            *([] if self.single_cta else [tokens]),
            SmemRegion("extent", 4, 4, "steps of the CTA"),
            SmemRegion("item", ITEM_WORDS * 4, 16, "the CTA's item, and its slots of it"),
        ]

    @property
    def stream_k_buffers(self) -> list[SmemRegion]:
        """Shared memory regions of stream-K tiles, in place of those of messages."""
        words = STREAM_K_WORDS + 2 * (self.threads // WARP_SIZE)
        return [
            SmemRegion("stream_k", words * 4, 16, "the CTA's cuts; each warp's sum and maximum"),
            SmemRegion("extent", 4, 4, "tiles of the stretch"),
            SmemRegion("ticket", 4, 4, "parts of the item that were stored before the CTA's"),
            SmemRegion("stretches", 2 * STRETCH_BYTES, 16, "the stretch, and the one before"),
        ]

    @property
    def slot_words(self) -> int:
        """32-bit words of a part in the workspace: O in f16, and its statistics."""
        return self.group_heads * (self.tile.d_v * F16 + STATISTICS_BYTES) // 4
