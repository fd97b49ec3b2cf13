"""The Hopper decode by stream-K on ptxemu: cuts; results within the contract, bit-equal."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.decode_cuts import cut_line, divide
from flashdsa.backends.sm90.sparse_mla import bind_decode
from flashdsa.backends.sm90.sparse_mla_ways import StreamK
from flashdsa.dsl.memory import Memory
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.decode.few_heads.stream_k.plan import StreamKFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.stream_k.plan import StreamKPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import CUT_WORDS, STREAM_K_WORDS
from flashdsa.kernels.attention.sm90.decode.shared.stream_k import Batch
from flashdsa.kernels.attention.sm90.decode.shared.stream_k import divide as divide_on_device
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.cutedsl import emulate

PACKED, BF16, FEW = StreamKPlan(packed=True), StreamKPlan(), StreamKFewHeadsPlan()


OF_TWO_SOURCES = StreamKPlan(packed=True, joined=True, form=ROW_FORMATS["v4"], tile=WITHOUT_ROPE)


A_WAVE_AND_ONE = SparseMlaCase(
    "five items", 5, 700, 64, 274, packed="ue8m0", invalid=True, attn_sink="finite"
)
"""Five tiles each, the last of 18 slots: on four SMs two of the items are cut, one after a tile."""


class Launcher:
    """Launches of a plan on one emulator, whose workspace all of them use."""

    def __init__(self, plan: StreamK, policy: Policy | None = None) -> None:
        self.plan = plan
        self.emulator = Emulator(SMALL, policy=policy, on_finding="collect")

    def then(self, policy: Policy) -> Launcher:
        """Launches of another order of work that follow those here, in their workspace."""
        other = Launcher(self.plan, policy)
        other.emulator.workspaces = self.emulator.workspaces
        return other

    def __call__(self, case: SparseMlaCase, lengths: list[int] | None = None) -> tuple[Tensor, ...]:
        """O and lse, judged; nothing may be found."""
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        if lengths is not None:
            inputs = replace(inputs, topk_length=torch.tensor(lengths, dtype=torch.int32))
        q, rows, indices = inputs.q, inputs.kv.flatten(0, -2), inputs.indices.flatten(1)
        operands = SparseMlaOperands(q, rows, indices, inputs.topk_length, inputs.attn_sink)
        scale = case.d_qk**-0.5 if case.sm_scale is None else case.sm_scale
        out, lse = self.launch(operands, scale)
        assert failures(judge_forward(inputs, out, lse, backend="emulate-sm90")) == []
        return out, lse

    def launch(self, operands: SparseMlaOperands, scale: float) -> tuple[Tensor, Tensor]:
        """O and lse; nothing may be found."""
        emulator, q = self.emulator, operands.q
        out = emulator.empty(*q.shape[:2], 512, dtype=torch.bfloat16)
        lse = emulator.empty(*q.shape[:2], dtype=torch.float32)
        with emulator.launching():
            write = bind_decode(emulator, self.plan, 1, operands, scale)
            write(operands.into(*operands[:3], out, lse, None, *operands[3:]))
        assert [str(finding) for finding in emulator.findings] == []
        (counters, _) = emulator.workspaces[-self.plan.slot_words]
        assert counters.count_nonzero() == 0
        return out, lse


def parts_of(tiles: list[int], blocks: int = 1) -> list[int]:
    """Parts of each item on the small device."""
    shares = [stretch for of_cta in divide(tiles, SMALL.num_sms // blocks) for stretch in of_cta]
    return [sum(stretch.item == item for stretch in shares) for item in range(len(tiles))]


def test_cut_items_are_merged_and_calls_are_bit_equal() -> None:
    """Calls that follow each other have one workspace, as those of a stream or a graph."""
    assert parts_of([5] * 5).count(2) == 2
    late = Launcher(PACKED, Policy(asynchronous="late"))
    eager = late.then(Policy(asynchronous="eager", seed=3))
    assert all(map(torch.equal, late(A_WAVE_AND_ONE), eager(A_WAVE_AND_ONE)))
    assert len(eager.emulator.workspaces) == 1


def test_lengths_may_be_zero_and_very_unequal() -> None:
    """Two blocks of heads, side by side, of which the second has six; any scales."""
    case = SparseMlaCase("lengths", 4, 900, 70, 900, packed="fp32", topk_length=True, invalid=True)
    assert max(parts_of([0, 12, 0, 1], 2)) >= 2
    Launcher(PACKED)(case, [0, 768, 0, 30])


FEW_HEADS = SparseMlaCase(
    "few heads", 5, 900, 13, 340, packed="fp32", attn_sink="infinite", invalid=True,
    topk_length=True,
)  # fmt: skip
FEW_LENGTHS = [250, 310, 310, 30, 0]
"""Rings go round from stretch to stretch; parts have no key, too."""


def test_few_heads_by_stream_k_and_calls_are_bit_equal() -> None:
    assert parts_of([4, 5, 5, 1, 0]) == [1, 2, 2, 1, 1]
    late = Launcher(FEW, Policy(asynchronous="late"))
    eager = late.then(Policy(asynchronous="eager", seed=3))
    assert all(map(torch.equal, late(FEW_HEADS, FEW_LENGTHS), eager(FEW_HEADS, FEW_LENGTHS)))
    assert len(eager.emulator.workspaces) == 1


def test_few_heads_have_items_alone_and_items_of_four_ctas() -> None:
    case = SparseMlaCase("one long", 3, 800, 16, 800, packed="ue8m0", topk_length=True)
    Launcher(FEW)(case, [-5, 800, 1])
    Launcher(FEW)(case, [0, 0, 0])


def test_an_item_may_have_a_part_in_every_cta() -> None:
    case = SparseMlaCase("one long", 3, 800, 40, 800, packed="ue8m0", topk_length=True)
    assert parts_of([0, 13, 1]) == [1, 4, 1]
    Launcher(PACKED)(case, [-5, 800, 1])


def test_nothing_but_empty_queries() -> None:
    """One CTA takes a line that is short."""
    case = SparseMlaCase("empty", 3, 50, 64, 100, packed="ue8m0", topk_length=True)
    Launcher(PACKED)(case, [0, 0, 0])


PLAN = StreamKPlan()


@cute.kernel
def cuts_kernel(
    lengths: cute.Tensor, cuts: cute.Tensor, queries: Int32, blocks: Int32, most_slots: Int32
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(PLAN)
    divide_on_device(memory, Batch(queries, blocks, most_slots, lengths), thread)
    if thread == 0:
        words = memory.stream_k.array(Int32, STREAM_K_WORDS)
        for i in cutlass.range_constexpr(STREAM_K_WORDS):
            cuts[cta, i] = words[i]


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
    cuts = torch.full((num_ctas, STREAM_K_WORDS), -1, dtype=torch.int32)
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
