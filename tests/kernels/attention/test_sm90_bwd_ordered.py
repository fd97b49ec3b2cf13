"""The deterministic Hopper backward on ptxemu: the same bits in any order of CTAs and warps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import compiled
from flashdsa.backends.sm90 import mla_bwd_memory
from flashdsa.kernels.attention import union
from flashdsa.kernels.attention.lists import UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    MOST_PART_GROUPS,
    PAIR,
    PerItemPlan,
)
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
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    ITEM_TILES,
    MOST_UNEVEN,
    turns_kernel,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import THREADS as TURN_THREADS
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.cutedsl import emulate
from tests.kernels.attention.hopper_gradients import hopper_gradients

ONE_SM = Device(1, {1: 1})
DEVICES_AND_ORDERS = [
    (SMALL, Policy()),
    (SMALL, Policy(asynchronous="random", seed=3)),
    (ONE_SM, Policy(asynchronous="late", seed=5)),
]


def gradients_of(case: SparseMlaCase, *, deterministic: bool = True) -> list[tuple[Tensor, ...]]:
    """On each device in its order."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    return [
        hopper_gradients(inputs, *device_and_order, deterministic=deterministic)
        for device_and_order in DEVICES_AND_ORDERS
    ]


def are_equal(every: list[tuple[Tensor, ...]]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(a, b) for one in every[1:] for a, b in zip(one, every[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries"), [(16, 37), (128, 4)])
def test_bits_of_slots_do_not_depend_on_what_runs_first(
    heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 64 rows, and queries of two row blocks, in parts of four row blocks or fewer."""
    monkeypatch.setattr(mla_bwd_memory, "MOST_SLOT_BYTES", 4 * 128 * 864)
    monkeypatch.setattr(mla_bwd_memory, "WAVE", 4)
    mla_bwd_memory.sizes_of.cache_clear()
    case = SparseMlaCase("slots", queries, 90, heads, 24, topk_length=True, invalid=True)
    assert are_equal(gradients_of(case))
    mla_bwd_memory.sizes_of.cache_clear()


@pytest.mark.slow
def test_without_it_they_do() -> None:
    """Or the test above would show nothing."""
    case = SparseMlaCase("ordered", 37, 90, 16, 24, topk_length=True, invalid=True)
    assert not are_equal(gradients_of(case, deterministic=False))


@pytest.mark.slow
@pytest.mark.timeout(900)  # 75 s alone, four times that beside other work
@pytest.mark.parametrize(("heads", "queries"), [(8, 40), (64, 9), (128, 6)])
def test_lists_with_rows_out_of_order(heads: int, queries: int) -> None:
    """With 8 heads they are so many that all slots of a group are its list."""
    case = SparseMlaCase("repeats", queries, 60, heads, 90, duplicates=True, empty_rows=True)
    assert are_equal(gradients_of(case))


@pytest.mark.parametrize(
    ("groups", "capacity", "blocks"),
    [
        (1, 64, 1),
        (397, 1024, 1),
        (4096, 2048, 1),
        (9000, 64, 1),
        (4096, 2048, 2),
        (1024, 8192, 1),
        (512, 16384, 1),
        (5, 1 << 22, 1),
    ],
)
def test_parts_of_the_groups_have_room(groups: int, capacity: int, blocks: int) -> None:
    """In as many parts as are launched, whatever the lengths of the lists; as the device splits."""
    room, unit_groups, parts = mla_bwd_memory.sizes_of(
        groups, capacity, blocks, PerItemPlan(slots=True).slot_words
    )
    assert room * blocks * 864 <= max(1 << 31, capacity * blocks * 864)
    least = -(-room // MOST_PART_GROUPS)
    units = [min(unit_groups, groups - first) for first in range(0, groups, unit_groups)]
    some, full = capacity // 3, capacity
    for lengths in ((0,), (some,), (full,), (0, full), (full, 0, 0), (full, full, some)):
        used, taken, most = 0, 1, 0
        in_part = 0
        for number, unit in enumerate(units):
            size = unit * max(lengths[number % len(lengths)], least)
            assert size <= room
            if used and used + size > room:
                taken, used, in_part = taken + 1, 0, 0
            used, in_part = used + size, in_part + unit
            most = max(most, in_part)
        assert taken <= parts
        assert most <= MOST_PART_GROUPS
    assert parts == 1 or groups * capacity > room or groups > MOST_PART_GROUPS


TILE = 64
SPARE = 3
"""Groups behind the part's, of which nothing is written."""


@cute.jit
def launch_turns(
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    offsets: tuple[
        cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor,
        cute.Tensor, cute.Tensor,
    ],
    blocks: Int32,
    num_ctas: Int32,
):  # fmt: skip
    """Write the turns of both parts."""
    made = turns_kernel(Lists(*lists), Offsets(*offsets), blocks, num_ctas, TILE)
    made.launch(grid=[2, 1, 1], block=[TURN_THREADS, 1, 1])


@pytest.mark.parametrize(
    ("begin", "groups", "blocks", "num_ctas", "alike"),
    [
        (0, 1, 1, 7, True),
        (5, 90, 2, 7, False),
        (3, TURN_THREADS + 70, 1, 132, True),
        (3, TURN_THREADS + 70, 2, 7, False),
        (0, MOST_PART_GROUPS, 1, 132, False),
        (0, MOST_PART_GROUPS, 2, 7, True),
    ],
)
def test_ctas_end_together(
    begin: int, groups: int, blocks: int, num_ctas: int, alike: bool
) -> None:
    generator = torch.Generator().manual_seed(groups)
    total = begin + groups + SPARE
    counts = torch.randint(9 * TILE, (total,), generator=generator, dtype=torch.int32)
    if alike:
        counts = counts % TILE + 3 * TILE + 1
    unordered = torch.randint(4, (total,), generator=generator, dtype=torch.int32)
    nothing = torch.zeros(1, 4, dtype=torch.int32)
    lists = [nothing, nothing.byte(), counts, unordered << UNORDERED_SHIFT, counts]
    offsets = {
        name: torch.full((total * blocks,), -7, dtype=torch.int32) for name in Offsets._fields
    }
    offsets["cursors"] = torch.full((2, CURSORS), -7, dtype=torch.int32)
    # Part 0 has no groups.
    offsets["begins"] = torch.tensor([begin, begin, begin + groups], dtype=torch.int32)
    with emulate() as emulator:
        launch_turns(
            tuple(map(from_dlpack, lists)),
            tuple(map(from_dlpack, offsets.values())),
            blocks,
            min(num_ctas, groups * blocks),
        )
    assert list(emulator.findings) == []

    of_part = slice(begin, begin + groups)
    before = unordered[of_part].cumsum(0) - unordered[of_part]
    assert torch.equal(offsets["unordered"][of_part], before.int())
    rows = int(unordered[of_part].sum())
    cursors = offsets["cursors"][1].tolist()
    assert cursors.pop(OUT_OF_ORDER) == cursors.pop(HANDED_OUT) == rows and not any(cursors)

    order, items = offsets["order"], range(begin * blocks, (begin + groups) * blocks)
    assert (order[items.stop :] == -7).all() and (order[: items.start] == -7).all()
    order = order[items.start : items.stop]
    assert order.sort().values.tolist() == list(items)
    ctas = min(num_ctas, len(items))
    times = -(counts // -TILE) + ITEM_TILES

    def longest(some: torch.Tensor) -> int:
        return max(int(times[some[cta::ctas].long() // blocks].sum()) for cta in range(ctas))

    usual = torch.arange(items.start, items.stop, dtype=torch.int32)
    mean = float(times[usual.long() // blocks].float().mean())
    if longest(usual) <= MOST_UNEVEN * -(-len(items) // ctas) * mean:
        assert torch.equal(order, usual) and (alike or groups != 90)
    else:
        assert not alike
        assert longest(order) <= min(longest(usual), len(items) / ctas * mean + int(times.max()))
        lengths = times[order.long() // blocks]
        for turn in range(len(items) // ctas):
            own = lengths[turn * ctas : (turn + 1) * ctas]
            steps = own.diff() if turn % 2 else -own.diff()
            assert (steps >= 0).all()
            assert (lengths[(turn + 1) * ctas :] <= own.min()).all()


CAPACITY = 64
OF_LISTS = tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]
OF_OFFSETS = tuple[
    cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor,
    cute.Tensor,
]  # fmt: skip


@cute.jit
def launch_rows(lists: OF_LISTS, offsets: OF_OFFSETS, number: Int32):
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


def test_rows_of_a_key_are_in_the_groups_order() -> None:
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
        with emulate(policy=Policy(asynchronous="random", seed=4)) as emulator:
            launch_rows(
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_packed_rows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, afresh: None) -> None:
    """With rows that a query names again, and invalid slots."""
    case = SparseMlaCase("far", 3, 300, 64, 140, duplicates=True, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    found = []
    for rows in (union.FAR_ROWS, 100):
        monkeypatch.setattr(union, "FAR_ROWS", rows)
        compiled.cache_clear()
        found.append(hopper_gradients(inputs, deterministic=True))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
