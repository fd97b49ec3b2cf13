"""The backward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm100.slot_rows import queries_at_a_time, slot_order
from flashdsa.backends.sparse_mla_launches import MOST_UNION_BYTES, UNION_BYTES
from flashdsa.errors import ArgumentValueError
from flashdsa.hw import BULK_ALIGNMENT, SECTOR_BYTES
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, PAIR_ROWS
from flashdsa.kernels.catalog import MLA_BWD

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

PLANS = {(plan.group_heads, plan.deterministic): plan for plan in MLA_BWD.plans}
"""Plans by heads of a query and whether they are deterministic."""
BLOCK_KEYS = BwdPlan().tile.keys

Launch = Callable[..., Any]
"""A compiled function: see `kernels.attention.sm100.bwd.kernel.launch_backward`."""


def bind(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """dQ (S, H, d_qk), dKV (S_kv, d_qk), no dextra_kv, d_sink (H,), which is empty without a
    sink."""
    plan = PLANS[operands.q.shape[1], deterministic]
    function = runner.function(MLA_BWD, plan)
    pairs = runner.cluster_capacity(plan.threads, plan.smem_bytes)[CLUSTER]
    kind = type(operands)

    def serve(given: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return run(
            function,
            kind(*given),
            sm_scale=sm_scale,
            deterministic=deterministic,
            dkv_dtype=dkv_dtype,
            pairs=pairs,
        )

    return runner.on_device(serve)


def run(
    launch: Launch,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
    pairs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the operation by a compiled function, on the operands' device.

    Args:
        launch: compiled for q's heads and what `deterministic` says.
        operands: indices of 128 heads are padded here with -1 to a multiple of BLOCK_KEYS.
        pairs: of CTAs that run at once; they share the queries out.
    """
    q, kv, dO, lse, O, indices, topk_length, attn_sink = operands[:8]
    num_queries, num_heads, _ = q.shape
    topk = indices.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    sink_size = 0 if attn_sink is None else num_heads
    d_sink = torch.zeros(sink_size, dtype=torch.float32, device=q.device)
    if num_queries and kv.shape[0]:
        with_sink = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.expand_as(lse))
        if topk_length is None:
            topk_length = torch.full((num_queries,), topk, dtype=torch.int32, device=q.device)
        delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
        launch_all = launch_in_parts if deterministic else launch_raw
        if num_heads < PAIR_ROWS:
            launch_all = launch_groups
        else:
            indices = torch.nn.functional.pad(indices, (0, -topk % BLOCK_KEYS), value=-1)
        launch_all(
            launch,
            readable(q),
            readable(kv),
            readable(dO),
            with_sink.contiguous(),
            readable(O),
            indices.contiguous(),
            topk_length.contiguous(),
            delta,
            dq,
            dkv,
            sm_scale,
            pairs,
        )
        if attn_sink is not None:
            d_sink = sink_backward(lse, attn_sink, delta)[1]
    else:
        dq.zero_()
    return dq, dkv.to(dkv_dtype), dkv.new_empty(0, dtype=dkv_dtype), d_sink


def of_queries(operands: Sequence[Tensor], part: slice) -> Iterator[Tensor]:
    """The operands of some queries: (q, kv, dO, lse, O, indices, topk_length, delta, dq, dkv), of
    which kv and dkv stay whole."""
    for place, operand in enumerate(operands):
        whole = place in (1, len(operands) - 1)
        yield operand if whole else operand[part]


def launch_in_parts(launch: Launch, *operands_and_scalars: Any) -> None:
    """Launch the deterministic kernels, on as many queries at a time as have room for their slots'
    rows.

    Args:
        operands_and_scalars: as for `launch_checked`, without what it takes after dkv.
    """
    *operands, sm_scale, pairs = operands_and_scalars
    _, kv, *_, indices, topk_length, _, _, _ = operands
    num_queries, topk = indices.shape
    at_a_time = queries_at_a_time(num_queries, topk)
    slots = torch.empty(at_a_time * topk, kv.shape[1], dtype=torch.float32, device=kv.device)
    for first in range(0, num_queries, at_a_time):
        part = slice(first, first + at_a_time)
        order, starts = slot_order(indices[part], topk_length[part], kv.shape[0])
        launch_raw(
            launch,
            *of_queries(operands, part),
            slots[: order.shape[0]],
            order,
            starts,
            sm_scale,
            pairs,
        )


def launch_groups(launch: Launch, *operands_and_scalars: Any) -> None:
    """Launch the kernels of groups of queries, on as many at a time as their unions have room for.

    Args:
        operands_and_scalars: as for `launch_checked`, without what it takes after dkv.
    """
    *operands, sm_scale, pairs = operands_and_scalars
    q, *_, indices, _, _, _, _ = operands
    num_queries, num_heads, _ = q.shape
    group = PAIR_ROWS // num_heads
    most = -(-group * indices.shape[1] // BLOCK_KEYS) * BLOCK_KEYS
    groups = min(-(-num_queries // group), max(1, MOST_UNION_BYTES // (UNION_BYTES * most)))
    rows = torch.empty(groups, most, dtype=torch.int32, device=q.device)
    members = torch.empty(groups, most, dtype=torch.uint8, device=q.device)
    numbers = torch.empty(3, groups, dtype=torch.int32, device=q.device)
    for first in range(0, num_queries, groups * group):
        part = slice(first, first + groups * group)
        own = slice(-(-q[part].shape[0] // group))
        launch_checked(
            launch,
            *of_queries(operands, part),
            rows[own],
            members[own],
            *(one[own] for one in numbers),
            sm_scale,
            pairs,
        )


def launch_raw(launch: Launch, *operands_and_scalars: Any) -> None:
    """Launch the kernel with one query an item on tensors without gaps; topk: of whole blocks.

    Args:
        operands_and_scalars: as for `launch_checked`.

    Raises:
        ArgumentValueError: names the argument that does not fit.
    """
    topk = operands_and_scalars[5].shape[1]
    if topk % BLOCK_KEYS:
        raise ArgumentValueError(
            f"indices: the Blackwell kernel takes topk in multiples of {BLOCK_KEYS}; got {topk}"
        )
    launch_checked(launch, *operands_and_scalars)


def launch_checked(
    launch: Launch,
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    topk_length: Tensor,
    *outputs_and_scalars: Any,
) -> None:
    """Check what TMA and bulk reduce-adds need of the tensors, then launch the kernel.

    Args:
        outputs_and_scalars: delta (S, H) and dq, written; dkv, added to; if the kernel is
            deterministic its slots, their order and starts, if it is of a group the lists of
            its unions; sm_scale; pairs of CTAs, at most.

    Raises:
        ArgumentValueError: names the argument that does not fit.
    """
    delta, dq, *dkv_and_others, sm_scale, pairs = outputs_and_scalars
    dkv = dkv_and_others[0]
    for name, tensor in (("q", q), ("kv", kv), ("dO", dO), ("O", O), ("dQ", dq), ("dKV", dkv)):
        alignment = SECTOR_BYTES if tensor is dq else BULK_ALIGNMENT
        if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
            raise ArgumentValueError(
                f"{name}: the Blackwell kernel needs tensors without gaps at addresses aligned to "
                f"{alignment} bytes (TMA, bulk reduce-add, stores of 32 bytes); got strides "
                f"{list(tensor.stride())} at {tensor.data_ptr():#x}"
            )
    rows = q.shape[0] * q.shape[1]
    launch(
        q.view(rows, -1),
        kv,
        dO.view(rows, -1),
        lse,
        O.view(rows, -1),
        indices,
        topk_length,
        delta,
        dq.view(rows, -1),
        *dkv_and_others,
        sm_scale,
        pairs,
    )
