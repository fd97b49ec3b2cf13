"""The first design's memory plan (seed 004) beside this one's, with the reason of each difference.

Its figures are those of its own document: two CTAs share the heads, 64 each, and the keys, 16 each.
"""

from __future__ import annotations

from typing import NamedTuple

SMEM_TOTAL = 194_208
"""Bytes of shared memory of the first design."""
SMEM_KIB_64 = 225.7
"""KiB of its predecessor with blocks of 64 keys, "about"."""
TMEM_COLUMNS = 512


class Row(NamedTuple):
    """A region of the first design and what stands for it here.

    Attributes:
        name: "": it has none. at: its first TMEM column; shared memory: 0. size: bytes or columns.
        here: the plan's regions. why: they differ, or do not.
    """

    name: str
    at: int
    size: int
    here: tuple[str, ...]
    why: str


SMEM = (
    Row("kv", 0, 18_432, ("kv",),
        "same bytes a block: 288 dims of all 32 keys, not all dims of 16; a second stage hides the "
        "gather"),
    Row("kv_peer", 0, 18_432, (),
        "each CTA gathers just the dims that it multiplies; no rows are exchanged"),
    Row("q_nope", 0, 65_536, ("q",), "same bytes: half the dims of all heads"),
    Row("q_rope", 0, 8_192, ("q_rope",),
        "all heads in both CTAs: they take turns at dKV's RoPE dims"),
    Row("dq (union)", 0, 73_728, ("dq",), "the same overlay on Q, in the epilogue"),
    Row("", 0, 0, ("do",),
        "the first design's dKV reads dO^T from shared memory, but its plan has no room for it"),
    Row("sdKV", 0, 73_728, ("ring",),
        "parts leave as soon as they are computed, in slices; no peer's half to add"),
    Row("s, ds", 0, 8_192, ("s", "ds"), "128 heads, not 64"),
    Row("", 0, 0, ("partial",),
        "dims split: P and dP are partial sums, completed with the peer's"),
    Row("is_k_valid", 0, 4, ("rows",),
        "row numbers instead of bits, for the adds as well; 4 blocks in flight"),
    Row("barriers", 0, 152, ("barriers",), "more roles wait for "
        "each other; keys and rows have stages"),
    Row("tmem_start", 0, 4, ("tmem_start",), "the same"),
    Row("row max, li, delta", 0, 1_536, (),
        "thread = lane = head: lse and delta are a register each"),
)  # fmt: skip

TMEM = (
    Row("dQ", 0, 256, ("dq",),
        "the same columns: [128 heads, 256 dims], not [64, 512] folded over the lanes"),
    Row("dQ_RoPE", 256, 32, ("dq_rope",), "the same columns"),
    Row("dKV", 288, 64, ("dkv",),
        "lane = dim (M=128), column = key; lane = key needs M=32, which only .ws has"),
    Row("dKV_RoPE", 352, 16, ("dkv",), "part 2 takes its turn in dKV's columns, with M=64"),
    Row("dP", 352, 16, ("dp",), "32 keys of 128 heads: 32 columns; the same first column"),
    Row("P", 368, 16, ("p",), "likewise, where dKV's second half was"),
    Row("dS (on dP)", 352, 16, ("ds",), "the same overlay, A of dQ"),
    Row("S (on P)", 368, 16, (),
        "dKV's A is dO and Q from shared memory, S its B, which never lies in TMEM"),
    Row("dO", 384, 128, ("do",),
        "the same: [128, 256] bf16 as cta_group::1 reads it; cta_group::2 wants A twice: 256 "
        "columns"),
)  # fmt: skip
