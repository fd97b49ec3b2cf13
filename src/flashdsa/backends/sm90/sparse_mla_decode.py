"""Sparse decode on Hopper GPUs: few queries, or packed kv rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from flashdsa.backends.cluster_limit import allowed_clusters
from flashdsa.backends.packed_rows import is_packed
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import Inputs, Write
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import COLUMNS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import CLUSTER_SIZES, MOST_CTAS
from flashdsa.kernels.catalog import SPARSE_MLA_DECODE, SPARSE_MLA_DECODE_FEW_HEADS
from flashdsa.plan.kernel_spec import KernelSpec

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands


def serves(operands: SparseMlaOperands, num_sms: int) -> bool:
    """Whether the decode takes the call: packed rows, or no more items than SMs."""
    return is_packed(operands.kv) or items_of(operands.q) <= num_sms


def items_of(q: Tensor) -> int:
    """Items, each 64 heads of a query."""
    return q.shape[0] * -(-q.shape[1] // ROWS)


def cluster_size_for(capacity: Mapping[int, int], items: int, topk: int) -> int:
    """CTAs of an item: all clusters run at once and each CTA has the fewest tiles; the smallest
    such number. One if the items are more than the SMs."""
    tiles = -(-topk // Tile().keys)
    fitting = [size for size in CLUSTER_SIZES if capacity.get(size, 0) >= items] or [1]
    return min(fitting, key=lambda size: (-(-tiles // size), size))


def choose_kernel(runner: Runner, operands: SparseMlaOperands, sm_scale: float) -> Write:
    """Bind the kernel that serves a query and a kv row at least, without max_logits."""
    queries, num_heads = operands.q.shape[:2]
    packed, topk = is_packed(operands.kv), operands.indices.shape[1]
    plan, cluster_size = choose(runner, packed, queries, num_heads, topk)
    return bind_plan(runner, plan, cluster_size, operands, sm_scale)


def bind_plan(
    runner: Runner,
    plan: DecodePlan | FewHeadsPlan,
    cluster_size: int,
    operands: SparseMlaOperands,
    sm_scale: float,
) -> Write:
    """Bind the one launch of a plan's kernel."""
    function, inputs = runner.function(spec_of(plan), plan), Inputs(runner, operands, sm_scale)
    return lambda operands: function(*inputs(operands), cluster_size)


def choose(
    runner: Runner, packed: bool, queries: int, num_heads: int, topk: int
) -> tuple[DecodePlan | FewHeadsPlan, int]:
    """The kernel, and CTAs of an item.

    Packed rows take the kernel of few heads if heads are few; or if so many of its CTAs run at once
    that none has more steps than with all 64 heads in each, as its steps are shorter.
    """
    many = DecodePlan(packed=packed)
    sizes = _capacity(runner, many)
    many_size = cluster_size_for(sizes, queries * many.items(num_heads), topk)
    if not packed:
        return many, many_size
    few = FewHeadsPlan(next((c for c in COLUMNS if c >= num_heads), COLUMNS[-1]))
    sizes = _capacity(runner, few)
    few_items = queries * few.items(num_heads)
    few_size = cluster_size_for(sizes, few_items, topk)
    at_once = few_items <= sizes.get(few_size, 0) and few_size >= many_size
    if num_heads <= COLUMNS[-1] or at_once:
        return few, few_size
    return many, many_size


def _capacity(runner: Runner, plan: DecodePlan | FewHeadsPlan) -> Mapping[int, int]:
    """Clusters that run at once on a device without other work, by number of CTAs.

    A cluster of 16 is the quickest for a query alone (20 us, with 8 CTAs 26), but begins only when
    16 SMs of one GPC are free: while another stream holds 32 SMs it waits for them.
    """
    return allowed_clusters(runner.cluster_capacity(plan.threads, plan.smem_bytes), MOST_CTAS)


def spec_of(plan: DecodePlan | FewHeadsPlan) -> KernelSpec:
    """The catalog's row of a plan's kernel."""
    return SPARSE_MLA_DECODE if isinstance(plan, DecodePlan) else SPARSE_MLA_DECODE_FEW_HEADS
