"""Context of every role: the plan, shared memory, the CTA's item and the CTA's steps of it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import fragments, integers, pipeline, smem
from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core.softmax import Scale
from flashdsa.kernels.attention.sm90.core.sources import JoinedSlots, join_slots, split_after
from flashdsa.kernels.attention.sm90.core.tile import TILES
from flashdsa.kernels.attention.sm90.decode.shared.plan import MOST_WITH_A_TILE
from flashdsa.kernels.attention.sm90.decode.shared.words import load_words_again


class Context(NamedTuple):
    """One CTA's position in the launch: an item is the plan's heads of a query, and a cluster's."""

    memory: Memory
    query: Int32
    head: Int32  # the item's first
    rank: Int32  # of the CTA in its cluster
    num_ctas: Int32  # of the cluster, its first ones: those that share the item
    first_slot: Int32  # of this CTA
    end_slot: Int32  # one past its last that may be valid
    num_tiles: Int32  # of 64 keys, at most: those after the last valid slot count
    thread: Int32  # in its warpgroup
    joined: Any = None  # of a joined plan `JoinedSlots` of the query

    @property
    def plan(self) -> Any:
        return self.memory.plan

    @property
    def kind(self) -> str:
        """Kind of the latent columns of Q and K, of V and P."""
        return fragments.F16_KIND if self.plan.packed else fragments.BF16_KIND

    def kind_of_slice(self, slice_: int) -> str:
        """Kind of Q and K in a slice; columns after the value's, which are RoPE's, stay bf16."""
        tile = self.plan.tile
        is_rope = tile.chunks_of(slice_)[0] >= tile.value_chunks
        return fragments.BF16_KIND if is_rope else self.kind

    @property
    def num_steps(self) -> Any:
        """Steps of two tiles each; the last one may have one."""
        return steps_of(self.num_tiles)

    def tile_full(self, tile: Any) -> pipeline.Barriers:
        """k0_full, or k1_full, which follows it."""
        return self.memory.k0_full.behind(tile * self.plan.tile.slices)

    def half_free(self, high: Any) -> pipeline.Barriers:
        """low_free, or high_free, which follows it."""
        return self.memory.low_free.behind(high * TILES)

    def phase(self, step: Any) -> Int32:
        """The phase that a step of the CTA completes, of every barrier of tiles."""
        return self.memory.p0_full.state(step).phase


class Output(NamedTuple):
    """Destination of the results."""

    ctx: Context
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale


def output_of(ctx: Context, x: Operands, scale: Scale) -> Output:
    """The results of this thread's item."""
    return Output(ctx, x.out, x.lse, x.attn_sink, scale)


@cute.jit
def find_item(memory: Memory, x: Operands, sources: Any) -> Context:
    """This thread's context; sources: of a joined plan `Sources`, else None."""
    item, _, _ = cute.arch.cluster_idx()
    rows = memory.plan.group_heads
    blocks = integers.divide(Int32(x.lse.shape[1]) + rows - 1, rows)
    query = item
    if blocks > 1:
        query = integers.divide(item, blocks)
    keys = memory.plan.tile.keys
    joined: Any = None
    num_slots = Int32(x.indices.shape[1])
    if cutlass.const_expr(sources is not None):
        joined = join_slots(sources, query, keys)
        num_slots = joined.end
    elif x.topk_length.shape[0] > 0:
        given = (x.topk_length.iterator + query).load()
        num_slots = cutlass.min(cutlass.max(given, Int32(0)), num_slots)
    tiles = integers.divide(num_slots + keys - 1, keys)
    num_ctas, rank = num_sharing(memory.plan, tiles), rank_of_cta(memory.plan)
    # One that takes no part comes after the last tile.
    cuts = (integers.divide(tiles * number, num_ctas) for number in (rank, rank + 1))
    first, end = (cutlass.min(cut, tiles) for cut in cuts)
    of_item = query, (item - query * blocks) * rows, rank, num_ctas
    slots = first * keys, cutlass.min(end * keys, num_slots), end - first
    return Context(memory, *of_item, *slots, thread_of_warpgroup(), joined)


@cute.jit
def num_sharing(plan: cutlass.Constexpr, tiles: Int32) -> Int32:
    """CTAs of the cluster that share an item of so many tiles: those with a tile, if they are few.
    A message from each CTA to each other one takes time, whatever it says."""
    if cutlass.const_expr(plan.single_cta):
        return Int32(1)
    count = Int32(cute.arch.cluster_size())
    if tiles <= plan.single_cta_tiles:
        count = Int32(1)
    elif tiles <= MOST_WITH_A_TILE:
        count = cutlass.min(count, tiles)
    return count


def takes_part(ctx: Context) -> Any:
    """Whether this CTA of a cluster shares the item; one that does not is sent nothing. It goes
    through the code of an item without slots, as other CTAs find that in the cache sooner then."""
    return ctx.rank < ctx.num_ctas


def rank_of_cta(plan: Any) -> Int32:
    """This CTA's rank in its cluster."""
    return Int32(0) if plan.single_cta else Int32(cute.arch.block_idx_in_cluster())


def thread_of_warpgroup() -> Any:
    """This thread's number in its warpgroup."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % WARPGROUP_SIZE


@cute.jit
def store_item(ctx: Context) -> None:
    """One warp: store the item and its slots for `load_item`, whose threads the CTA meets first."""
    main, end = Int32(0), Int32(0)
    if cutlass.const_expr(ctx.plan.joined):
        main, end = ctx.joined.main, ctx.joined.end
    of_cta = [ctx.query, ctx.head, ctx.first_slot, ctx.end_slot, ctx.num_tiles]
    words = [*of_cta, ctx.num_ctas, main, end]
    if cute.arch.lane_idx() == 0:
        for four in cutlass.range_constexpr(len(words) // smem.VECTOR):
            to = ctx.memory.item.address() + four * smem.VECTOR * 4
            smem.store_words(to, words[smem.VECTOR * four : smem.VECTOR * (four + 1)])


def load_item(memory: Memory) -> Context:
    """This thread's context, as `store_item` stored it; loaded again where registers are few."""
    at = memory.item.address()
    query, head, first_slot, end_slot = load_words_again(at)
    num_tiles, num_ctas, main, end = load_words_again(at + smem.VECTOR * 4)
    rank, thread = rank_of_cta(memory.plan), thread_of_warpgroup()
    if memory.plan.single_cta:
        num_ctas = Int32(1)
    joined = None
    if memory.plan.joined:
        joined = JoinedSlots(main, split_after(main, memory.plan.tile.keys), end)
    return Context(
        memory, query, head, rank, num_ctas, first_slot, end_slot, num_tiles, thread, joined
    )


def steps_of(num_tiles: Any) -> Any:
    """Steps of `num_tiles` tiles."""
    return (num_tiles + TILES - 1) // TILES


def wait_for_extent(ctx: Context) -> Int32:
    """A consumer: the CTA's tiles up to those of the last step with a valid slot."""
    ctx.memory.extent_full.wait(0)
    return ctx.memory.extent.array(Int32, 1)[0]


def meet_consumers(met: pipeline.Barriers, number: Any = 0) -> None:
    """Sync both consumers, each thread: each sees what all of them did before. The barrier is an
    mbarrier, as synccheck takes a named barrier at two points of the code for divergence. `number`:
    of the barrier's phase, the first being 0."""
    met.arrive()
    met.wait_for(number)
