"""Rows of the slots that the deterministic Hopper backward gives to its lists' keys, on ptxemu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.kernels.attention.lists import UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import CURSORS, KEY_WORDS, PAIR
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_offsets import (
    FEW,
    HANDED_OUT,
    LISTED,
    MOST_FEW,
    MOST_OF_WARP,
    OUT_OF_ORDER,
    THREADS,
    Offsets,
    count_kernel,
    order_kernel,
    start_kernel,
    take_kernel,
)
from ptxemu import Policy
from ptxemu.cutedsl import emulate

CAPACITY = 64
OF_LISTS = tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]
OF_OFFSETS = tuple[
    cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor,
    cute.Tensor,
]  # fmt: skip


@cute.jit
def launch(lists: OF_LISTS, offsets: OF_OFFSETS, number: Int32):
    """Find the rows of a part, by three CTAs."""
    made = Lists(*lists), Offsets(*offsets), number
    for kernel in (
        count_kernel(*made),
        start_kernel(*made[1:]),
        take_kernel(*made),
        order_kernel(*made[1:]),
    ):
        kernel.launch(grid=[3, 1, 1], block=[THREADS, 1, 1])


def make_lists(groups: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, counts, keys out of order) of lists: key k is named by one in (1 + k)^1.5 groups, and
    some lists end with keys that they have named."""
    generator = torch.Generator().manual_seed(groups)
    rows = torch.full((groups, CAPACITY), -7, dtype=torch.int32)
    counts, unordered = (torch.zeros(groups, dtype=torch.int32) for _ in range(2))
    for group in range(groups):
        named = torch.arange(keys)[
            torch.rand(keys, generator=generator) * (1 + torch.arange(keys)) ** 1.5 < 1
        ]
        again = named[torch.randint(len(named), (group % 7 // 5 * 3,), generator=generator)]
        counts[group], unordered[group] = len(named) + len(again), len(again)
        rows[group, : counts[group]] = torch.cat((named, again))
    return rows, counts, unordered


@pytest.mark.parametrize("policy", [Policy(), Policy(asynchronous="random", seed=4)])
def test_rows_of_a_key_are_in_the_groups_order(policy: Policy) -> None:
    """Of two parts of 620 and 110 groups, keys have rows for a CTA, for a warp, few or none."""
    begins, keys = [0, 620, 730], 45
    rows, counts, unordered = make_lists(begins[-1], keys)
    lists = [rows, rows.byte(), counts, unordered << UNORDERED_SHIFT | 1, counts]
    room, groups = int(counts.sum()), begins[-1]
    shapes = {
        "named": (keys, PAIR),
        "cursors": (2, CURSORS),
        "begins": (3,),
        "order": (1,),
        "keys": (keys, KEY_WORDS),
        "unordered": (groups,),
        "owners": (room, PAIR),
        "rows": (groups, CAPACITY),
    }
    offsets = {name: torch.full(shape, -7, dtype=torch.int32) for name, shape in shapes.items()}
    offsets["named"][:, 0] = 0
    offsets["begins"] = torch.tensor(begins, dtype=torch.int32)
    offsets["cursors"].zero_()
    for number in range(2):
        some = slice(begins[number], begins[number + 1])
        offsets["unordered"][some] = unordered[some].cumsum(0) - unordered[some]
        offsets["cursors"][number, [HANDED_OUT, OUT_OF_ORDER]] = unordered[some].sum().int()
        with emulate(policy=policy) as emulator:
            launch(
                tuple(map(from_dlpack, lists)), tuple(map(from_dlpack, offsets.values())), number
            )
        assert list(emulator.findings) == []
        check_part(lists, offsets, number, some)
    assert not offsets["named"][:, 0].any()


def check_part(lists: list[Tensor], offsets: dict[str, Tensor], number: int, some: slice) -> None:
    """Rows of a part's lists, and its lists of keys."""
    rows, _, counts, present, _ = lists
    own: dict[int, list[int]] = {}
    again = []
    for group in range(some.start, some.stop):
        last = int(counts[group])
        ordered = last - int(present[group] >> UNORDERED_SHIFT)
        for place in range(last):
            key, row = int(rows[group, place]), int(offsets["rows"][group, place])
            if place < ordered:
                own.setdefault(key, []).append(row)
            else:
                again.append(row)
                assert offsets["owners"][row, 0] == key
        assert (offsets["rows"][group, last:] == -7).all()
    assert again == list(range(len(again)))
    taken = sorted(row for of_key in own.values() for row in of_key)
    assert taken == list(range(len(again), len(again) + len(taken)))
    cursors = offsets["cursors"][number].tolist()
    assert cursors[HANDED_OUT] == len(again) + len(taken)
    front, back = cursors[LISTED], cursors[FEW]
    listed = torch.cat((offsets["keys"][:front], offsets["keys"][len(offsets["keys"]) - back :]))
    assert sorted(listed[:, 0].tolist()) == sorted(own)
    for place, (key, first, count, _) in enumerate(listed.tolist()):
        assert own[key] == list(range(first, first + count))
        assert (count > MOST_FEW) == (place < front)
    assert (max(map(len, own.values())) >= MOST_OF_WARP) == (number == 0)
    assert min(map(len, own.values())) <= MOST_FEW
