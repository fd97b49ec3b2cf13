"""Bytes that emulated runs of the Blackwell attention kernels moved, by ptxemu's paths."""

from __future__ import annotations

BACKWARD_MOVED = {
    "MMA shared read": 303_104,
    "shared -> DSMEM (remote store)": 32_768,
    "global -> shared (TMA load)": 18_432,
    "tmem ld": 73_728,
    "tmem st": 8_192,
    "shared -> global (bulk reduce)": 36_864,
    "shared ld": 33_600,
    "shared st": 53_376,
}
"""Bytes of a block and CTA: a run of 128 keys less one of 64, by two blocks."""
FORWARD_MOVED = {
    "MMA shared read": 86_016,
    "global -> shared (TMA load)": 36_864,
    "shared ld": 17_408,
    "shared st": 25_096,
    "tmem ld": 32_768,
}
"""Bytes of a tile and CTA: a run of 512 keys less one of 128, by twelve tiles."""
