"""Sizes that the kernels with keys as rows share."""

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.row_formats import RowFormat

CONSUMERS = 2
"""Warpgroups that multiply."""
PIECE_KEYS = WARP_SIZE
"""Keys that a warp asks for, a lane each."""
WARPS = WARPGROUP_SIZE // WARP_SIZE
BANK_UNIT = 16
"""Bytes of a row that a lane reads at once: eight rows are in all banks if they are an odd multiple
of it apart."""


def row_pitch(form: RowFormat) -> int:
    """Bytes from a row to the next one in shared memory."""
    units = -(-form.row_bytes // BANK_UNIT)
    return (units + (units + 1) % 2) * BANK_UNIT
