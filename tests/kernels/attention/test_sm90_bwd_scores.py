"""P and dS of the Hopper backward in the workspace, over the test's own lists, on ptxemu."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.attention.choice import FIRST
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS, ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    P_MATRIX,
    block_bytes,
    matrix_offset,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, WITHOUT_ROPE, Tile
from flashdsa.kernels.catalog import MLA_BWD_SCORES
from flashdsa.reference import valid_slots
from flashdsa.verify.judge_sparse_mla import forward_results
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from tests.kernels.assembled import assert_it_assembles_without_spills

TILE = Tile()
TILE_KEYS = TILE.keys
CAPACITY_BEYOND = 64
"""Of the lists, more than the slots need: it is an argument."""


class Written:
    """The workspace of a case by a plan, as the other kernels read it."""

    def __init__(self, case: SparseMlaCase, queries: int) -> None:
        self.inputs = make_sparse_mla_inputs(case, 0, "cpu")
        self.O, self.lse = forward_results(self.inputs)
        self.queries, heads = queries, case.num_heads
        self.groups = -(-case.num_queries // queries)
        self.row_blocks = queries * heads // ROWS
        capacity = -(-queries * case.topk // TILE_KEYS) * TILE_KEYS + CAPACITY_BEYOND
        emulator = Emulator(on_finding="collect")
        self.rows = emulator.empty(self.groups, capacity, dtype=torch.int32)
        self.members = emulator.empty(self.groups, capacity, dtype=torch.uint8)
        self.counts = torch.zeros(self.groups, dtype=torch.int32)
        self.make_lists()
        blocks = self.groups * self.row_blocks
        self.workspace = emulator.empty(blocks, block_bytes(TILE, capacity), dtype=torch.uint8)
        delta = (self.inputs.do.float() * self.O.float()).sum(-1)
        function = emulator.function(MLA_BWD_SCORES, ScoresPlan(Tile(case.d_qk)))
        with emulator.launching():
            function(
                self.inputs.q, self.inputs.kv, self.inputs.do, self.lse, delta,
                *(self.rows, self.members, self.counts, self.counts, self.counts), self.workspace,
                queries, heads, case.d_qk**-0.5, min(blocks // ITEM_BLOCKS, 2),
                torch.tensor([FIRST], dtype=torch.int32),
            )  # fmt: skip
        assert [str(finding) for finding in emulator.findings] == []

    def make_lists(self) -> None:
        """A group's list names each row as often as the query that names it most often."""
        x, queries = self.inputs, self.queries
        named = [*valid_slots(x.indices, x.kv.shape[0], x.topk_length)]
        for group in range(self.groups):
            found: dict[tuple[int, int], int] = {}
            for query, slots in enumerate(named[group * queries : (group + 1) * queries]):
                times: Counter[int] = Counter()
                for row in slots.tolist():
                    times[row] += 1
                    again = times[row], row
                    found[again] = found.get(again, 0) | 1 << query
            count = self.counts[group] = len(found)
            rest = -len(found) % TILE_KEYS
            rows = [row for _, row in sorted(found)]
            bits = [found[again] for again in sorted(found)]
            self.rows[group, : count + rest] = torch.tensor(rows + rows[:1] * rest)
            self.members[group, : count + rest] = torch.tensor(bits + [0] * rest).to(
                self.members.dtype
            )

    def matrix(self, block: int, tile: int, matrix: int) -> Tensor:
        """(rows, keys) of a matrix, fp32."""
        first = matrix_offset(TILE, block, tile, self.workspace.shape[1], matrix)
        words = self.workspace.flatten()[first : first + TILE.p_bytes].view(torch.bfloat16)
        units = words.view(TILE_KEYS, ROWS // 8, 8)
        key = torch.arange(TILE_KEYS)[:, None]
        swizzled = torch.arange(ROWS // 8)[None] ^ (key & 7)
        return units[key, swizzled].flatten(1).float().T


def check_matrices(written: Written, inputs: SparseMlaInputs) -> None:
    """P and dS against float64; exact zeros where a query does not name a key."""
    heads, scale = inputs.q.shape[1], inputs.q.shape[2] ** -0.5
    q, kv, do, O = (x.double().flatten(0, -2) for x in (inputs.q, inputs.kv, inputs.do, written.O))
    for block in range(written.groups * written.row_blocks):
        group = block // written.row_blocks
        for tile in range(-(-int(written.counts[group]) // TILE_KEYS)):
            part = slice(tile * TILE_KEYS, (tile + 1) * TILE_KEYS)
            keys = kv[written.rows[group, part].long()]
            members = written.members[group, part].to(torch.int64)
            p, ds = (written.matrix(block, tile, which) for which in (P_MATRIX, DS_MATRIX))
            for row in range(ROWS):
                at = block * ROWS + row
                query = at // heads
                mine = (members >> (query - group * written.queries)) & 1 == 1
                assert not p[row, ~mine].any() and not ds[row, ~mine].any()
                if mine.any():
                    theirs = keys[mine]
                    exact = (theirs @ q[at] * scale - written.lse.flatten()[at]).exp()
                    dp = theirs[:, :512] @ do[at]
                    torch.testing.assert_close(p[row, mine].double(), exact, rtol=5e-3, atol=1e-6)
                    difference = dp - do[at] @ O[at]
                    size = exact * (dp.abs() + (do[at] * O[at]).abs().sum()) * scale
                    wrong = (ds[row, mine] - exact * difference * scale).abs()
                    assert (wrong <= 5e-3 * (exact * difference * scale).abs() + 1e-4 * size).all()


CASES = [
    # name, S, S_kv, H, topk
    (SparseMlaCase("two queries of 128", 3, 150, 128, 70, empty_rows=True, poison=True), 2),
    *(
        pytest.param(case, queries, marks=pytest.mark.slow)
        for case, queries in (
            (SparseMlaCase("512 columns", 2, 150, 128, 70, d_qk=512, invalid=True, poison=True), 2),
            (SparseMlaCase("a tile and a bit", 2, 150, 128, 70, invalid=True, poison=True), 1),
            (SparseMlaCase("four of 32", 5, 90, 32, 40, duplicates=True, topk_length=True), 4),
            (SparseMlaCase("eight queries of 16", 9, 60, 16, 20, invalid=True, poison=True), 8),
        )
    ),
]


@pytest.mark.parametrize(("case", "queries"), CASES, ids=lambda one: getattr(one, "name", one))
def test_p_and_ds_of_every_tile(case: SparseMlaCase, queries: int) -> None:
    written = Written(case, queries)
    check_matrices(written, written.inputs)


@pytest.mark.parametrize(
    "tile", [Tile(), pytest.param(WITHOUT_ROPE, marks=pytest.mark.slow)], ids=["576", "512"]
)
def test_the_newest_assembler_takes_it_and_nothing_is_spilled(tile: Tile) -> None:
    """Nor does it make a wgmma wait for the one before, which it says as a warning."""
    assert_it_assembles_without_spills(MLA_BWD_SCORES, ScoresPlan(tile))
