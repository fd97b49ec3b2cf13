"""dQ and dKV of the Hopper backward from the test's own workspace, on ptxemu, every element."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    MATRICES,
    P_MATRIX,
    ROW_BLOCKS,
    block_bytes,
    group_queries,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, WITHOUT_ROPE, Tile
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ
from flashdsa.plan.kernel_spec import KernelSpec
from ptxemu import Policy
from tests.kernels.assembled import assert_it_assembles_without_spills, ptx_of
from tests.kernels.findings import unexpected

CAPACITY = 192
NUM_KEYS = 90
NUM_CTAS = 2
COUNTS = (70, 0, 64, 1, 130)
FIRST_GROUP = 1
"""The launches begin behind the first group of COUNTS."""
NAN = float("nan")
PRODUCTS = [
    pytest.param(
        spec, plan, id=plan.name, marks=pytest.mark.slow if plan.tile == WITHOUT_ROPE else ()
    )
    for spec in (MLA_BWD_DQ, MLA_BWD_DKV)
    for plan in spec.plans
]
TILE_KEYS = Tile().keys


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


@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_dkv_of_lists_of_every_length_without_what_absent_queries_hold(heads: int) -> None:
    check_dkv(heads)


@pytest.mark.parametrize(
    "tile", [Tile(), pytest.param(WITHOUT_ROPE, marks=pytest.mark.slow)], ids=["576", "512"]
)
@pytest.mark.parametrize("check", [check_dq, check_dkv])
def test_it_does_not_matter_when_asynchronous_work_happens(check: Any, tile: Tile) -> None:
    check(64, Policy(asynchronous="late", seed=3), tile)


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


@pytest.mark.parametrize(("spec", "plan"), PRODUCTS)
def test_the_newest_assembler_takes_it_and_nothing_is_spilled(spec: KernelSpec, plan: Any) -> None:
    """Nor does it make a wgmma wait for the one before, which it says as a warning."""
    assert_it_assembles_without_spills(spec, plan)
