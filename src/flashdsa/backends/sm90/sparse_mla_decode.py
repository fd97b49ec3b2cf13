"""Sparse decode on Hopper GPUs: few queries, or packed kv rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cluster_limit import allowed_clusters
from flashdsa.backends.packed_rows import form_of, is_packed
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.decode_cuts import Times, time_of_dealt, time_of_waves
from flashdsa.backends.sparse_mla_launches import Inputs, Write
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import COLUMNS, FewHeadsPlan
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
    SPARSE_MLA_DECODE_FEW_HEADS,
)
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.row_formats import V32, RowFormat

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands


INT32_MAX = (1 << 31) - 1
MOST_WAVES = 32
"""Waves of items, a CTA each, beyond which dealing saves little."""
MOST_OF_WAVES = 0.94
"""Dealt tiles take less than this of the time by clusters, or clusters are taken: whole waves of
them, of which the formula sees no overlap."""
MOST_FORWARD_WAVES = 4
MOST_OF_TURNS = 0.95
"""Likewise of the forward's time, for bf16 rows up to so many waves."""
WAVE_TIMES = {True: Times(9.4, 2.53), False: Times(9.4, 1.9)}
"""Times of 64 heads by clusters, of packed rows and of bf16 rows."""
DEALT_TIMES = {
    True: Times(9.4, 2.7, item=6.0, part=1.0),
    False: Times(9.4, 2.0, item=14.0, merge=6.0, part=1.0),
}
"""Times of dealt tiles: within 6 % of 13 packed calls of 40 to 512 items, 9 % of 5 in bf16."""
FORWARD_TIMES = Times(4.5, 2.1)
"""Times of an item of the forward."""


def serves(operands: SparseMlaOperands, num_sms: int) -> bool:
    """Whether the decode takes the call: packed rows, or no more items than SMs."""
    return is_packed(operands.kv) or items_of(operands.q) <= num_sms


def items_of(q: Tensor) -> int:
    """Items, each 64 heads of a query."""
    return q.shape[0] * -(-q.shape[1] // ROWS)


def cluster_size_for(capacity: Mapping[int, int], items: int, topk: int) -> int:
    """CTAs of an item: all clusters run at once and each CTA has the fewest tiles; the smallest
    such number. One if the items are more than the SMs."""
    tiles = tiles_of(topk)
    fitting = [size for size in CLUSTER_SIZES if capacity.get(size, 0) >= items] or [1]
    return min(fitting, key=lambda size: (-(-tiles // size), size))


def choose_kernel(
    runner: Runner, operands: SparseMlaOperands, sm_scale: float, kv_format: str | None
) -> Write:
    """Bind the kernel that serves a query and a kv row at least, without max_logits."""
    queries, num_heads = operands.q.shape[:2]
    packed, topk = is_packed(operands.kv), operands.indices.shape[1]
    tile, form = Tile(operands.q.shape[2]), form_of(operands.kv, kv_format) or V32
    plan, cluster_size = choose(runner, packed, queries, num_heads, topk, tile, form)
    return bind_plan(runner, plan, cluster_size, operands, sm_scale)


def bind_plan(
    runner: Runner,
    plan: DecodePlan | FewHeadsPlan,
    cluster_size: int,
    operands: SparseMlaOperands,
    sm_scale: float,
) -> Write:
    """Bind the one launch of a plan's kernel.

    Args:
        cluster_size: CTAs of an item; of dealt tiles any.
    """
    function = runner.function(spec_of(plan), plan)
    inputs = Inputs(runner, operands, sm_scale, plan.form if plan.paged else None)
    if isinstance(plan, DealtPlan):
        return _bind_dealt(runner, plan, function, inputs)
    return lambda operands: function(*inputs(operands), cluster_size)


def _bind_dealt(
    runner: Runner, plan: DealtPlan, function: Callable[..., Any], inputs: Inputs
) -> Write:
    """Bind the launch of dealt tiles: a CTA an SM, each with its slots of a workspace."""
    num_sms = runner.num_sms

    def allocate(runner: Runner) -> tuple[Tensor]:
        return (runner.empty(CTA_SLOTS * num_sms, plan.slot_words, dtype=torch.int32),)

    # Keys of the indexer's workspaces are positive.
    workspace = partial(runner.workspace, -plan.slot_words, allocate, num_sms)
    return lambda operands: function(*inputs(operands), *workspace(), num_sms)


def choose(
    runner: Runner,
    packed: bool,
    queries: int,
    num_heads: int,
    topk: int,
    tile: Tile = Tile(),
    form: RowFormat = V32,
) -> tuple[DecodePlan | FewHeadsPlan, int]:
    """The kernel, and CTAs of an item, one where tiles are dealt.

    Packed rows of 656 bytes take the kernel of few heads if heads are few; or if so many of its
    CTAs run at once that none has more steps than with all 64 heads in each, as its steps are
    shorter.
    """
    many = DecodePlan(packed=packed, form=form, tile=tile)
    sizes = _capacity(runner, many)
    many_items = queries * many.items(num_heads)
    many_size = cluster_size_for(sizes, many_items, topk)
    if packed and form == V32:
        few = FewHeadsPlan(next((c for c in COLUMNS if c >= num_heads), COLUMNS[-1]))
        of_few = _capacity(runner, few)
        few_items = queries * few.items(num_heads)
        few_size = cluster_size_for(of_few, few_items, topk)
        at_once = few_items <= of_few.get(few_size, 0) and few_size >= many_size
        if num_heads <= COLUMNS[-1] or at_once:
            return few, few_size
    tiles = tiles_of(topk)
    waves = -(-many_items // sizes[many_size])
    by_clusters = time_of_waves(WAVE_TIMES[packed], -(-tiles // many_size), waves)
    if time_of_dealing(runner.num_sms, packed, many_items, tiles) < MOST_OF_WAVES * by_clusters:
        return DealtPlan(packed=packed, form=form, tile=tile), 1
    return many, many_size


def time_of_dealing(num_sms: int, packed: bool, items: int, tiles: int) -> float:
    """Time of items of 64 heads whose tiles are dealt out among all SMs, by their most tiles."""
    line = items * (tiles + OVERHEAD_TILES)
    if items > MOST_WAVES * num_sms or line * num_sms > INT32_MAX:
        return math.inf
    return time_of_dealt(DEALT_TIMES[packed], items, tiles, num_sms)


def tiles_of(topk: int) -> int:
    """Tiles of a query without a length."""
    return -(-topk // Tile().keys)


def beats_the_forward(runner: Runner, queries: int, num_heads: int, topk: int) -> bool:
    """Whether dealt bf16 rows of more items than SMs take less time than the forward's, a CTA an
    item, by 5 %; up to four waves."""
    items = queries * -(-num_heads // ROWS)
    if items > MOST_FORWARD_WAVES * runner.num_sms:
        return False
    tiles = tiles_of(topk)
    by_turns = time_of_waves(FORWARD_TIMES, tiles, -(-items // runner.num_sms))
    return time_of_dealing(runner.num_sms, False, items, tiles) < MOST_OF_TURNS * by_turns


def _capacity(runner: Runner, plan: DecodePlan | FewHeadsPlan) -> Mapping[int, int]:
    """Clusters that run at once on a device without other work, by number of CTAs.

    A cluster of 16 is the quickest for a query alone (20 us, with 8 CTAs 26), but begins only when
    16 SMs of one GPC are free: while another stream holds 32 SMs it waits for them.
    """
    return allowed_clusters(runner.cluster_capacity(plan.threads, plan.smem_bytes), MOST_CTAS)


def spec_of(plan: DecodePlan | FewHeadsPlan) -> KernelSpec:
    """The catalog's row of a plan's kernel."""
    if isinstance(plan, DealtPlan):
        return SPARSE_MLA_DECODE_DEALT
    return SPARSE_MLA_DECODE if isinstance(plan, DecodePlan) else SPARSE_MLA_DECODE_FEW_HEADS
