"""Sizes that host and device share."""

from flashdsa.kernels.attention.sm90.core.tile import D_QK

MOST_PART_GROUPS = 1024
"""Most groups of a part: each group counts for enough keys that no part has more."""
WORD_BITS = 32
PAIR = 2
"""Words of a pair: bits of 32 groups, and the row of the first of them."""
LINE_DIMS = 32
LINE_UNITS = 4
"""Octets of a line: octet j has dims 4 j to 4 j + 3 of the first and of the second half of a line
of 32 dims."""
UNIT_WORDS = 3
"""See `octets.py`."""
LINES = D_QK // LINE_DIMS
UNITS = LINES * LINE_UNITS
ROW_WORDS = UNITS * UNIT_WORDS
"""Words of a row of dKV in the slots. A line and the next one are a pair. Words 0 and 1 of every
octet come first: of each pair octet j of the one and of the other line, j = 0, 1, ...; words 2 of
all octets follow, in the same order. So a lane stores 16 and 8 bytes of a pair, and four lanes
whole sectors."""
LAST_WORDS = UNITS * (UNIT_WORDS - 1)
"""Offset of words 2."""
CURSORS = 4
"""Counters of a part, see `places.py`."""
KEY_WORDS = 4
"""Words of a key that has rows."""
