"""Sparse decode on Hopper GPUs: few queries, or packed kv rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cluster_limit import allowed_clusters
from flashdsa.backends.packed_rows import form_of, is_packed
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.decode_cuts import Times, time_of_dealt, time_of_waves
from flashdsa.backends.sm90.used_slots import INT32_MAX, with_used_slots
from flashdsa.backends.sparse_mla_launches import Inputs, Write, is_joined, slots_of
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import DealtFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CLUSTER_SIZES,
    CTA_SLOTS,
    MOST_CTAS,
    OVERHEAD_TILES,
)
from flashdsa.kernels.catalog import (
    SPARSE_MLA_DECODE,
    SPARSE_MLA_DECODE_DEALT,
    SPARSE_MLA_DECODE_DEALT_FEW_HEADS,
    SPARSE_MLA_DECODE_FEW_HEADS,
)
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.row_formats import V32

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands


Plan = DecodePlan | FewHeadsPlan
"""Plans of dealt tiles are among them."""
Dealt = DealtPlan | DealtFewHeadsPlan
_SPECS: Mapping[type[Plan], KernelSpec] = {
    DecodePlan: SPARSE_MLA_DECODE,
    DealtPlan: SPARSE_MLA_DECODE_DEALT,
    FewHeadsPlan: SPARSE_MLA_DECODE_FEW_HEADS,
    DealtFewHeadsPlan: SPARSE_MLA_DECODE_DEALT_FEW_HEADS,
}
MOST_WAVES, MOST_WAVES_OF_FEW = 32, 20
"""Waves of items, a CTA each, beyond which dealing saves little; of 16 heads it then costs 1.2."""
MOST_OF_WAVES, MOST_OF_VARIED = 0.97, 1.05
"""Packed rows: tiles are dealt if that takes less than this of the time of whole items, which need
less code. 1.05 if lists have lengths: only dealt kernels share out the tiles that there are."""
LEAST_VARIED_TILES, LONG_TILES = 5, 10
"""If lists have lengths, tiles are dealt from 5 tiles on, and MOST_OF_VARIED holds from 10 on."""
INVARIANT_CTAS = 4
"""CTAs of an item whose bits must not depend on others: 512 of 2,048 slots each, as large batches
have them."""
MOST_OF_FORWARD, MOST_OF_FORWARD_FAR, DEALT_CODE_US = 0.92, 0.8, 6.0
"""Dealt tiles of bf16 rows and more items than SMs take less than this of the forward's time, or it
is taken, which packs lists; less than the second number where queries share far rows. Dealt tiles
have 57 KB more code, for which a cold call waits so long."""
MOST_NEAR_ROWS, MOST_DEALT_TURNS = 65_536, 6.5
"""Most rows of kv that count as near, some 75 MB, and most such items whose tiles are dealt, as a
multiple of the SMs. Dealt neighbours, which may share rows, run at different times; the forward's
run together and find them in the second-level cache."""
PACKED, BF16, SIXTEEN = range(3)
"""Items of 64 heads of packed and of bf16 rows, and of 16 heads."""
WAVE_TIMES = {
    PACKED: Times(9.4, 2.53, item=9.4),
    BF16: Times(9.4, 1.9, item=9.4),
    SIXTEEN: Times(6.4, 1.41, item=5.5),
}
"""Times by clusters; those of 16 heads are within 10 % of 134 calls of 32, 64 and 128."""
ALONE_US = 1.9
"""Time by which a CTA of 64 heads that has an item alone ends it earlier."""
DEALT_TIMES = {
    PACKED: Times(9.3, 2.55, item=4.5, merge=3.4, part=2.9),
    BF16: Times(7.6, 1.67, item=3.0, merge=4.4, part=0.7),
    SIXTEEN: Times(6.0, 1.43, item=3.8, merge=4.4, part=1.3),
}
"""Times of dealt tiles, of packed rows as the choice needs them: it takes 1.006 of the fastest
kernel's time in the mean of 350 calls, hot and cold. Of bf16 rows within 10 % of 90 calls."""


def serves(operands: SparseMlaOperands, num_sms: int) -> bool:
    """Whether the decode takes the call: packed rows, or no more items than SMs."""
    return is_packed(operands.kv) or items_of(*operands.q.shape[:2]) <= num_sms


def items_of(num_queries: int, num_heads: int) -> int:
    """Items, each 64 heads of a query."""
    return num_queries * -(-num_heads // ROWS)


def cluster_size_for(
    capacity: Mapping[int, int], items: int, topk: int, *, alone_up_to: int = 0
) -> int:
    """CTAs of an item: all clusters run at once and each CTA has the fewest tiles; the smallest
    such number. One if the items are more than the SMs.

    Args:
        alone_up_to: number of tiles that one CTA takes sooner than several.
    """
    tiles = tiles_of(topk)
    if tiles <= alone_up_to:
        return 1
    fitting = [size for size in CLUSTER_SIZES if capacity.get(size, 0) >= items] or [1]
    return min(fitting, key=lambda size: (-(-tiles // size), size))


def bind(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    index_block: int,
    kv_format: str | None,
) -> Write:
    """Bind the kernel that serves a query and a kv row at least, without max_logits; two sources
    are both bf16, or packed."""
    plan = plan_of(operands, index_block, kv_format)
    queries, num_heads = operands.q.shape[:2]
    tiles = tiles_of_lists(slots_of(operands, index_block))
    chosen, size = choose(runner, plan, queries, num_heads, tiles, varied=lists_vary(operands))
    return bind_plan(runner, chosen, size, operands, sm_scale, index_block)


def plan_of(operands: SparseMlaOperands, index_block: int, kv_format: str | None) -> DecodePlan:
    """The kernel of whole items of 64 heads."""
    form, extra = form_of(operands.kv, kv_format), ""
    if operands.extra_kv is not None:
        of_extra = form_of(operands.extra_kv, kv_format)
        extra = of_extra.name if of_extra and of_extra != form else ""
    joined, tile = is_joined(operands, index_block), Tile(operands.q.shape[2])
    return DecodePlan(form is not None, joined, form or V32, extra, tile=tile)


def bind_invariant(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    index_block: int,
    kv_format: str | None,
) -> Write:
    """Bind the kernel for packed rows by which a query's bits do not depend on the others: one
    kernel for each number of heads, clusters of one size, and shares of the slots up to the last
    that names a row."""
    plan: Plan = plan_of(operands, index_block, kv_format)
    few = operands.q.shape[1] <= HEADS and not plan.joined
    if few and FewHeadsPlan.takes(plan.form, joined=False):
        plan = FewHeadsPlan(plan.form)
    size = max(size for size in _capacity(runner, plan) if size <= INVARIANT_CTAS)
    write = bind_plan(runner, plan, size, operands, sm_scale, index_block)
    return with_used_slots(runner, write, operands, index_block)


def bind_plan(
    runner: Runner,
    plan: Plan,
    cluster_size: int,
    operands: SparseMlaOperands,
    sm_scale: float,
    index_block: int = 1,
) -> Write:
    """Bind the one launch of a plan's kernel.

    Args:
        cluster_size: CTAs of an item, of dealt tiles any; one takes the plan of a CTA alone.
    """
    if type(plan) is DecodePlan:
        plan = replace(plan, alone=cluster_size == 1)
    function = runner.function(spec_of(plan), plan)
    pages = plan.form if plan.paged else None
    inputs = Inputs(runner, operands, sm_scale, index_block, pages)
    given = inputs.joined if plan.joined else inputs
    if isinstance(plan, Dealt):
        return _bind_dealt(runner, plan, function, given)
    return lambda operands: function(*given(operands), cluster_size)


def _bind_dealt(
    runner: Runner,
    plan: Dealt,
    function: Callable[..., Any],
    inputs: Callable[..., tuple[Any, ...]],
) -> Write:
    """Bind the launch of dealt tiles: a CTA an SM, each with its slots of a workspace."""
    num_sms = runner.num_sms

    def allocate(runner: Runner) -> tuple[Tensor]:
        return (runner.empty(CTA_SLOTS * num_sms, plan.slot_words, dtype=torch.int32),)

    # Keys of the indexer's workspaces are positive.
    workspace = partial(runner.workspace, -plan.slot_words, allocate, num_sms)
    return lambda operands: function(*inputs(operands), *workspace(), num_sms)


def lists_vary(operands: SparseMlaOperands) -> bool:
    """Whether lists may differ in length."""
    lengths = operands.topk_length, operands.ends, operands.extra_topk_length, operands.extra_ends
    return any(one is not None for one in lengths)


def choose(
    runner: Runner, plan: DecodePlan, queries: int, num_heads: int, tiles: int, *, varied: bool
) -> tuple[Plan, int]:
    """The kernel that takes the least time, and CTAs of an item, one where tiles are dealt.

    Args:
        plan: of whole items of 64 heads; bf16 rows have no more items than SMs.
        tiles: of a query, at most. varied: result of `lists_vary`.
    """
    chosen, size = choose_clusters(runner, plan, queries, num_heads, tiles)
    dealt = dealt_plan(plan, num_heads)
    if dealt is None or (varied and tiles < LEAST_VARIED_TILES):
        return chosen, size
    waves = waves_of(runner, chosen, size, queries * chosen.items(num_heads))
    most = MOST_OF_VARIED if varied and tiles >= LONG_TILES else MOST_OF_WAVES
    items = dealt.items(num_heads)
    by_dealing = time_of_dealing(kind_of(dealt), runner.num_sms, queries, items, tiles)
    if by_dealing < most * time_of_clusters(chosen, size, tiles, waves):
        return dealt, 1
    return chosen, size


def dealt_plan(plan: DecodePlan, num_heads: int) -> Dealt | None:
    """The kernel of dealt tiles for packed rows; None: there is none.

    Args:
        plan: of whole items of 64 heads.
    """
    if not plan.packed or plan.mixed or (plan.joined and plan.tile.has_rope):
        return None
    if num_heads <= HEADS and FewHeadsPlan.takes(plan.form, plan.joined):
        return DealtFewHeadsPlan(plan.form, plan.joined)
    return DealtPlan(packed=True, joined=plan.joined, form=plan.form, tile=plan.tile)


def kind_of(plan: Plan) -> int:
    """The kind of a plan's items."""
    if isinstance(plan, FewHeadsPlan):
        return SIXTEEN
    return PACKED if plan.packed else BF16


def time_of_clusters(plan: Plan, size: int, tiles: int, waves: int) -> float:
    """Time of items of so many tiles that clusters of `size` CTAs take in waves."""
    time = time_of_waves(WAVE_TIMES[kind_of(plan)], -(-tiles // size), waves)
    alone = size == 1 and isinstance(plan, DecodePlan)
    return time - ALONE_US * waves if alone else time


def waves_of(runner: Runner, plan: Plan, size: int, items: int) -> int:
    """Waves of items that clusters of `size` CTAs take."""
    return -(-items // _capacity(runner, plan)[size])


def choose_clusters(
    runner: Runner, many: DecodePlan, queries: int, num_heads: int, tiles: int
) -> tuple[DecodePlan | FewHeadsPlan, int]:
    """The kernel of whole items, and CTAs of an item: `many`, of 64 heads, or that of few.

    Packed rows of few scales take the kernel of few heads if heads are few, or if several items of
    a query take less time than one: their steps are shorter.

    Args:
        tiles: of a query.
    """
    many_items, slots = queries * many.items(num_heads), tiles * many.tile.keys
    many_size = cluster_size_for(
        _capacity(runner, many), many_items, slots, alone_up_to=many.alone_tiles
    )
    if not many.packed or many.mixed or not FewHeadsPlan.takes(many.form, many.joined):
        return many, many_size
    few = FewHeadsPlan(many.form, many.joined)
    few_items = queries * few.items(num_heads)
    few_size = cluster_size_for(_capacity(runner, few), few_items, slots)
    by_few = time_of_clusters(few, few_size, tiles, waves_of(runner, few, few_size, few_items))
    by_many = time_of_clusters(
        many, many_size, tiles, waves_of(runner, many, many_size, many_items)
    )
    return (few, few_size) if num_heads <= HEADS or by_few < by_many else (many, many_size)


def can_deal(num_sms: int, queries: int, tiles: int) -> bool:
    """Whether queries of so many tiles, at most, may be dealt out among all SMs: the kernel counts
    shares of them in int32, rounded up."""
    return queries * (tiles + OVERHEAD_TILES) * (num_sms + 1) <= INT32_MAX


def time_of_dealing(kind: int, num_sms: int, queries: int, blocks: int, tiles: int) -> float:
    """Time of queries of so many tiles that are dealt out among all SMs.

    Args:
        blocks: items of a query.
    """
    most = MOST_WAVES_OF_FEW if kind == SIXTEEN else MOST_WAVES
    too_many = blocks > num_sms or queries * blocks > most * num_sms
    if too_many or not can_deal(num_sms, queries, tiles):
        return math.inf
    return time_of_dealt(DEALT_TIMES[kind], queries, tiles, num_sms // blocks)


def tiles_of(topk: int) -> int:
    """Tiles of a query without a length."""
    return -(-topk // Tile().keys)


def tiles_of_lists(slots: tuple[int, int]) -> int:
    """Tiles of a query's lists, of `slots_of` or `likely_slots`."""
    return sum(map(tiles_of, slots))


class ManyItems(NamedTuple):
    """bf16 rows of more items than SMs; lists have no lengths, or fill them.

    Attributes:
        tiles: of a query's lists. most_tiles: if all ranges are as long as their sources.
        by_forward: microseconds that the forward takes.
    """

    num_queries: int
    num_heads: int
    num_keys: int
    tiles: int
    most_tiles: int
    by_forward: float

    @property
    def shares_far_rows(self) -> bool:
        """Whether the lists have more slots than there are rows, and these are not near."""
        return MOST_NEAR_ROWS < self.num_keys < self.num_queries * self.tiles * Tile().keys


def dealing_pays(num_sms: int, plan: DealtPlan, of: ManyItems) -> bool:
    """Whether dealt tiles take less time than the forward."""
    few = items_of(of.num_queries, of.num_heads) <= MOST_DEALT_TURNS * num_sms
    if plan.joined and plan.tile.has_rope:
        return False  # There is no such kernel.
    if not few or not can_deal(num_sms, of.num_queries, of.most_tiles):
        return False
    blocks = plan.items(of.num_heads)
    dealt = time_of_dealing(BF16, num_sms, of.num_queries, blocks, of.tiles)
    most = MOST_OF_FORWARD_FAR if of.shares_far_rows else MOST_OF_FORWARD
    return dealt + DEALT_CODE_US < most * of.by_forward


def _capacity(runner: Runner, plan: Plan) -> Mapping[int, int]:
    """Clusters that run at once on a device without other work, by number of CTAs.

    A cluster of 16 is the quickest for a query alone (20 us, with 8 CTAs 26), but begins only when
    16 SMs of one GPC are free: while another stream holds 32 SMs it waits for them.
    """
    return allowed_clusters(runner.cluster_capacity(plan.threads, plan.smem_bytes), MOST_CTAS)


def spec_of(plan: Plan) -> KernelSpec:
    """The catalog's row of a plan's kernel."""
    return _SPECS[type(plan)]
