"""The ways by which Hopper serves a forward of sparse MLA, their estimated times, and the choice.

`weigh` names every kernel that serves a call, each with its time as the choice counts it and the
reason; `choose` takes the least. `flashdsa choose` and `flashdsa.explain` print them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flashdsa.backends import packed_rows, sparse_mla_launches
from flashdsa.backends.reasons import Candidate, Choice, Estimate, finite
from flashdsa.backends.runner import Runner, allowed_clusters
from flashdsa.backends.sm90.decode_cuts import time_of_stream_k, time_of_waves
from flashdsa.backends.sm90.used_slots import lack_lengths
from flashdsa.heuristics.h200 import SPARSE_MLA
from flashdsa.heuristics.sparse_mla import SparseMlaConstants
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.stream_k.plan import StreamKFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import MIXED_PAIRS, DecodePlan
from flashdsa.kernels.attention.sm90.decode.full.stream_k.plan import StreamKPlan
from flashdsa.kernels.attention.sm90.decode.shared import plan as sizes
from flashdsa.kernels.attention.sm90.fwd.plan import ITEM_US, STEP_US, UNION_BIT_US, FwdPlan
from flashdsa.problem import INT32_MAX
from flashdsa.row_formats import V32, RowFormat

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands

P = TypeVar("P")
INVARIANT_CTAS = 4
"""CTAs of an item whose bits must not depend on others: 512 of 2,048 slots each, as large batches
have them."""
Whole = DecodePlan | FewHeadsPlan
StreamK = StreamKPlan | StreamKFewHeadsPlan
DecodeKernel = Whole | StreamK


class Call(NamedTuple):
    """A call, as far as the host knows it.

    Attributes:
        slots: of a query's list of each source, a range's as long as a window; most_slots: at most.
        keys: rows of all sources.
        form, extra: formats of packed rows; extra: of the second source, if it is another.
        joined: two sources, a range, or blocks of rows.
        lengths: lists have lengths. ranges: some are ranges. lacks_lengths: some list of ids has no
            length.
    """

    queries: int
    heads: int
    d_qk: int
    slots: tuple[int, int]
    most_slots: tuple[int, int]
    keys: int
    form: RowFormat | None = None
    extra: str = ""
    joined: bool = False
    lengths: bool = False
    ranges: bool = False
    lacks_lengths: bool = True
    max_logits: bool = False

    @property
    def tile(self) -> Tile:
        """The tile of keys."""
        return Tile(self.d_qk)

    @property
    def packed(self) -> bool:
        """Whether rows of kv are packed."""
        return self.form is not None

    @property
    def varies(self) -> bool:
        """Whether lists may differ in length."""
        return self.lengths or self.ranges

    @property
    def items(self) -> int:
        """Items of 64 heads of a query."""
        return self.queries * -(-self.heads // ROWS)


class Way(NamedTuple):
    """Kernels that serve a call.

    Attributes:
        plan: the kernel. cluster_size: CTAs of a decode's item.
        instead: the forward of queries one by one, where a sample chooses between it and `plan`.
        finds_ends: the device looks first where lists without lengths end.
    """

    plan: FwdPlan | DecodeKernel
    cluster_size: int = 1
    instead: FwdPlan | None = None
    finds_ends: bool = False

    @property
    def kind(self) -> str:
        """The way's name in tables and in the judge of ways."""
        if isinstance(self.plan, FwdPlan):
            grouped = "groups" if self.plan.group > 1 else "one by one"
            return f"forward, {grouped}" + ", sampled" * (self.instead is not None)
        heads = "few heads" if isinstance(self.plan, FewHeadsPlan) else "64 heads"
        return f"decode, {heads}, {'stream-K' if isinstance(self.plan, StreamK) else 'clusters'}"

    def __str__(self) -> str:
        """The launches."""
        first = "mla_used_slots, " * self.finds_ends
        last = f" or {self.instead.name} by a sample" if self.instead else ""
        ctas = f" x {self.cluster_size}" if self.cluster_size > 1 else ""
        return first + self.plan.name + ctas + last


def call_of(
    operands: SparseMlaOperands,
    max_logits: bool = False,
    index_block: int = 1,
    kv_format: str | None = None,
) -> Call:
    """The facts of operands with queries and keys."""
    x = operands
    form, extra = packed_rows.form_of(x.kv, kv_format), ""
    if x.extra_kv is not None:
        of_second = packed_rows.form_of(x.extra_kv, kv_format)
        extra = of_second.name if of_second and of_second != form else ""
    queries, heads, d_qk = x.q.shape
    return Call(
        queries,
        heads,
        d_qk,
        slots=sparse_mla_launches.likely_slots(x, index_block),
        most_slots=sparse_mla_launches.slots_of(x, index_block),
        keys=packed_rows.num_rows(x.kv, x.extra_kv),
        form=form,
        extra=extra,
        joined=sparse_mla_launches.is_joined(x, index_block),
        lengths=x.topk_length is not None or x.extra_topk_length is not None,
        ranges=x.ends is not None or x.extra_ends is not None,
        lacks_lengths=lack_lengths(x),
        max_logits=max_logits,
    )


def choose(runner: Runner, call: Call) -> Way:
    """The way that takes the least time."""
    found = ways(runner, call, SPARSE_MLA)
    return min(found, key=found.__getitem__)


def ways(runner: Runner, call: Call, of: SparseMlaConstants = SPARSE_MLA) -> dict[Way, float]:
    """Every way that serves a call, and its time in us as the choice counts it; see `Estimate`."""
    return {way: estimate.counted for way, estimate in weigh(runner, call, of).items()}


def weigh(runner: Runner, call: Call, of: SparseMlaConstants = SPARSE_MLA) -> dict[Way, Estimate]:
    """Return every way that serves a call, and its estimate. `of`: constants of the GPU."""
    finds = finds_ends(call, runner.num_sms, of)
    known = call._replace(lengths=call.lengths or finds)
    found = packed_ways(runner, known, of) if call.packed else bf16_ways(runner, known, of, finds)
    return {way._replace(finds_ends=finds): estimate for way, estimate in found}


def explain(runner: Runner, call: Call, taken: Way, *, invariant: bool) -> Choice:
    """Say why a way is taken, as a table of all of them.

    Args:
        invariant: `taken` is by `invariant_way`.
    """
    if invariant:
        rule = "batch_invariant: no other kernel, as a query's bits must not depend on the others"
        return Choice("one way", (Candidate(compiled(taken), taken.kind, rule),))
    found = weigh(runner, call)
    rows = tuple(
        Candidate(compiled(way), way.kind, found[way].reason, found[way].us, way == taken)
        for way in sorted(found, key=lambda way: (way != taken, found[way].counted))
    )
    title = "the first of these is taken"
    if taken.finds_ends:
        title += (
            "; mla_used_slots finds where lists end: they have no lengths, and full ones take "
            f"{SPARSE_MLA.find_ends:g} us or more"
        )
    return Choice(title, rows)


def compiled(way: Way) -> str:
    """Name the launches of a way by the functions that are compiled for them."""
    if isinstance(way.plan, FwdPlan):
        return str(way)
    return str(way._replace(plan=compiled_plan(way.plan, way.cluster_size)))


def compiled_plan(plan: DecodeKernel, cluster_size: int) -> DecodeKernel:
    """Return the plan of the compiled function: items of one CTA have one of their own."""
    if type(plan) is DecodePlan:
        return replace(plan, single_cta=cluster_size == 1)
    return plan


def invariant_way(runner: Runner, call: Call) -> Way:
    """The way by which a query's bits do not depend on the others.

    bf16 rows take the forward, whose CTAs go over a query's list from its first slot on. Packed
    rows take one kernel for each number of heads, and clusters of one size, which share the slots
    up to the last that names a row.
    """
    if not call.packed:
        # The second list begins at a whole tile after the first one.
        drawn = call.joined and call.varies
        return Way(forward_plan(call, 1, drawn=drawn), finds_ends=call.joined)
    plan: Whole = whole_plan(call)
    if call.heads <= HEADS and not call.joined and FewHeadsPlan.takes(plan.form, joined=False):
        plan = made(FewHeadsPlan, plan.form)
    size = max(size for size in capacity_of(runner, plan) if size <= INVARIANT_CTAS)
    return Way(plan, size, finds_ends=True)


def finds_ends(call: Call, num_sms: int, of: SparseMlaConstants) -> bool:
    """Whether the device finds the ends of lists first: where they have no lengths, may end a step
    earlier, and full ones take so long that it does not count."""
    slots = sum(call.slots)
    if not call.lacks_lengths or slots <= Tile().step_keys:
        return False
    return time_of_rounds(call.items, slots, num_sms) >= of.find_ends


def bf16_ways(
    runner: Runner, call: Call, of: SparseMlaConstants, finds: bool
) -> Iterator[tuple[Way, Estimate]]:
    """Clusters of no more items than SMs; the forward, by queries one by one or by groups; stream-K
    tiles. `finds`: result of `finds_ends`: most lists are full."""
    num_sms, slots = runner.num_sms, sum(call.slots)
    if call.items <= num_sms and not call.max_logits:
        rule = f"rule: {call.items} items of 64 heads are no more than the {num_sms} SMs"
        yield Way(*clusters_for(runner, whole_plan(call), call, of)), Estimate(0.0, rule)
    drawn = call.varies if call.joined else call.lengths and call.items > num_sms
    one_by_one = time_of_rounds(call.items, slots, num_sms)
    reason = f"{call.items} items of 64 heads, {num_sms} at a time"
    yield Way(forward_plan(call, 1, drawn=drawn)), Estimate(one_by_one, reason, one_by_one)
    group = ROWS // call.heads if ROWS % call.heads == 0 else 1
    most_queries = sparse_mla_launches.queries_at_a_time(group, sum(call.most_slots))
    # Groups need lists with room for all slots, which ranges of long sources have not.
    fits = not call.joined or (call.queries <= most_queries and call.keys <= INT32_MAX)
    if group in of.groupings and fits:
        yield from group_ways(num_sms, call, group, of)
    can = can_stream_k(num_sms, call.queries, tiles_of(call.most_slots))
    if can and not call.max_logits and not (call.joined and call.tile.has_rope):
        plan, tiles = made(StreamKPlan, joined=call.joined, tile=call.tile), tiles_of(call.slots)
        far = of.near_rows < call.keys < call.queries * tiles * Tile().keys
        gain = of.forward_gain_far if far else of.forward_gain
        time = stream_k_microseconds(plan, call, num_sms, tiles, of) + of.stream_k_code
        why_not = why_no_stream_k(plan, call, num_sms, tiles, of)
        most = int(of.most_stream_k_turns * num_sms)
        if call.items > most:
            why_not = f"more than {most} items of 64 heads, here {call.items}"
        elif call.lengths and not finds:
            why_not = "the lists have lengths: how full they are is not known"
        yield Way(plan), gaining(time, gain, why_not)


def group_ways(
    num_sms: int, call: Call, group: int, of: SparseMlaConstants
) -> Iterator[tuple[Way, Estimate]]:
    """Groups of queries, which share an item where few heads would leave rows of the MMAs empty.

    A group's list is at most `group` times as long as a query's. Making it takes time by the bits
    of all rows.
    """
    limits, slots = of.groupings[group], sum(call.slots)

    def time(items: int, slots: int) -> float:
        if call.lengths:
            return time_of_draws(items, slots, num_sms, of.used_slots)
        return time_of_rounds(items, slots, num_sms)

    lists = of.group_lists + call.queries * call.keys * UNION_BIT_US / num_sms
    alone = time(call.queries, slots)
    if not call.lengths:  # stream-K tiles or a decode may spread out the last round
        alone = time(num_sms, slots) * max(1.0, call.queries / num_sms)
    groups = -(-call.queries // group)
    unlike = (lists + time(groups, min(group * slots, call.keys))) / alone
    alike = (lists + time(groups, slots)) / alone
    surely = unlike <= limits.most_unlike and alone <= of.most_unsampled
    maybe = alike < limits.most_alike and alone > limits.least_us
    drawn = call.joined or (call.lengths and groups > num_sms)
    reason = (
        f"groups of {group} queries that share no key take {unlike:.2f} of the time of queries one "
        f"by one, {alone:.0f} us; taken up to {limits.most_unlike:g}, and up to "
        f"{of.most_unsampled:g} us"
    )
    yield Way(forward_plan(call, group, drawn=drawn)), by_rule(reason, surely)
    sampled = forward_plan(call, group, drawn=True)
    one_by_one = made(FwdPlan, 1, sampled.drawn, sampled.joined, tile=sampled.tile)
    reason = (
        f"groups of {group} queries with equal lists take {alike:.2f} of the time of queries one "
        f"by one, {alone:.0f} us; below {limits.most_alike:g}, and above {limits.least_us:g} us, "
        "the device chooses by a sample of the lists"
    )
    yield Way(sampled, instead=one_by_one), by_rule(reason, maybe)


def by_rule(reason: str, taken: bool) -> Estimate:
    """The estimate of a way that a rule takes, or leaves out."""
    return Estimate(0.0, f"rule: {reason}") if taken else not_considered(reason)


def not_considered(why_not: str) -> Estimate:
    """The estimate of a way that is left out."""
    return Estimate(inf, f"not considered: {why_not}")


def gaining(time: float, gain: float, why_not: str) -> Estimate:
    """The estimate of stream-K tiles, which are taken where they take `gain` of another way's time;
    not considered if something is said against them."""
    if why_not:
        return not_considered(why_not)
    reason = f"counts as {time / gain:.1f} us, as it must take {gain:g} of another's time or less"
    return Estimate(time / gain, reason, finite(time))


def packed_ways(
    runner: Runner, call: Call, of: SparseMlaConstants
) -> Iterator[tuple[Way, Estimate]]:
    """Clusters of whole items, of 64 heads or of 16, or stream-K tiles."""
    many, tiles = whole_plan(call), tiles_of(call.most_slots)
    few_heads = not many.mixed and FewHeadsPlan.takes(many.form, many.joined)
    whole: list[Whole] = [made(FewHeadsPlan, many.form, many.joined)] if few_heads else []
    if call.heads > HEADS or not few_heads:
        whole.insert(0, many)
    for kernel in whole:
        plan, size = clusters_for(runner, kernel, call, of)
        waves = -(-call.queries * plan.items(call.heads) // capacity_of(runner, plan)[size])
        time = time_of_clusters(plan, size, tiles, waves, of)
        reason = f"waves of items: {waves}; CTAs of an item: {size}"
        yield Way(plan, size), Estimate(time, reason, time)
    if many.mixed or (many.joined and many.tile.has_rope):
        return
    gain = of.stream_k_gain_lengths if call.varies and tiles >= of.long_tiles else of.stream_k_gain
    stream_k: StreamK = made(
        StreamKPlan, packed=True, joined=many.joined, form=many.form, tile=many.tile
    )
    if call.heads <= HEADS and few_heads:
        stream_k = made(StreamKFewHeadsPlan, many.form, many.joined)
    time = stream_k_microseconds(stream_k, call, runner.num_sms, tiles, of)
    why_not = why_no_stream_k(stream_k, call, runner.num_sms, tiles, of)
    if call.varies and tiles < of.least_stream_k_tiles:
        why_not = f"lists that may be shorter have fewer than {of.least_stream_k_tiles} tiles"
    yield Way(stream_k), gaining(time, gain, why_not)


def whole_plan(call: Call) -> DecodePlan:
    """The decode of whole items of 64 heads."""
    form, extra = call.form or V32, ""
    if call.extra:
        form, other = next(pair for pair in MIXED_PAIRS if form in pair)
        extra = other.name
    return made(
        DecodePlan, packed=call.packed, joined=call.joined, form=form, extra=extra, tile=call.tile
    )


def forward_plan(call: Call, group: int, *, drawn: bool) -> FwdPlan:
    """The forward's kernel for groups of `group` queries.

    Without RoPE columns groups have one plan: their items are drawn.
    """
    drawn = drawn or (group > 1 and not call.tile.has_rope)
    return made(FwdPlan, group, drawn, call.joined, tile=call.tile)


def made(kind: type[P], *choices: Any, **more: Any) -> P:
    """A plan, once for all calls: it checks its barriers, which takes longer than a launch."""
    cached: Callable[..., P] = _made
    return cached(kind, *choices, **more)


@cache
def _made(kind: Callable[..., Any], *choices: Any, **more: Any) -> Any:
    return kind(*choices, **more)


def clusters_for(
    runner: Runner, plan: Whole, call: Call, of: SparseMlaConstants
) -> tuple[Whole, int]:
    """CTAs of an item: all clusters run at once and each CTA has the fewest tiles; the smallest
    such number. One if the items are more than the SMs."""
    items, tiles = call.queries * plan.items(call.heads), tiles_of(call.most_slots)
    if isinstance(plan, DecodePlan) and tiles <= of.single_cta_tiles:
        return plan, 1
    capacity = capacity_of(runner, plan)
    fitting = [size for size in sizes.CLUSTER_SIZES if capacity.get(size, 0) >= items] or [1]
    return plan, min(fitting, key=lambda size: (-(-tiles // size), size))


def capacity_of(runner: Runner, plan: DecodeKernel) -> Mapping[int, int]:
    """Clusters that run at once on a device without other work, by number of CTAs.

    A cluster of 16 is the quickest for a query alone (20 us, with 8 CTAs 26), but begins only when
    16 SMs of one GPC are free: while another stream holds 32 SMs it waits for them.
    """
    return allowed_clusters(runner.cluster_capacity(plan.threads, plan.smem_bytes), sizes.MOST_CTAS)


def kind_of(plan: DecodeKernel) -> str:
    """The kind of a plan's items, by which its times are kept."""
    if isinstance(plan, FewHeadsPlan):
        return "few heads"
    return "packed" if plan.packed else "bf16"


def tiles_of(slots: tuple[int, int]) -> int:
    """Tiles of a query's lists."""
    return sum(-(-each // Tile().keys) for each in slots)


def time_of_clusters(
    plan: Whole, size: int, tiles: int, waves: int, of: SparseMlaConstants
) -> float:
    """Microseconds of items of `tiles` tiles that clusters of `size` CTAs take in waves."""
    time = time_of_waves(of.clusters[kind_of(plan)], -(-tiles // size), waves)
    alone = size == 1 and isinstance(plan, DecodePlan)
    return time - of.single_cta * waves if alone else time


def stream_k_microseconds(
    plan: StreamK, call: Call, num_sms: int, tiles: int, of: SparseMlaConstants
) -> float:
    """Microseconds of queries of `tiles` tiles that all SMs share (stream-K)."""
    kind, blocks = kind_of(plan), plan.items(call.heads)
    if why_no_stream_k(plan, call, num_sms, tiles, of):
        return inf
    return time_of_stream_k(of.stream_k[kind], call.queries, tiles, num_sms // blocks)


def why_no_stream_k(
    plan: StreamK, call: Call, num_sms: int, tiles: int, of: SparseMlaConstants
) -> str:
    """Say what speaks against stream-K tiles for a call, whatever their time; "": nothing."""
    blocks = plan.items(call.heads)
    items, most = call.queries * blocks, of.most_waves[kind_of(plan)] * num_sms
    if blocks > num_sms:
        return f"a query has more items than the {num_sms} SMs, {blocks}"
    if items > most:
        return f"more than {most} items, here {items}"
    if not can_stream_k(num_sms, call.queries, tiles):
        return "the kernel counts shares of the tiles in int32"
    return ""


def can_stream_k(num_sms: int, queries: int, tiles: int) -> bool:
    """Whether all SMs may share queries of at most `tiles` tiles: the kernel counts shares in
    int32, rounded up."""
    return queries * (tiles + sizes.OVERHEAD_TILES) * (num_sms + 1) <= INT32_MAX


def time_of_rounds(items: int, slots: int, num_sms: int) -> float:
    """Microseconds of items of `slots` slots, one a CTA at a time."""
    return -(-items // num_sms) * (ITEM_US + STEP_US * -(-slots // Tile().step_keys))


def time_of_draws(items: int, slots: int, num_sms: int, used: float) -> float:
    """Microseconds of items of up to `slots` slots, of which a share is `used`. CTAs draw them and
    share the work evenly, but the longest item is one CTA's."""
    steps, each = -(-slots // Tile().step_keys), items / num_sms
    return ITEM_US * max(1.0, each) + STEP_US * steps * max(1.0, used * each)
