"""Compressed entries on Hopper GPUs: a kernel for the models' sizes, else torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu import entries as by_torch
from flashdsa.backends.memory import aligned, readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import COMPRESS_KV
from flashdsa.kernels.entries.sm90.plan import MODELS, ROTATED, ROW_ALIGNMENT, CompressPlan

if TYPE_CHECKING:
    from flashdsa.ops.entries import CompressKvBwdOperands, CompressKvOperands


def bind(
    runner: Runner, operands: CompressKvOperands, *, ratio: int, overlap: bool, eps: float
) -> Callable[[Sequence[Any]], Tensor]:
    """Entries (num_entries, d)."""
    kind, tokens = type(operands), len(operands.kv)
    parameters: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "eps": eps}
    plan = _plan(operands, ratio, overlap)
    if plan is None or operands.state is not None or tokens < ratio:
        return runner.on_device(lambda given: by_torch.forward(kind(*given), **parameters))
    function = runner.function(COMPRESS_KV, plan)
    empty = runner.allocator(tokens // ratio, plan.d, dtype=torch.bfloat16)

    def serve(given: Sequence[Any]) -> Tensor:
        entries = empty()
        function(*_arguments(kind(*given), plan), eps, entries)
        return entries

    return runner.on_device(serve)


def bind_backward(
    runner: Runner, operands: CompressKvBwdOperands, *, ratio: int, overlap: bool, eps: float
) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
    """d_kv, d_gate, d_ape and d_norm_weight."""
    kind, (tokens, width) = type(operands), operands.kv.shape
    parameters: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "eps": eps}
    forward = _plan(operands, ratio, overlap)
    if forward is None or forward.groups > 1 or tokens < ratio:
        return runner.on_device(lambda given: by_torch.backward(kind(*given), **parameters))
    plan = replace(forward, gradient=True)
    function = runner.function(COMPRESS_KV, plan)
    ctas = min(-(-len(operands.grad_entries) // plan.entries), plan.resident * runner.num_sms)
    # The last row takes what has no token.
    empty = runner.allocator(tokens + 1, width, dtype=torch.bfloat16)
    no_sums = runner.allocator(0, dtype=torch.float32)
    parts = runner.allocator(ctas, ratio, width, dtype=torch.float32) if plan.ape else None
    rows = runner.allocator(ctas * plan.entries, plan.d, dtype=torch.float32)

    def serve(given: Sequence[Any]) -> tuple[Tensor, ...]:
        x = kind(*given)
        d_kv, d_gate = empty(), empty()
        for one in (d_kv, d_gate):
            _clear_unpooled(one, x.cu_seqlens, plan)
        d_ape = None if parts is None else parts()
        d_weight = rows() if plan.finished else None
        written = d_kv[:tokens], d_gate[:tokens], d_ape, d_weight, ctas
        function(*_arguments(x, plan), eps, readable(x.grad_entries), *written)
        sums = (
            no_sums() if parts is None or given is None else parts.sum(0).to(given.dtype)
            for parts, given in ((d_ape, x.ape), (d_weight, x.norm_weight))
        )
        return d_kv[:tokens], d_gate[:tokens], *sums

    return runner.on_device(serve)


def _clear_unpooled(x: Tensor, cu_seqlens: Tensor, plan: CompressPlan) -> None:
    """Set to 0 what no entry pools: the tokens of incomplete windows, and with overlap the first
    columns of each sequence's last complete one."""
    begins, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    complete = begins + (ends - begins) // plan.ratio * plan.ratio
    offset = torch.arange(plan.ratio, device=x.device)
    unused = len(x) - 1
    x.index_fill_(0, torch.where(complete + offset < ends, complete + offset, unused).flatten(), 0)
    if plan.overlap:
        last = torch.where(complete > begins, complete - plan.ratio + offset, unused)
        x[:, : plan.d].index_fill_(0, last.flatten(), 0)


def _plan(
    x: CompressKvOperands | CompressKvBwdOperands, ratio: int, overlap: bool
) -> CompressPlan | None:
    """The plan of a call, without its direction; None where no kernel serves it."""
    finished = x.norm_weight is not None
    half = None if x.cos is None else x.cos.shape[1]
    for plan in MODELS:
        served = (ratio, overlap, x.kv.shape[1], x.ape is not None, finished, half) == (
            plan.ratio,
            plan.overlap,
            plan.d * (1 + plan.overlap),
            plan.ape,
            plan.finished,
            ROTATED // 2 if plan.finished else None,
        )
        if served and x.kv.dtype is torch.bfloat16:
            return plan
    return None


def _arguments(
    x: CompressKvOperands | CompressKvBwdOperands, plan: CompressPlan
) -> tuple[Tensor | None, ...]:
    """Arguments of both directions as kernels read them."""
    # The offset behind a single sequence is no less than the number of its entries.
    ends = x.cu_seqlens[1:]
    if len(ends) > 1:
        ends = (x.cu_seqlens.diff() // plan.ratio).cumsum(0, dtype=torch.int32)
    more = (x.ape, x.norm_weight, x.cos, x.sin)
    ape, weight, cos, sin = (None if y is None else readable(y.float()) for y in more)
    weight = None if weight is None else weight[None]
    return _rows(x.kv), _rows(x.gate), x.cu_seqlens, ends, ape, weight, cos, sin


def _rows(x: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, which may lie apart."""
    reads = x.stride(1) == 1 and x.stride(0) % ROW_ALIGNMENT == 0
    return aligned(x) if reads else readable(x)
