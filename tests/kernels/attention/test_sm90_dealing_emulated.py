"""Cuts of dealt tiles as each CTA finds them on ptxemu: those of `decode_cuts.py`."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.backends.sm90.decode_cuts import cut_line
from flashdsa.dsl.memory import Memory
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Batch, deal
from flashdsa.kernels.attention.sm90.decode.shared.plan import CUT_WORDS, DEALT_WORDS
from ptxemu.cutedsl import emulate

PLAN = DealtPlan()


@cute.kernel
def cuts_kernel(
    lengths: cute.Tensor, cuts: cute.Tensor, queries: Int32, blocks: Int32, most_slots: Int32
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(PLAN)
    deal(memory, Batch(queries, blocks, most_slots, lengths), thread)
    if thread == 0:
        dealt = memory.dealt.array(Int32, DEALT_WORDS)
        for i in cutlass.range_constexpr(DEALT_WORDS):
            cuts[cta, i] = dealt[i]


@cute.jit
def find_cuts(
    lengths: cute.Tensor, cuts: cute.Tensor, queries: Int32, blocks: Int32, most_slots: Int32
):
    """Write the words of each CTA to its row of `cuts`."""
    cuts_kernel(lengths, cuts, queries, blocks, most_slots).launch(
        grid=(cuts.shape[0], 1, 1), block=(PLAN.threads, 1, 1)
    )


def cuts_on_device(
    lengths: list[int] | None, queries: int, blocks: int, most_slots: int, num_ctas: int
) -> list[list[tuple[int, int]]]:
    """Both cuts of each CTA."""
    given = torch.tensor(lengths or [], dtype=torch.int32)
    cuts = torch.full((num_ctas, DEALT_WORDS), -1, dtype=torch.int32)
    with emulate(arch="sm_90a"):
        find_cuts(from_dlpack(given), from_dlpack(cuts), queries, blocks, most_slots)
    of_cta = [row[: 2 * CUT_WORDS].view(2, CUT_WORDS) for row in cuts]
    return [[(int(cut[0]), int(cut[1])) for cut in both] for both in of_cta]


@pytest.mark.parametrize(
    ("queries", "blocks", "most_slots", "num_ctas", "kind"),
    [
        (5, 1, 530, 4, "none"),
        (67, 2, 2048, 7, "none"),
        (7, 1, 900, 4, "none"),
        (7, 1, 200, 4, "drawn"),
        (39, 2, 300, 9, "drawn"),
        (1, 1, 100, 4, "none"),
        (9, 2, 700, 5, "drawn"),
        (385, 1, 2048, 6, "drawn"),
        (1000, 3, 256, 3, "drawn"),
        (7, 2, 2048, 4, "zero"),
        (40, 1, 2048, 4, "one"),
    ],
)
def test_they_are_those_of_the_host_s_rule(
    queries: int, blocks: int, most_slots: int, num_ctas: int, kind: str
) -> None:
    draw = random.Random(queries)
    lengths = {
        "none": None,
        "zero": [0] * queries,
        "one": [0] * (queries // 2) + [most_slots + 9] + [-3] * (queries - queries // 2 - 1),
        "drawn": [draw.choice((0, 1, most_slots, draw.randint(0, 2 * most_slots)))
                  for _ in range(queries)],
    }[kind]  # fmt: skip
    slots = [min(max(given, 0), most_slots) for given in lengths or [most_slots] * queries]
    groups = num_ctas // blocks
    cuts = cut_line([-(-count // 64) for count in slots], groups)
    cuts += [cuts[-1]] * (groups + 1 - len(cuts))
    of_groups = [[a, b] for a, b in pairwise(cuts)]
    of_others = [[cuts[-1]] * 2] * (num_ctas - groups * blocks)
    found = cuts_on_device(lengths, queries, blocks, most_slots, num_ctas)
    assert found == of_groups * blocks + of_others
