"""Launches of the decodes, and their compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.grids import launch_plan
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import fake_more, fake_operands, fake_packed_pages
from flashdsa.kernels.attention.operands import split, split_more
from flashdsa.kernels.attention.sm90.decode.shared.plan import ClusterPlan
from flashdsa.kernels.attention.sm90.decode.shared.stream_k import Workspace


class Decode(NamedTuple):
    """A decode to compile. `kernel`: takes q, `Operands`, of stream-K tiles `Workspace`,
    `MoreOperands` or None, the plan. `query_of`: q as the kernel takes it, of q."""

    kernel: Any
    query_of: Callable[[Any], Any]
    plan: ClusterPlan


def compile_clusters(decode: Decode) -> Any:
    """Compile `launch_clusters` of a decode."""
    return _compile(launch_clusters, decode, Int32(1))


def compile_stream_k_tiles(decode: Decode) -> Any:
    """Compile `launch_stream_k` of a decode."""
    counters, slots = cute.sym_int32(), cute.sym_int32()
    words = decode.plan.slot_words
    workspace = fake_tensor(Int32, (counters,), 4), fake_tensor(Int32, (slots, words))
    return _compile(launch_stream_k, decode, *workspace, Int32(1))


def _compile(launch: Any, decode: Decode, *last: Any) -> Any:
    """Compile a launch of operands and the arguments after them."""
    plan = decode.plan
    form = plan.form if plan.packed else None
    operands = fake_operands(form=form, d_qk=plan.tile.d_qk)
    more: Any = fake_more(operands, form) if plan.joined else ()
    if plan.mixed:
        # Either source has either format.
        operands = operands._replace(kv=fake_packed_pages())
        more = more._replace(extra_kv=fake_packed_pages())
    return compile_launch(SM90, launch, decode, *operands, *more, *last)


@cute.jit
def launch_clusters(decode: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`: a cluster for the plan's heads of a query. `arguments`: those of
    `Operands`, of a joined plan those of `MoreOperands`, and cluster_size: one of CLUSTER_SIZES."""
    x, rest = split(arguments)
    plan = decode.plan
    more, (cluster_size,) = split_more(rest, plan.joined)
    q = decode.query_of(x.q)
    items = x.q.shape[0] * ((x.q.shape[1] + plan.group_heads - 1) // plan.group_heads)
    made = decode.kernel(q, x._replace(q=None), more, plan)
    launch_plan(made, plan, items * cluster_size, stream, cluster=cluster_size)


@cute.jit
def launch_stream_k(decode: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`: CTAs that share out all items.

    Args:
        arguments: those of `Operands`, of a joined plan those of `MoreOperands`, and
            counters: (CTAs,) int32, 0 before and after the launch.
            slots: (2 CTAs, plan.slot_words) int32.
            num_ctas: best one an SM.
    """
    x, rest = split(arguments)
    plan = decode.plan
    more, (counters, slots, num_ctas) = split_more(rest, plan.joined)
    q = decode.query_of(x.q)
    workspace = Workspace(counters, slots)
    made = decode.kernel(q, x._replace(q=None), workspace, more, plan)
    launch_plan(made, plan, num_ctas, stream)
