"""The backward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import MOST_UNION_BYTES, UNION_BYTES
from flashdsa.errors import ArgumentValueError
from flashdsa.hw import BULK_ALIGNMENT, SECTOR_BYTES, SM100
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, FP32, PAIR_ROWS
from flashdsa.kernels.catalog import MLA_BWD
from flashdsa.problem import D_QK

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

PLANS = {(plan.group_heads, plan.deterministic): plan for plan in MLA_BWD.plans}
"""Plans by heads of a query and whether they are deterministic."""
BLOCK_KEYS = BwdPlan().tile.keys
WORKSPACE_BYTES = 1 << 30
"""Bytes of the slots' rows; more only if a single query needs more. The gradients' bits do not
depend on it: a key adds in the order of all slots, however many of them are taken at a time."""

Launch = Callable[..., Any]
"""A compiled function: see `kernels.attention.sm100.bwd.kernel.launch_backward`."""
Part = tuple[slice, tuple[Tensor, ...]]
"""Queries of a launch, and the tensors that it takes after dkv."""


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
    options: dict[str, Any] = {"sm_scale": sm_scale, "dkv_dtype": dkv_dtype, "pairs": pairs}
    how: Any = partial(run, function, deterministic=deterministic, **options)
    return runner.on_device(lambda given: how(kind(*given)))


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
        q, kv, dO, O = (readable(x) for x in (q, kv, dO, O))
        with_sink, indices = with_sink.contiguous(), indices.contiguous()
        topk_length = topk_length.contiguous()
        parts: Iterable[Part] = [(slice(None), ())]
        if num_heads < PAIR_ROWS:
            parts = groups_at_a_time(q, indices)
        else:
            indices = torch.nn.functional.pad(indices, (0, -topk % BLOCK_KEYS), value=-1)
            if deterministic:
                parts = slots_at_a_time(indices, topk_length, kv)
        for part, lists in parts:
            launch_checked(
                launch,
                q[part],
                kv,
                dO[part],
                with_sink[part],
                O[part],
                indices[part],
                topk_length[part],
                delta[part],
                dq[part],
                dkv,
                *lists,
                sm_scale,
                pairs,
            )
        if attn_sink is not None:
            d_sink = sink_backward(lse, attn_sink, delta)[1]
    else:
        dq.zero_()
    return dq, dkv.to(dkv_dtype), dkv.new_empty(0, dtype=dkv_dtype), d_sink


def slots_at_a_time(indices: Tensor, topk_length: Tensor, kv: Tensor) -> Iterator[Part]:
    """As many queries at a time as have room for their slots' rows: each slot of `indices` gets a
    row of its own; then every key adds the rows of its slots in the order of the slots
    (docs/decisions/0012)."""
    num_queries, topk = indices.shape
    at_a_time = queries_at_a_time(num_queries, topk)
    slots = torch.empty(at_a_time * topk, kv.shape[1], dtype=torch.float32, device=kv.device)
    for first in range(0, num_queries, at_a_time):
        part = slice(first, first + at_a_time)
        order, starts = slot_order(indices[part], topk_length[part], kv.shape[0])
        yield part, (slots[: order.shape[0]], order, starts)


def queries_at_a_time(num_queries: int, topk: int) -> int:
    """Number of queries that have room, in whole waves of the GPU if that is possible."""
    room = max(1, WORKSPACE_BYTES // (topk * D_QK * FP32))
    wave = SM100.num_sms // CLUSTER
    whole_waves = room - room % wave if room >= wave else room
    return min(num_queries, whole_waves)


def slot_order(indices: Tensor, topk_length: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """(order, starts) int32: key k has the slots order[starts[k]:starts[k + 1]], ascending.

    Args:
        indices: (S, topk) int32. topk_length: (S,) int32.

    Returns:
        order: (S * topk,), the invalid slots after all others. starts: (num_keys + 1,).
    """
    position = torch.arange(indices.shape[1], device=indices.device)
    valid = (indices >= 0) & (indices < num_keys) & (position < topk_length[:, None])
    of_slot = torch.where(valid, indices, num_keys).flatten()
    keys, order = torch.sort(of_slot, stable=True)
    every_key = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return order.int(), torch.searchsorted(keys, every_key, out_int32=True)


def groups_at_a_time(q: Tensor, indices: Tensor) -> Iterator[Part]:
    """As many groups of queries at a time as their unions have room for."""
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
        yield part, (rows[own], members[own], *(one[own] for one in numbers))


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
