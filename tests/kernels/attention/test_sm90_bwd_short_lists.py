"""Lists that a warp sorts, and the order of the tickets, on ptxemu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.lists import MOST_UNORDERED, UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import short_lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import DRAWN, MET, ORDER, PerItemPlan
from flashdsa.kernels.attention.sm90.bwd_per_item.prepare import query_kernel
from flashdsa.kernels.attention.sm90.bwd_per_item.short_lists import WARPS, short_kernel
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    FREE,
    LENGTHS,
    TAIL,
    Items,
    order_items,
)
from flashdsa.kernels.attention.union_slots import THREADS
from flashdsa.verify.draw_rows import invalid_values
from ptxemu.cutedsl import emulate

NUM_KEYS, TILE, HEADS, QUERIES = 700, 64, 17, 6


def poisoned_lists(capacity: int) -> Lists:
    """Lists that nothing has written."""
    rows = torch.full((QUERIES, capacity), -7, dtype=torch.int32)
    members = torch.full((QUERIES, capacity), 7, dtype=torch.uint8)
    return Lists(rows, members, *(torch.full((QUERIES,), -7, dtype=torch.int32) for _ in range(3)))


def of_delta(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dO, O, and delta that nothing has written."""
    do, out = (torch.randn(QUERIES * HEADS, 512, generator=generator).bfloat16() for _ in range(2))
    return do, out, torch.full((QUERIES * HEADS,), torch.nan)


@cute.jit
def make_lists(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    choice: cute.Tensor,
):
    keys, heads = Int32(NUM_KEYS), Int32(HEADS)
    made = short_kernel(slots, Lists(*lists), keys, of_delta, heads, choice, TILE, False)
    made.launch(grid=[-(-QUERIES // WARPS), 1, 1], block=[WARPS * WARP_SIZE, 1, 1])


@pytest.mark.parametrize(
    ("topk", "choice"), [(1, SECOND), (40, SECOND), (300, SECOND), (512, SECOND), (40, FIRST)]
)
def test_lists_ascend_with_repeats_or_delta_is_made(topk: int, choice: int) -> None:
    """Full, short by its length, repeated, invalid by a third, of one row, and empty; delta alone
    where large groups are taken."""
    generator = torch.Generator().manual_seed(topk)
    indices = torch.stack(
        [torch.randperm(NUM_KEYS, generator=generator)[:topk].int() for _ in range(QUERIES)]
    )
    indices[2] = indices[2, torch.randint(topk, (topk,), generator=generator)]
    invalid = torch.tensor(invalid_values(NUM_KEYS)).int()
    indices[3, ::3] = invalid[torch.arange(topk)[::3] % len(invalid)]
    indices[4], indices[5] = 699, -1
    lengths = torch.tensor([topk + 9, topk // 2, topk, topk, topk, topk], dtype=torch.int32)
    capacity = -(-topk // TILE) * TILE
    rows, members, counts, present, named = poisoned_lists(capacity)
    do, out, delta = of_delta(generator)
    with emulate() as emulator:
        make_lists(
            tuple(map(from_dlpack, (indices, lengths))),
            tuple(map(from_dlpack, (rows, members, counts, present, named))),
            tuple(map(from_dlpack, (do, out, delta))),
            from_dlpack(torch.tensor([choice], dtype=torch.int32)),
        )
    assert list(emulator.findings) == []
    if choice == FIRST:
        torch.testing.assert_close(delta, (do.float() * out.float()).sum(1), rtol=1e-4, atol=1e-4)
        assert (rows == -7).all() and (members == 7).all() and (counts == -7).all()
        return
    assert delta.isnan().all()
    for query in range(QUERIES):
        own = indices[query, : max(0, int(lengths[query]))]
        want = own[(own >= 0) & (own < NUM_KEYS)].sort().values
        count = len(want)
        padded = -(-count // TILE) * TILE
        repeats = MOST_UNORDERED if len(want.unique()) < count else 0
        assert counts[query] == named[query] == count
        assert present[query] == min(count, 1) | repeats << UNORDERED_SHIFT
        assert torch.equal(rows[query, :count], want)
        assert (members[query, :count] == 1).all() and not members[query, count:padded].any()
        assert torch.isin(rows[query, count:padded], want).all()
        assert (rows[query, padded:] == -7).all() and (members[query, padded:] == 7).all()


@cute.jit
def make_mixed_lists(
    slots: tuple[cute.Tensor, cute.Tensor],
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    of_delta: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    choice: cute.Tensor,
):
    of_lists = slots, Lists(*lists), Int32(NUM_KEYS), of_delta, Int32(HEADS), choice
    made = short_kernel(*of_lists, TILE, True)
    made.launch(grid=[-(-QUERIES // WARPS), 1, 1], block=[WARPS * WARP_SIZE, 1, 1])
    made = query_kernel(*of_lists, PerItemPlan(more=4, tickets=True), False)
    made.launch(grid=[QUERIES, 1, 1], block=[THREADS, 1, 1])


@pytest.mark.parametrize("choice", [SECOND, FIRST])
def test_short_lists_are_sorted_beside_long_ones(
    choice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that a warp sorts has repeats in their places, one from a bitmap at its end; delta is
    made once where large groups are taken."""
    monkeypatch.setattr(short_lists, "LEAST_QUERIES", QUERIES)
    generator = torch.Generator().manual_seed(3)
    lengths = [0, 5, 512, 513, 640, 40]
    indices = torch.stack([torch.randperm(NUM_KEYS, generator=generator)[:640] for _ in lengths])
    indices[:, 1] = indices[:, 0]
    rows, members, counts, present, named = poisoned_lists(640)
    do, out, delta = of_delta(generator)
    with emulate() as emulator:
        make_mixed_lists(
            tuple(map(from_dlpack, (indices.int(), torch.tensor(lengths, dtype=torch.int32)))),
            tuple(map(from_dlpack, (rows, members, counts, present, named))),
            tuple(map(from_dlpack, (do, out, delta))),
            from_dlpack(torch.tensor([choice], dtype=torch.int32)),
        )
    assert list(emulator.findings) == []
    if choice == FIRST:
        torch.testing.assert_close(delta, (do.float() * out.float()).sum(1), rtol=1e-4, atol=1e-4)
        assert (rows == -7).all() and (counts == -7).all()
        return
    assert delta.isnan().all()
    for query, length in enumerate(lengths):
        own = indices[query, :length].sort().values.int()
        if length > short_lists.SHORT_SLOTS:
            own = torch.cat([own.unique(), indices[query, :1].int()])
        assert counts[query] == named[query] == length and bool(present[query]) == bool(length)
        assert torch.equal(rows[query, :length], own)
        assert (members[query, :length] == 1).all()


ORDER_THREADS = 64


@cute.kernel
def order_kernel(
    tickets: cute.Tensor,
    counts: cute.Tensor,
    shared: tuple[cute.Tensor, cute.Tensor],
    varied: Int32,
    far: Int32,
):
    items = Items(counts, shared, Float32(0.5), Boolean(varied != 0), Boolean(far != 0))
    order_items(tickets, items, TILE, ORDER_THREADS)


@cute.jit
def order(
    tickets: cute.Tensor,
    counts: cute.Tensor,
    shared: tuple[cute.Tensor, cute.Tensor],
    varied: Int32,
    far: Int32,
):
    launched = order_kernel(tickets, counts, shared, varied, far)
    launched.launch(grid=[1, 1, 1], block=[ORDER_THREADS, 1, 1])


@pytest.mark.parametrize("far", [0, 1])
@pytest.mark.parametrize(("varied", "near"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("groups", [1, 90, 400])
def test_items_are_ordered_by_length_unless_neighbours_share(
    groups: int, varied: int, near: int, far: int
) -> None:
    counts = torch.randint(5 * TILE, (groups,), generator=torch.Generator().manual_seed(1)).int()
    counts[groups // 2] = 2 * LENGTHS * TILE
    tickets = torch.full((ORDER + groups,), -7, dtype=torch.int32)
    # The share of a union is near at 0.5 or less.
    named = torch.full((9,), 100, dtype=torch.int32)
    shared = torch.full((9,), 50 if near else 51, dtype=torch.int32), named
    with emulate() as emulator:
        operands = from_dlpack(tickets), from_dlpack(counts), tuple(map(from_dlpack, shared))
        order(*operands, varied, far)
    assert list(emulator.findings) == []
    assert tickets[DRAWN] == 0
    by_length = varied and not near
    assert tickets[MET] == (0 if far and (by_length or not varied) else FREE)
    got = tickets[ORDER:].tolist()
    assert sorted(got) == list(range(groups))
    if by_length:
        tiles = (-(counts // -TILE)).clamp(max=LENGTHS - 1)[got]
        assert (tiles[1:] <= tiles[:-1]).all()
    else:
        first = max(0, groups - TAIL)
        tail = sorted(range(first, groups), key=lambda group: (-int(counts[group]), group))
        assert got == [*range(first), *tail]
