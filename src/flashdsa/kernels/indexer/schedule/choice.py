"""Choice between two launches that follow each other, by the lengths: one of them serves the call.

The host knows no lengths. Rows in pairs read a page once for two rows, which pays where many rows
are long; rows on their own share a long one among more CTAs. Both launches sum up the same pages in
the same way, so exactly one serves.
"""

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import Rows, pages_to_score, row_length


@cute.jit
def serves(pairs: Rows, pair_pages: Int32, plan: cutlass.Constexpr) -> cutlass.Boolean:
    """All lanes of a warp: return whether the caller's launch serves the call.

    Args:
        pairs: two neighbouring rows as one, see `pairs_of`.
        pair_pages: pages of all pairs from which it does; negative: from which it does not; 0: it
            always does.
    """
    served = cutlass.Boolean(True)
    if pair_pages != 0:
        lane, pages = cute.arch.lane_idx(), Int32(0)
        for pair in cutlass.range(lane, pairs.count, WARP_SIZE, unroll=1):
            pages += pages_to_score(row_length(pairs, pair), plan)
        total = cute.arch.warp_redux_sync(pages, "add")
        served = total >= pair_pages if pair_pages > 0 else total < -pair_pages
    return served
