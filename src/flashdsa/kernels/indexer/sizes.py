"""Sizes of the cache, the selection and the schedule that no architecture changes."""

from flashdsa.hw import BULK_ALIGNMENT, MAX_CLUSTER_SIZE
from flashdsa.problem import MAX_NEXT_N

NUM_BINS = 4096
"""Bins of the histogram over sortable keys (see select/sort_keys.py)."""
RANK_MANTISSA = 4
"""Bits of the mantissa in the bins by which a launch of its own ranks scores."""
RANK_BINS = 64 << RANK_MANTISSA
"""These bins; see sm90/rank."""
BIN_GROUP = 32
"""Bins that are summed for the first of a round's two messages (see select/exchange.py)."""
BIN_GROUPS = NUM_BINS // BIN_GROUP
BITMAP_WORDS = NUM_BINS
"""32-bit words of the winners' bitmap, over the histogram: 131,072 positions at a time."""
LAST_POSITION = 0x7FFFFFFF
"""The largest position, which no token has."""
ENTRY_WORDS = 2
"""32-bit words of an entry on its way between CTAs: key and position."""
SLOT_HEADER_WORDS = 4
"""32-bit words of the header of what a CTA publishes: see `Header` in select/published.py."""
TILE_WORDS = 6
"""32-bit words of a work tile's description (see schedule/work_tile.py)."""
MAX_CLUSTER = MAX_CLUSTER_SIZE
"""CTAs that may share a row; more than 8 is what CUDA calls a non-portable size."""
SPLITS_BY_SIZE = 2
"""Clusters that share a row, at most, by the CTAs of each: one CTA's lists have room for what they
publish."""
ORDERED_ROWS = 512
"""The lengths decide who gets which row in batches of at most this many rows, or of so many
requests, whose rows are weighed together (see schedule/row_schedule.py)."""
MOST_WEIGHED = ORDERED_ROWS * MAX_NEXT_N
"""Rows of such a batch, at most."""
MAX_OWN_ROWS = 64
"""Rows of such a batch that a group of CTAs gets, at most."""
MAX_HALVINGS = 2
"""Maximum number of times that a cluster is halved into groups of CTAs that share rows."""
SCRATCH_WORDS = 64
"""32-bit words for scans and broadcasts of the consumers (see smem_views.py)."""
FILLS = 8
"""Different numbers of pages that CTAs take before they first compact their lists."""
DEPTH_STEPS = 8
"""Steps of a page in which the pages that a load warp keeps in flight are measured."""
INITIALISING_WARPS = 3
"""Warps that share the initialisation of barriers: the largest number that does not become a jump
through a table in constant memory, which takes longer."""
CACHE_ROW_BYTES = 128
"""Bytes of a row of the cache as TMA sees it; a page is 64 rows of keys and 2 rows of scales."""


def page_step(gathers: bool) -> int:
    """Bytes of which the distance of two pages is a multiple: TMA's least step, or the row of
    another page that a gather counts to."""
    return CACHE_ROW_BYTES if gathers else BULK_ALIGNMENT
