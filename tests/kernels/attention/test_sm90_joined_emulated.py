"""Two sources, ranges and blocks in the Hopper forward and decode on ptxemu, without a finding.

They are judged as one source, the rows of both one after the other, by one list of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import compiled, emulation
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE, Tile
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE, SPARSE_MLA_FWD
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.verify.cases import SparseMlaCase
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import INT32_MAX, INT32_MIN, SparseMlaInputs
from ptxemu import Policy
from ptxemu.launch_setup import LaunchSetup
from tests.kernels.assembled import assert_it_assembles_without_spills

NONE = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Lists:
    """A source's rows, and each query's list: (S, n) ids, or starts and ends."""

    num_rows: int
    ids: Tensor
    lengths: Tensor = NONE
    ends: Tensor = NONE

    def arguments(self) -> dict[str, Any]:
        """Arguments of the public operation."""
        if len(self.ends):
            return {"indices": (self.ids[:, 0], self.ends)}
        return {"indices": self.ids, "topk_length": self.lengths if len(self.lengths) else None}

    def named(self, query: int, block: int) -> list[int]:
        """The row that each slot names, -1 where it is not valid; by the contract's words."""
        if len(self.ends):
            first, end = int(self.ids[query, 0]), int(self.ends[query])
            rows = list(range(max(first, 0), min(end, self.num_rows)))
        else:
            count = int(self.lengths[query]) if len(self.lengths) else self.ids.shape[1]
            ids = self.ids[query].tolist()[: max(count, 0)]
            rows = [one * block + i if one >= 0 else -1 for one in ids for i in range(block)]
        return [row if 0 <= row < self.num_rows else -1 for row in rows]


def int32(*rows: Any) -> Tensor:
    """A tensor of these numbers."""
    return torch.tensor(rows, dtype=torch.int32)


def draw_ids(num_rows: int, queries: int, width: int, *, seed: int, block: int = 1) -> Tensor:
    """Ids with repetitions; a third of them are invalid."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, num_rows // block, (queries, width), generator=draw)
    bad = torch.tensor([-1, -(-num_rows // block), INT32_MIN, INT32_MAX, num_rows + 7, -2])
    drawn = bad[torch.randint(len(bad), (queries, width), generator=draw)]
    return torch.where(torch.rand(queries, width, generator=draw) < 0.3, drawn, ids).int()


@dataclass(frozen=True)
class Call:
    """A call of three queries."""

    main: Lists
    extra: Lists
    block: int = 1
    heads: int = 64
    d_qk: int = 512

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, both sources, and sinks; rows that no valid slot names are not finite."""
        draw = torch.Generator().manual_seed(1)
        q = torch.randn(3, self.heads, self.d_qk, generator=draw)
        sources = []
        for lists, block in ((self.main, self.block), (self.extra, 1)):
            kv = torch.randn(lists.num_rows, self.d_qk, generator=draw)
            named = {row for query in range(3) for row in lists.named(query, block)}
            for row in set(range(lists.num_rows)) - named:
                kv[row] = (torch.nan, torch.inf, -torch.inf)[row % 3]
            sources.append(kv.bfloat16())
        return q.bfloat16(), *sources, torch.randn(self.heads, generator=draw) + 4.0  # type: ignore[return-value]

    def as_one(self, q: Tensor, kv: Tensor, extra: Tensor, sink: Tensor) -> SparseMlaInputs:
        """The call by one source and one list."""
        first = self.main.num_rows
        both = [
            self.main.named(query, self.block)
            + [row + first if row >= 0 else -1 for row in self.extra.named(query, 1)]
            for query in range(3)
        ]
        width = max(map(len, both))
        ids = int32(*(rows + [-1] * (width - len(rows)) for rows in both))
        rows = torch.cat([kv, extra])
        case = SparseMlaCase("joined", 3, len(rows), self.heads, width, self.d_qk, max_logits=True)
        return SparseMlaInputs(case, q, rows, ids, torch.empty(0), None, sink)


BLOCKS_AND_TAIL = Call(
    Lists(203, draw_ids(203, 3, 40, seed=0, block=4), int32(40, 33, -5)),
    Lists(203, int32([200], [190], [7]), ends=int32(203, 999, 7)),
    block=4,
)
"""GLM-5.3's: 160 and 132 slots, the last block of fewer rows than four; a tail of 3 and of 13 rows,
and one query without a valid slot."""
WINDOW_AND_IDS = Call(
    Lists(300, int32([-20], [150], [0]), ends=int32(70, 300, 0)),
    Lists(90, draw_ids(90, 3, 70, seed=2), int32(70, 0, 65)),
    heads=20,
    d_qk=576,
)
"""DeepSeek-V4's: 70 rows and 70 slots, 150 rows alone, and 65 slots alone, with repetitions."""
SMALL_SOURCES = replace(
    WINDOW_AND_IDS,
    main=Lists(0, draw_ids(20, 3, 64, seed=3)),
    extra=Lists(5, torch.tensor([[4, 4, 0, 5]] * 2 + [[-1] * 4], dtype=torch.int32)),
    d_qk=512,
)
"""One source without a row, one of fewer than a tile."""


IN_GROUPS = replace(
    BLOCKS_AND_TAIL,
    main=Lists(150, draw_ids(150, 3, 17, seed=4, block=4), int32(17, 17, 0)),
    extra=Lists(40, draw_ids(40, 3, 30, seed=5), int32(30, 0, 0)),
    heads=32,
)
"""A group of two queries, and one of a query without a valid slot; rows are named again."""


def run(
    call: Call, device: Device, policy: Policy, *, max_logits: bool, nan_row: int = -1
) -> list[LaunchSetup]:
    """The public operation on that device; its results are judged, and nothing may be found. Return
    its launches.

    Args:
        nan_row: a row of the second source that is not finite.
    """
    q, kv, extra, sink = call.tensors()
    if nan_row >= 0:
        extra[nan_row] = torch.nan
    given = {
        **call.main.arguments(),
        **{f"extra_{name}": value for name, value in call.extra.arguments().items()},
    }
    with emulation(device, policy=policy, on_finding="collect") as emulator:
        results = flashdsa.sparse_mla_fwd(
            q,
            kv,
            **given,
            extra_kv=extra,
            index_block=call.block,
            attn_sink=sink,
            return_max_logits=max_logits,
            backend="emulate-sm90",
        )
    judged = judge_forward(call.as_one(q, kv, extra, sink), *results, backend="emulate-sm90")
    assert failures(judged) == []
    assert [str(finding) for finding in emulator.findings] == []
    return emulator.setups


@pytest.mark.parametrize(
    ("call", "when"),
    [(BLOCKS_AND_TAIL, "late"), (WINDOW_AND_IDS, "eager"), (SMALL_SOURCES, "late")],
    ids=["blocks", "window", "small"],
)
def test_the_forward_joins_both_sources(call: Call, when: str) -> None:
    """One CTA takes all items, whose last steps have two tiles or one."""
    policy = Policy(asynchronous=when, seed=3)
    (setup,) = run(call, Device(1, {1: 1}), policy, max_logits=True)
    plan = FwdPlan(max_logits=True, joined=True, tile=Tile(call.d_qk))
    assert setup.grid[0] == 1 and setup.smem == plan.smem.total


def test_groups_of_few_heads_have_the_union_over_both_sources() -> None:
    """A row of the second source that query 0 alone names is not finite: query 1 is mended."""
    nan_row = max(IN_GROUPS.extra.named(0, 1))
    policy = Policy(asynchronous="late", seed=3)
    setups = run(IN_GROUPS, Device(1, {1: 1}), policy, max_logits=False, nan_row=nan_row)
    assert len(setups) == 4  # joint lists, unions, the forward, and what mends O


@pytest.mark.parametrize(
    ("call", "size", "when"),
    [(BLOCKS_AND_TAIL, 1, "late"), (WINDOW_AND_IDS, 2, "eager"), (SMALL_SOURCES, 3, "late")],
    ids=["blocks", "window", "small"],
)
def test_the_decode_joins_both_sources(call: Call, size: int, when: str) -> None:
    device = Device(3 * size, {1: 3 * size, size: 3})
    (setup,) = run(call, device, Policy(asynchronous=when, seed=3), max_logits=False)
    assert setup.grid[0] == 3 * size


def test_a_source_of_its_own_may_be_a_range_or_blocks_alone() -> None:
    """Without a second source: ids of blocks, and a range."""
    for main, block in ((BLOCKS_AND_TAIL.main, 4), (WINDOW_AND_IDS.main, 1)):
        call = Call(main, Lists(0, torch.empty(3, 0, dtype=torch.int32)), block, heads=8)
        q, kv, _, sink = call.tensors()
        with emulation(Device(3, {1: 3})):
            O, lse = flashdsa.sparse_mla_fwd(
                q, kv, **main.arguments(), index_block=block, backend="emulate-sm90"
            )
        inputs = replace(call.as_one(q, kv, kv[:0], sink), attn_sink=None)
        assert failures(judge_forward(inputs, O, lse, backend="emulate-sm90")) == []


@pytest.mark.parametrize("tile", [Tile(), WITHOUT_ROPE], ids=["576", "512"])
def test_the_newest_assembler_takes_it_and_spills_nothing(tmp_path: Path, tile: Tile) -> None:
    """Nor does it make a wgmma wait for the one before, though half a step is a branch."""
    plans: tuple[tuple[KernelSpec, Any], ...] = (
        (SPARSE_MLA_FWD, FwdPlan(max_logits=True, joined=True, tile=tile)),
        (SPARSE_MLA_DECODE, DecodePlan(joined=True, tile=tile)),
    )
    for spec, plan in plans:
        text = str(compiled(spec, plan).__ptx__).rstrip("\0")
        assert_it_assembles_without_spills(text, tmp_path)
