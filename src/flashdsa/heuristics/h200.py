"""Measured on an H200."""

from __future__ import annotations

from flashdsa.heuristics.sparse_mla import Grouping, SparseMlaConstants, Times

SPARSE_MLA = SparseMlaConstants(
    group_lists=10.0,
    groupings={
        2: Grouping(1.05, 0.65, 130),
        4: Grouping(1.3, 0.5, 80),
        8: Grouping(1.1, 0.5, 80),
    },
    most_unsampled=400,
    used_slots=0.7,
    find_ends=100,
    clusters={
        "packed": Times(9.4, 2.53, item=9.4),
        "bf16": Times(9.4, 1.9, item=9.4),
        "few heads": Times(6.4, 1.41, item=5.5),
    },
    alone=1.9,
    alone_tiles=2,
    dealt={
        "packed": Times(9.3, 2.55, item=4.5, merge=3.4, part=2.9),
        "bf16": Times(7.6, 1.67, item=3.0, merge=4.4, part=0.7),
        "few heads": Times(6.0, 1.43, item=3.8, merge=4.4, part=1.3),
    },
    dealt_gain=0.97,
    dealt_gain_lengths=1.05,
    least_dealt_tiles=5,
    long_tiles=10,
    most_waves={"packed": 32, "bf16": 32, "few heads": 20},
    forward_gain=0.92,
    forward_gain_far=0.8,
    near_rows=65_536,
    dealt_code=6.0,
    most_dealt_turns=6.5,
)
