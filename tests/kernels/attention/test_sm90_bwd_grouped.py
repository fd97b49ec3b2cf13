"""Kernels of the Hopper backward with a workspace on ptxemu: P and dS, dQ, dKV, every element."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.attention.choice import FIRST
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS, ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    MATRICES,
    P_MATRIX,
    ROW_BLOCKS,
    block_bytes,
    group_queries,
    matrix_offset,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, WITHOUT_ROPE, Tile
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ, MLA_BWD_SCORES
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.reference import valid_slots
from flashdsa.verify.judge_sparse_mla import forward_results
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import unexpected
from tests.support.compilations import ptx_of

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


CAPACITY = 192
NUM_KEYS = 90
NUM_CTAS = 2
COUNTS = (70, 0, 64, 1, 130)
FIRST_GROUP = 1
"""The launches begin behind the first group of COUNTS."""
NAN = float("nan")


class Inputs(NamedTuple):
    """Of a launch. P and dS: (row blocks of all groups, tiles, keys, rows), bf16."""

    ids: Tensor
    counts: Tensor
    present: Tensor
    p: Tensor
    ds: Tensor
    q: Tensor
    do: Tensor
    heads: int

    def workspace(self) -> Tensor:
        """The matrices of the groups from FIRST_GROUP on, as bytes; NaN where nothing is read."""
        first = FIRST_GROUP * ROW_BLOCKS
        blocks = (len(self.counts) - FIRST_GROUP) * ROW_BLOCKS
        tiles = CAPACITY // TILE_KEYS
        shape = blocks, block_bytes(Tile(), CAPACITY) // 2
        workspace = torch.full(shape, NAN, dtype=torch.bfloat16)
        matrices = workspace.view(-1, tiles, MATRICES, TILE_KEYS * ROWS)
        for group in range(FIRST_GROUP, len(self.counts)):
            used = -(-int(self.counts[group]) // TILE_KEYS)
            for block in range(group * ROW_BLOCKS, (group + 1) * ROW_BLOCKS):
                matrices[block - first, :used, P_MATRIX] = swizzled(self.p[block, :used])
                matrices[block - first, :used, DS_MATRIX] = swizzled(self.ds[block, :used])
        return workspace.view(torch.uint8)

    def rows(self, x: Tensor) -> Tensor:
        """Q or dO in float64 with zeros for the rows that no query with a key has."""
        padded = x.new_zeros(len(self.p) * ROWS, x.shape[1], dtype=torch.float64)
        padded[: len(x)] = x.double().nan_to_num(0.0)
        return padded.view(len(self.p), ROWS, -1)


def swizzled(matrices: Tensor) -> Tensor:
    """(..., keys, rows) as workspace.py says: 16-byte unit u of line k lies at u ^ (k % 8)."""
    lines = matrices.unflatten(-1, (8, 8))
    key, unit = torch.arange(TILE_KEYS)[:, None], torch.arange(8)
    return lines[..., key, unit ^ (key % 8), :].flatten(-3)


def make_inputs(heads: int, seed: int = 0, tile: Tile = Tile()) -> Inputs:
    """Lists with repetitions; every third query has no key, and NaN in its Q and dO."""
    generator = torch.Generator().manual_seed(seed)
    groups, blocks = len(COUNTS), len(COUNTS) * ROW_BLOCKS
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    ids = torch.randint(0, NUM_KEYS, (groups, CAPACITY), generator=generator, dtype=torch.int32)
    shape = (blocks, CAPACITY // TILE_KEYS, TILE_KEYS, ROWS)
    p = torch.rand(shape, generator=generator)
    ds = torch.randn(shape, generator=generator)
    queries = group_queries(heads)
    num_queries = groups * queries - 1  # the last group is not full
    q = torch.randn(num_queries * heads, tile.d_qk, generator=generator).bfloat16()
    do = torch.randn(num_queries * heads, 512, generator=generator).bfloat16()
    present = torch.zeros(groups, dtype=torch.int32)
    of_row = torch.arange(blocks * ROWS) // heads
    has_key = (of_row < num_queries) & (of_row % 3 != 1)
    for query in of_row[has_key].unique().tolist():
        present[query // queries] |= 1 << query % queries
    q[~has_key[: len(q)]] = NAN
    do[~has_key[: len(q)]] = NAN
    for x in (p, ds):
        by_group = x.view(groups, ROW_BLOCKS, -1, ROWS)
        for group, count in enumerate(COUNTS):
            by_group[group, :, count:] = 0.0
        x.mul_(has_key.view(blocks, 1, 1, ROWS))
    return Inputs(ids, counts, present, p.bfloat16(), ds.bfloat16(), q, do, heads)


def launch(spec: KernelSpec, inputs: Inputs, policy: Policy | None, *arguments: Any) -> None:
    """The plan, of the groups from FIRST_GROUP on; nothing is found."""
    tile = Tile(inputs.q.shape[1])
    plan = DqPlan(tile) if spec is MLA_BWD_DQ else DkvPlan(tile)
    emulator = Emulator(policy=policy, on_finding="collect")
    function = emulator.function(spec, plan)
    groups = (FIRST_GROUP, len(inputs.counts), torch.empty(0, dtype=torch.int32), 0)
    with emulator.launching():
        function(inputs.workspace(), inputs.ids, inputs.counts, *arguments, *groups, NUM_CTAS)
    assert unexpected(emulator.findings) == []
    others = [x for x in emulator.setups if x.block[0] != plan.threads]
    (setup,) = (x for x in emulator.setups if x.block[0] == plan.threads)
    # What mends dQ.
    assert len(others) == (spec is MLA_BWD_DQ) and setup.smem == plan.smem.total


def assert_near(got: Tensor, expected: Tensor, terms: Tensor, relative: float) -> None:
    """Every element, to its own rounding and to that of fp32 sums of these absolute terms."""
    off = (got.double() - expected).abs()
    assert (off <= relative * expected.abs() + 3e-6 * terms).all(), off.max()


def check_dq(heads: int, policy: Policy | None = None, tile: Tile = Tile()) -> None:
    inputs = make_inputs(heads, tile=tile)
    kv = torch.randn(NUM_KEYS, tile.d_qk, generator=torch.Generator().manual_seed(1)).bfloat16()
    kv[0] = NAN  # which no list names
    inputs.ids.clamp_(min=1)
    dq = torch.full_like(inputs.q, NAN)
    # Of queries whose own results are not finite nothing is mended.
    lse = torch.full((len(inputs.q),), NAN)
    indices, lengths = torch.zeros(len(lse) // heads, 1).int(), torch.zeros(0).int()
    q, do, lse, written = (x.unflatten(0, (-1, heads)) for x in (inputs.q, inputs.do, lse, dq))
    of_queries = q, kv, do, lse, indices, lengths, lse, written, heads, 1.0
    launch(MLA_BWD_DQ, inputs, policy, *of_queries)
    expected = torch.zeros(len(inputs.ds), ROWS, tile.d_qk, dtype=torch.float64)
    terms = torch.zeros_like(expected)
    for block in range(len(inputs.ds)):
        group = block // ROW_BLOCKS
        count = int(inputs.counts[group])
        keys = kv[inputs.ids[group, :count].long()].double()
        ds = inputs.ds[block].flatten(0, 1)[:count].double().T
        expected[block], terms[block] = ds @ keys, ds.abs() @ keys.abs()
    first = FIRST_GROUP * ROW_BLOCKS * ROWS
    rows = slice(first, len(dq))
    assert_near(dq[rows], expected.flatten(0, 1)[rows], terms.flatten(0, 1)[rows], 2**-8)
    assert dq[:first].isnan().all()


def check_dkv(heads: int, policy: Policy | None = None, tile: Tile = Tile()) -> None:
    inputs = make_inputs(heads, tile=tile)
    inputs.ids.clamp_(min=1)
    before = torch.randn(NUM_KEYS, tile.d_qk, generator=torch.Generator().manual_seed(2))
    dkv = before.clone()
    of_rows = (x.unflatten(0, (-1, heads)) for x in (inputs.q, inputs.do))
    launch(MLA_BWD_DKV, inputs, policy, inputs.present, *of_rows, dkv, heads)
    judge_dkv(inputs, before, dkv)


def judge_dkv(inputs: Inputs, before: Tensor, dkv: Tensor) -> None:
    """Every element of dKV, to which the groups from FIRST_GROUP on have been added."""
    expected, terms = before.double(), before.double().abs()
    q, do = inputs.rows(inputs.q), inputs.rows(inputs.do)
    for block in range(FIRST_GROUP * ROW_BLOCKS, len(inputs.p)):
        group = block // ROW_BLOCKS
        count = int(inputs.counts[group])
        ids = inputs.ids[group, :count].long()
        p, ds = (x[block].flatten(0, 1)[:count].double() for x in (inputs.p, inputs.ds))
        expected.index_add_(0, ids, ds @ q[block])
        expected[:, :512].index_add_(0, ids, p @ do[block])
        terms.index_add_(0, ids, ds.abs() @ q[block].abs())
        terms[:, :512].index_add_(0, ids, p @ do[block].abs())
    assert_near(dkv, expected, terms, 2**-23)
    named = {int(i) for g in range(FIRST_GROUP, 5) for i in inputs.ids[g, : COUNTS[g]]}
    others = [key for key in range(NUM_KEYS) if key not in named]
    assert others and torch.equal(dkv[others], before[others])


@pytest.mark.slow
def test_dkv_of_more_heads() -> None:
    check_dkv(128)


@pytest.mark.parametrize(
    "tile", [Tile(), pytest.param(WITHOUT_ROPE, marks=pytest.mark.slow)], ids=["576", "512"]
)
@pytest.mark.parametrize(("check", "heads"), [(check_dq, 64), (check_dkv, 16)])
def test_lists_of_every_length_whenever_asynchronous_work_happens(
    check: Any, heads: int, tile: Tile
) -> None:
    """Without what absent queries hold."""
    check(heads, Policy(asynchronous="late", seed=3), tile)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("check", [check_dq, check_dkv])
def test_other_heads_and_orders(check: Any, heads: int) -> None:
    for seed, when in enumerate(("late", "eager", "random")):
        check(heads, Policy(asynchronous=when, seed=seed))


@pytest.mark.parametrize(
    ("spec", "plan", "shapes"),
    [
        (MLA_BWD_DQ, DqPlan(), {"m64n192": 8}),
        pytest.param(
            *(MLA_BWD_DQ, DqPlan(WITHOUT_ROPE), {"m64n192": 8, "m64n128": 8}),
            marks=pytest.mark.slow,
        ),
        # Twice, of a slice with 192 latent dims and of the one with 128; four steps a matrix.
        (MLA_BWD_DKV, DkvPlan(), {"m64n192": 48, "m64n128": 16}),
        pytest.param(
            *(MLA_BWD_DKV, DkvPlan(WITHOUT_ROPE), {"m64n192": 32, "m64n128": 32}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_products_are_those_of_the_design(
    spec: KernelSpec, plan: Any, shapes: dict[str, int]
) -> None:
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)k16", ptx_of(spec, plan))
    assert {shape: found.count(shape) for shape in found} == shapes
