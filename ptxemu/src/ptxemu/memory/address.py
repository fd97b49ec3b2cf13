"""The address map: shared windows by CTA rank, and the generic addresses of the other spaces."""

from __future__ import annotations

SHARED_RANK_SHIFT = 24
"""A 32-bit shared::cluster address is (CTA rank in the cluster << 24) | offset; compiled kernels
do arithmetic on bit 24 to find the CTA pair's leader (see CUTLASS's Sm100MmaPeerBitMask)."""
SHARED_OFFSET_MASK = (1 << SHARED_RANK_SHIFT) - 1
SHARED_BASE = 0x400
"""First user offset: hardware reserves 1 KiB a CTA at the start of the window."""
SHARED_WINDOW = 0x7E00_0000_0000
"""Generic address of shared::cluster address 0."""
LOCAL_WINDOW = 0x7D00_0000_0000
"""Generic address of local address 0; every thread has its own bytes there."""
PARAM_WINDOW = 0x7C00_0000_0000
"""Generic address of the kernel parameters."""
CONST_WINDOW = 0x7B00_0000_0000
"""Generic address of module-level .const variables."""
CODE_WINDOW = 0x7A00_0000_0000
"""Address of the first device function; functions are no memory, but have addresses to call."""
WINDOW_BYTES = 1 << 32


def in_window(address: int, window: int) -> bool:
    """Whether a generic address lies in the 4 GiB window that starts at `window`."""
    return window <= address < window + WINDOW_BYTES
