"""The forward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from flashdsa.backends import sparse_mla_launches
from flashdsa.backends.packed_rows import is_packed, num_rows
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import sparse_mla_decode
from flashdsa.backends.sm90.sparse_mla_decode import (
    ManyItems,
    dealing_pays,
    lists_vary,
    tiles_of_lists,
)
from flashdsa.backends.sm90.used_slots import INT32_MAX, lack_lengths, with_used_slots
from flashdsa.backends.sparse_mla_launches import (
    Form,
    Launches,
    Write,
    is_joined,
    likely_slots,
    queries_at_a_time,
    slots_of,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.fwd.plan import GROUPS, ITEM_US, STEP_US, UNION_BIT_US, FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands

LISTS_US = 10.0
"""Time of the kernels that groups have besides, without passing over bits."""


class Grouping(NamedTuple):
    """When groups of so many queries pay, by estimated times over that of queries one by one.

    Attributes:
        most_unlike: groups are taken if they take at most so much where queries name no row
            together.
        most_alike: else a sample chooses if they take less than so much where queries name the same
            rows,
        least_us: and queries one by one take longer than this.
    """

    most_unlike: float
    most_alike: float
    least_us: float


GROUPINGS = {2: Grouping(1.05, 0.65, 130), 4: Grouping(1.3, 0.5, 80), 8: Grouping(1.1, 0.5, 80)}
USED_SLOTS = 0.7
"""Share of the slots that count where lists have lengths, which the host does not know."""
LEAST_SAMPLED_US = 400
"""Estimated time of queries one by one from which on only a sample takes groups."""
LEAST_FOUND_US = 100
"""Estimated time from which on lists without lengths are looked through first, which takes some 2
us where they are full."""


def choose(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    max_logits: bool,
    index_block: int = 1,
    batch_invariant: bool = False,
    kv_format: str | None = None,
) -> Write:
    """Same as `sparse_mla_launches.Choose`: the decode, or the forward."""
    if batch_invariant:
        return choose_invariant(runner, operands, sm_scale, max_logits, index_block, kv_format)
    finds = finds_ends(operands, index_block, runner.num_sms)
    if finds and operands.ends is None:
        # The kernels get lengths, so they are chosen for lists that have some.
        operands = operands._replace(topk_length=operands.indices[:, 0])
    if not max_logits and sparse_mla_decode.serves(operands, runner.num_sms):
        write = sparse_mla_decode.bind(runner, operands, sm_scale, index_block, kv_format)
    else:
        write = choose_forward(runner, operands, sm_scale, max_logits, index_block, finds=finds)
    return with_used_slots(runner, write, operands, index_block) if finds else write


def finds_ends(operands: SparseMlaOperands, index_block: int, num_sms: int) -> bool:
    """Whether the device finds the ends of lists first: where they have no lengths, may end a step
    earlier, and full ones take so long that it does not count."""
    slots, heads = sum(likely_slots(operands, index_block)), operands.q.shape[1]
    if not lack_lengths(operands) or slots <= Tile().step_keys:
        return False
    return time_of_items(operands.q.shape[0], heads, slots, num_sms) >= LEAST_FOUND_US


def choose_forward(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    max_logits: bool,
    index_block: int,
    *,
    finds: bool,
) -> Write:
    """The forward, or dealt tiles of bf16 rows if they take less time.

    Groups of queries over two sources, ranges or blocks need lists with room for all slots, which
    ranges of long sources have not.

    Args:
        finds: result of `finds_ends`: most lists are full.
    """
    num_queries, num_heads, d_qk = operands.q.shape
    tile, joined, num_sms = Tile(d_qk), is_joined(operands, index_block), runner.num_sms
    most, likely = slots_of(operands, index_block), likely_slots(operands, index_block)
    num_keys, topk = num_rows(operands.kv, operands.extra_kv), sum(likely)
    varied = operands.topk_length is not None or operands.extra_topk_length is not None
    groups = groups_for(num_queries, num_heads, topk, num_keys, num_sms, varied=varied)
    if joined and (num_queries > queries_at_a_time(groups[0], sum(most)) or num_keys > INT32_MAX):
        groups = (1,)
    if groups == (1,) and not max_logits and (finds or not varied):
        tiles, most_tiles = map(tiles_of_lists, (likely, most))
        by_forward = time_of_items(num_queries, num_heads, topk, num_sms)
        of = ManyItems(num_queries, num_heads, num_keys, tiles, most_tiles, by_forward)
        dealt = DealtPlan(joined=joined, tile=tile)
        if dealing_pays(num_sms, dealt, of):
            return sparse_mla_decode.bind_plan(runner, dealt, 1, operands, sm_scale, index_block)
    if joined:
        plans = joined_plans(operands, groups)
    else:
        sizes = num_queries, num_heads, num_sms
        plans = (plan_for(groups[0], *sizes, max_logits, tile, varied=varied),)
        if len(groups) > 1:
            plans = either(plans[0])
    return bind_plans(runner, plans, operands, sm_scale, index_block)


def joined_plans(operands: SparseMlaOperands, groups: tuple[int, ...]) -> tuple[FwdPlan, ...]:
    """Plans over two sources, ranges and blocks, of groups of so many queries; of two numbers a
    sample chooses."""
    drawn, tile = groups != (1,) or lists_vary(operands), Tile(operands.q.shape[2])
    return tuple(FwdPlan(group, True, drawn, joined=True, tile=tile) for group in groups)


def choose_invariant(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    max_logits: bool,
    index_block: int,
    kv_format: str | None,
) -> Write:
    """Likewise where a query's bits must not depend on the others: bf16 rows take the forward,
    whose CTAs go over a query's list from its first slot on, and packed rows a decode by clusters
    of one size."""
    if is_packed(operands.kv):
        return sparse_mla_decode.bind_invariant(runner, operands, sm_scale, index_block, kv_format)
    if is_joined(operands, index_block):
        plans = joined_plans(operands, (1,))
        write = bind_plans(runner, plans, operands, sm_scale, index_block)
        # The second list begins at a whole tile after the first one.
        return with_used_slots(runner, write, operands, index_block)
    plan = _plan(1, max_logits, False, Tile(operands.q.shape[2]))
    return bind_plans(runner, (plan,), operands, sm_scale)


bind = partial(sparse_mla_launches.bind, choose)
bind_out = partial(sparse_mla_launches.bind_out, choose)


def groups_for(
    num_queries: int,
    num_heads: int,
    topk: int,
    num_keys: int,
    num_sms: int,
    *,
    varied: bool = False,
) -> tuple[int, ...]:
    """Queries of a group, which share an item if few heads would leave rows of the MMAs empty; of
    two numbers a sample chooses.

    A group's list is at most `group` times as long as a query's. Making it takes time by the bits
    of all rows.

    Args:
        varied: lists have lengths.
    """
    group = ROWS // num_heads if ROWS % num_heads == 0 else 1
    if group not in GROUPS[1:]:
        return (1,)
    grouping, time_of = GROUPINGS[group], time_of_draws if varied else time_of_rounds
    lists = LISTS_US + num_queries * num_keys * UNION_BIT_US / num_sms
    alone = time_of(num_queries, topk, num_sms)
    if not varied:
        # Dealt tiles or a decode may spread out the last round of queries one by one.
        alone = time_of(num_sms, topk, num_sms) * max(1.0, num_queries / num_sms)
    unlike, alike = (
        (lists + time_of(-(-num_queries // group), slots, num_sms)) / alone
        for slots in (min(group * topk, num_keys), topk)
    )
    if unlike <= grouping.most_unlike and alone <= LEAST_SAMPLED_US:
        return (group,)
    if alike < grouping.most_alike and alone > grouping.least_us:
        return group, 1
    return (1,)


def plan_for(
    group: int,
    num_queries: int,
    num_heads: int,
    num_sms: int,
    max_logits: bool = False,
    tile: Tile = Tile(),
    *,
    varied: bool = False,
) -> FwdPlan:
    """The plan of groups of `group` queries.

    Args:
        varied: lengths of lists vary: items are drawn, if the SMs do not have one each.
    """
    drawn = varied and num_items(group, num_queries, num_heads) > num_sms
    return _plan(group, max_logits, drawn, tile)


def num_items(group: int, num_queries: int, num_heads: int) -> int:
    """Work items of a launch."""
    groups = -(-num_queries // group)
    return groups * -(-num_heads // ROWS) if group == 1 else groups


@cache
def _plan(group: int, max_logits: bool, drawn: bool, tile: Tile) -> FwdPlan:
    """A compiled plan, which checks its barriers: that takes longer than a launch.

    Without RoPE columns the rarer choices have one plan, which does more than is asked for: groups
    and largest logits are drawn, and groups have largest logits.
    """
    if not tile.has_rope:
        drawn = drawn or max_logits or group > 1
        max_logits = max_logits or group > 1
    return FwdPlan(group, max_logits, drawn, tile=tile)


def time_of_items(num_queries: int, num_heads: int, slots: int, num_sms: int) -> float:
    """Microseconds of queries one by one, of so many slots each."""
    return time_of_rounds(num_items(1, num_queries, num_heads), slots, num_sms)


def time_of_rounds(items: int, slots: int, num_sms: int) -> float:
    """Microseconds of items of so many slots each, one a CTA at a time."""
    return -(-items // num_sms) * (ITEM_US + STEP_US * -(-slots // Tile().step_keys))


def time_of_draws(items: int, slots: int, num_sms: int) -> float:
    """Microseconds of items of up to so many slots, which CTAs draw: they share the work evenly,
    but the longest item is one CTA's."""
    steps, each = -(-slots // Tile().step_keys), items / num_sms
    return ITEM_US * max(1.0, each) + STEP_US * steps * max(1.0, USED_SLOTS * each)


def either(plan: FwdPlan) -> tuple[FwdPlan, FwdPlan]:
    """Plans of groups and of queries one by one, of which a sample chooses."""
    of_groups = _plan(plan.group, plan.max_logits, True, plan.tile)
    return of_groups, _plan(1, plan.max_logits, True, plan.tile)


def bind_plans(
    runner: Runner,
    plans: tuple[FwdPlan, ...],
    operands: SparseMlaOperands,
    sm_scale: float,
    index_block: int = 1,
) -> Write:
    """Bind the launches of a plan's kernel, or of two, of which a sample chooses."""
    forms = (form_of(runner, plan, operands) for plan in plans)
    return Launches(runner, operands, sm_scale, *forms, index_block=index_block)


def form_of(runner: Runner, plan: FwdPlan, operands: SparseMlaOperands) -> Form:
    """A plan's kernel for operands of these heads."""
    num_heads, num_sms = operands.q.shape[1], runner.num_sms

    def num_ctas(queries: int) -> tuple[int, ...]:
        """CTAs of a launch: one for each item, at most one an SM; and the SMs, where it samples."""
        ctas = min(num_items(plan.group, queries, num_heads), num_sms)
        return (ctas, num_sms) if plan.samples else (ctas,)

    function = runner.function(SPARSE_MLA_FWD, plan)
    return Form(function, plan.group, num_ctas, plan.drawn, plan.max_logits, plan.joined)
