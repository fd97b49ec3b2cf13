"""The launches that Hopper's backward chooses, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from flashdsa.backends.sm90.mla_bwd_choice import Call, choose
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.catalog import variants_of

IN_ORDER = {"deterministic": True}
LENGTHS = {"has_lengths": True}
JOINED = {"joined": True, **LENGTHS}
RANGES = {"ranges": True, **JOINED}
OF_2 = "groups of 2 (1.16, 3072 keys), else"
OF_4 = "groups of 4 (1.16, 3072 keys), else"
OF_SHORT = "groups of 4 (1.16, 768 keys), else"
OF_LONG = "groups of 2 (1.16, 6144 keys), else"
TABLE: list[tuple[int, int, int, int, dict[str, Any], list[str]]] = [
    # Neighbouring queries of 64 and 128 heads may share their lists.
    (4096, 128, 32_768, 2048, {}, [f"queries 0:4096, heads 0:128: {OF_2} additions by tickets"]),
    (4096, 64, 28_672, 2048, {}, [f"queries 0:4096, heads 0:64: {OF_4} additions"]),
    # Far rows: slots may pay, if lists are long enough.
    (4096, 64, 32_768, 2048, LENGTHS, [
        f"queries 0:4096, heads 0:64: {OF_4} additions or slots by tickets",
    ]),
    (2157, 64, 324_797, 512, {}, [
        f"queries 0:2157, heads 0:64: {OF_SHORT} additions or slots by tickets",
    ]),
    (1023, 128, 42_243, 2048, LENGTHS, [
        f"queries 0:1023, heads 0:128: {OF_2} additions by tickets",
    ]),
    (132, 64, 500_000, 2048, {}, ["queries 0:132, heads 0:64: additions"]),
    # A slot a row and fewer, one item of dKV a multiprocessor: any groups; else six items.
    (1052, 64, 526_000, 500, {}, [
        "queries 0:1052, heads 0:64: groups of 4 (4.0, 768 keys), else additions by tickets",
    ]),
    (1052, 64, 525_999, 500, {}, ["queries 0:1052, heads 0:64: additions by tickets"]),
    (1053, 64, 526_499, 500, {}, [
        f"queries 0:1053, heads 0:64: {OF_SHORT} additions by tickets",
    ]),
    (172, 64, 600_000, 500, {}, ["queries 0:172, heads 0:64: additions by tickets"]),
    # Few heads have no large groups; CTAs draw items of unlike lengths or over far rows.
    (4096, 16, 57_344, 1024, {}, ["queries 0:4096, heads 0:16: additions"]),
    (4096, 16, 57_345, 1024, {}, ["queries 0:4096, heads 0:16: additions by tickets"]),
    (4096, 32, 4096, 1024, LENGTHS, ["queries 0:4096, heads 0:32: additions by tickets"]),
    (100, 16, 4096, 64, {"tile": WITHOUT_ROPE}, [
        "queries 0:100, heads 0:16: additions by tickets",
    ]),
    # Heads are padded, to spread few queries over more groups, too.
    (528, 8, 4096, 256, {}, ["queries 0:528, heads 0:8 as 16: additions"]),
    (529, 8, 4096, 256, {}, ["queries 0:529, heads 0:8: additions"]),
    (264, 8, 4096, 255, {}, ["queries 0:264, heads 0:8: additions"]),
    (2, 8, 4096, 256, {}, ["queries 0:2, heads 0:8 as 64: additions"]),
    (1, 8, 4096, 256, {}, ["queries 0:1, heads 0:8: additions"]),
    (300, 300, 8192, 512, {}, [
        "queries 0:300, heads 0:128: additions",
        "queries 0:300, heads 128:256: additions",
        "queries 0:300, heads 256:300 as 64: additions",
    ]),
    # In order.
    (4096, 128, 32_768, 2048, IN_ORDER, ["queries 0:4096, heads 0:128: slots"]),
    (30, 24, 300, 64, {**IN_ORDER, **JOINED}, [
        "queries 0:30 of 0:30 joined, heads 0:24 as 32: slots",
    ]),
    # Lists have room for so many queries, joint ones for others.
    (30_000, 128, 32_768, 2048, {}, [
        f"queries 0:13106, heads 0:128: {OF_2} additions by tickets",
        f"queries 13106:26212, heads 0:128: {OF_2} additions by tickets",
        f"queries 26212:30000, heads 0:128: {OF_2} additions by tickets",
    ]),
    (50_000, 16, 5000, 2048, JOINED, [
        "queries 0:40260 of 0:40260 joined, heads 0:16: additions by tickets",
        "queries 40260:50000 of 40260:50000 joined, heads 0:16: additions by tickets",
    ]),
    (2000, 128, 100_000, 50_000, RANGES, [
        f"queries 0:536 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        f"queries 536:1072 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        f"queries 1072:1584 of 0:1584 joined, heads 0:128: {OF_LONG} additions by tickets",
        "queries 1584:2000 of 1584:2000 joined, heads 0:128: additions by tickets",
    ]),
    # Nothing to do.
    (0, 128, 9, 64, {}, []),
    (4, 128, 0, 64, {}, []),
]  # fmt: skip
"""Queries, heads, rows of keys, slots of a query, the rest; parts of the call."""


@pytest.mark.parametrize(("queries", "heads", "keys", "topk", "kind", "parts"), TABLE)
def test_launches_of_a_call_on_132_multiprocessors(
    queries: int, heads: int, keys: int, topk: int, kind: dict[str, Any], parts: list[str]
) -> None:
    found = choose(Call(queries, heads, keys, topk, 132, **kind))
    assert [*map(str, found)] == parts
    assert {plan.name for part in found for plan in part.plans} <= variants_of("sm90").keys()
