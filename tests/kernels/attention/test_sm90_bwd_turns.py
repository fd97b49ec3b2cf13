"""The order in which CTAs of the deterministic Hopper backward take a part's items, on ptxemu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.kernels.attention.lists import UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import CURSORS, MOST_PART_GROUPS
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_offsets import (
    HANDED_OUT,
    OUT_OF_ORDER,
    Offsets,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    ITEM_TILES,
    MOST_UNEVEN,
    THREADS,
    turns_kernel,
)
from ptxemu.cutedsl import emulate

TILE = 64
SPARE = 3
"""Groups behind the part's, of which nothing is written."""


@cute.jit
def launch(
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
    made.launch(grid=[2, 1, 1], block=[THREADS, 1, 1])


@pytest.mark.parametrize(
    ("begin", "groups", "blocks", "num_ctas", "alike"),
    [
        (0, 1, 1, 7, True),
        (5, 90, 2, 7, False),
        (3, THREADS + 70, 1, 132, True),
        (3, THREADS + 70, 2, 7, False),
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
        launch(
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
