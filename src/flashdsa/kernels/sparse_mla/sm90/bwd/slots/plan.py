"""Sizes that host and device share."""

from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK

MOST_PART_GROUPS = 1024
"""A group counts for so many keys that no part has more of them."""
WORD_BITS = 32
LINE_DIMS = 32
LINE_UNITS = 4
UNIT_WORDS = 4
"""16 bytes: dims 4 j to 4 j + 3 of the first and of the second half of a line of 32 dims."""
ROW_WORDS = D_QK // LINE_DIMS * LINE_UNITS * UNIT_WORDS
"""Of a row of dKV in the slots, see `quads.py`."""
CURSORS = 4
"""Counters of a part, see `places.py`."""
KEY_WORDS = 4
"""Of a key that has rows."""
