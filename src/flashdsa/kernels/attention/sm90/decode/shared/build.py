"""Launches of the decodes, and their compilation."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import fake_more, fake_operands
from flashdsa.kernels.attention.sm90.decode.shared.plan import ClusterPlan


def compile_cluster_launch(launch: Any, plan: ClusterPlan) -> Any:
    """Compile a decode's launch with a plan."""
    return _compile(launch, plan, Int32(1))


def compile_dealt_launch(launch: Any, plan: ClusterPlan) -> Any:
    """Compile a dealt decode's launch with a plan."""
    counters, slots = cute.sym_int32(), cute.sym_int32()
    workspace = fake_tensor(Int32, (counters,), 4), fake_tensor(Int32, (slots, plan.slot_words))
    return _compile(launch, plan, *workspace, Int32(1))


def _compile(launch: Any, plan: ClusterPlan, *last: Any) -> Any:
    """Compile a launch of operands and the arguments after them."""
    form = plan.form if plan.packed else None
    operands = fake_operands(form=form, d_qk=plan.tile.d_qk)
    more = fake_more(operands, plan.extra_form or form) if plan.joined else ()
    return compile_launch(SM90, launch, plan, *operands, *more, *last)


def launch_clusters(kernel: Any, plan: ClusterPlan, items: Any, cluster_size: Any, stream: Any):
    """Launch a kernel, whose arguments are set: a cluster an item."""
    kernel.launch(
        grid=[items * cluster_size, 1, 1],
        block=[plan.threads, 1, 1],
        cluster=[cluster_size, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def launch_ctas(kernel: Any, plan: ClusterPlan, num_ctas: Any, stream: Any):
    """Launch a kernel, whose arguments are set, whose CTAs share out all items."""
    kernel.launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )
