"""The order in which the Hopper forward draws lists, on ptxemu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Int32, Uint16, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.fwd.context import locate
from flashdsa.kernels.attention.sm90.fwd.draws import class_of, order_of, sort_lists
from flashdsa.kernels.attention.sm90.fwd.gather import (
    Gatherer,
    count_of_lists,
    item_at,
    put_in_order,
)
from flashdsa.kernels.attention.sm90.fwd.plan import MOST_SORTED, THREAD_LISTS, FwdPlan
from ptxemu.cutedsl import emulate

STEP_KEYS = 128
"""Slots of a step."""
PLAN = FwdPlan(drawn=True)


@cute.kernel
def order_kernel(slots: cute.Tensor, classes: cute.Tensor, order: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    pointer = SmemAllocator().allocate_array(Uint16, MOST_SORTED)
    words = cute.make_tensor(pointer, cute.make_layout(MOST_SORTED))
    own = []
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        own.append(class_of(Int32(slots[turn * WARPGROUP_SIZE + thread]), STEP_KEYS))
        classes[turn * WARPGROUP_SIZE + thread] = own[turn]
    sort_lists(words, own, thread)
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        order[turn * WARPGROUP_SIZE + thread] = Int32(words[turn * WARPGROUP_SIZE + thread])


@cute.jit
def launch(slots: cute.Tensor, classes: cute.Tensor, order: cute.Tensor):
    """Write the class of each list, and the order of all."""
    order_kernel(slots, classes, order).launch(grid=(1, 1, 1), block=(WARPGROUP_SIZE, 1, 1))


def found(slots: Tensor) -> tuple[list[int], list[int]]:
    """Classes and order of lists of so many slots."""
    classes, order = (torch.full_like(slots, -1) for _ in range(2))
    with emulate():
        launch(*(from_dlpack(x) for x in (slots, classes, order)))
    return classes.tolist(), order.tolist()


def test_longest_first_and_as_they_come() -> None:
    """Lists of 0 to 17 steps are told apart by their steps; many have as many."""
    generator = torch.Generator().manual_seed(0)
    for most in (0, 1, 300, 2_048):
        slots = torch.randint(most + 1, (MOST_SORTED,), generator=generator, dtype=torch.int32)
        slots[-30:] = 0
        steps = ((slots + STEP_KEYS - 1) // STEP_KEYS).tolist()
        expected = sorted(range(MOST_SORTED), key=lambda one: -steps[one])
        assert found(slots) == (steps, expected), most


def test_long_lists_share_classes_of_a_quarter_of_an_octave() -> None:
    slots = torch.arange(MOST_SORTED, dtype=torch.int32) * STEP_KEYS
    slots[-1] = 2**31 - STEP_KEYS
    classes, order = found(slots)
    assert classes == sorted(classes) and max(classes) == 31
    assert order == sorted(range(MOST_SORTED), key=lambda one: -classes[one])
    first = [classes.index(one) for one in range(32)]
    assert first == [*range(16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16),
                     *range(128, 256, 32)]  # fmt: skip


@cute.kernel
def places_kernel(
    lse: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor, items: cute.Tensor
):
    place, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctx = locate(lse, Memory.allocate(PLAN))
    role = Gatherer(ctx, None, indices, indices, topk_length, None, None, None, None)
    order = order_of(ctx)
    put_in_order(ctx, order, count_of_lists(role, order))
    if place < ctx.num_items:
        drawn = item_at(role, order, place)
        items[cta, place, 0], items[cta, place, 1] = drawn.item, drawn.slots


@cute.jit
def launch_places(
    lse: cute.Tensor, indices: cute.Tensor, topk_length: cute.Tensor, items: cute.Tensor
):
    """Write each CTA's item at each place, and its slots."""
    places_kernel(lse, indices, topk_length, items).launch(
        grid=(items.shape[0], 1, 1), block=(WARPGROUP_SIZE, 1, 1)
    )


@pytest.mark.parametrize(("heads", "ctas"), [(8, 2), (70, 2), (70, 3)])
@pytest.mark.parametrize("lengths", [True, False])
def test_the_last_queries_come_longest_first(heads: int, ctas: int, lengths: bool) -> None:
    """CTAs sort the last three lists a CTA, but those of the first items; queries of as many steps
    keep their order, and every CTA has the same."""
    queries, topk, blocks = 10, 300, -(-heads // 64)
    given = torch.tensor([9, -1, 200, 0, 300, 128, 129, 900, 1, 257]).int()
    given = given if lengths else given[:0]
    lse, indices = torch.zeros(queries, heads), torch.zeros(queries, topk, dtype=torch.int32)
    items = torch.full((ctas, queries * blocks, 2), -1, dtype=torch.int32)
    with emulate():
        launch_places(*(from_dlpack(x) for x in (lse, indices, given, items)))
    slots = given.clamp(0, topk).tolist() if lengths else [topk] * queries
    own = -(-ctas // blocks)
    first = queries - min(3 * ctas // blocks, queries - own)
    last = sorted(
        range(first, queries), key=lambda query: -((slots[query] + STEP_KEYS - 1) // STEP_KEYS)
    )
    order = [*range(first), *last]
    expected = [[q * blocks + block, slots[q]] for q in order for block in range(blocks)]
    assert items.tolist() == [expected] * ctas
