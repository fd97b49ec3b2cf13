"""Compressed entries on Hopper GPUs: a kernel for the models' sizes, else torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu import entries as cpu
from flashdsa.backends.memory import aligned, readable
from flashdsa.backends.runner import Runner, by_torch
from flashdsa.kernels.catalog import COMPRESS_KV
from flashdsa.kernels.entries.sm90 import plan as sizes

if TYPE_CHECKING:
    from flashdsa.ops.entries import CompressKvBwdOperands, CompressKvOperands


def bind(
    runner: Runner, operands: CompressKvOperands, *, ratio: int, overlap: bool, eps: float
) -> Callable[[Sequence[Any]], Tensor]:
    """Entries (num_entries, d)."""
    kind, tokens = type(operands), len(operands.kv)
    plan = _plan(operands, ratio, overlap)
    has_state = operands.state is not None
    if plan is None or tokens < (1 if has_state else ratio):
        return by_torch(cpu.forward, runner, operands, ratio=ratio, overlap=overlap, eps=eps)
    function = runner.function(COMPRESS_KV, replace(plan, state=has_state))
    spare = (len(operands.cu_seqlens) - 1) * (ratio - 1) if has_state else 0
    empty = runner.allocator((tokens + spare) // ratio, plan.d, dtype=torch.bfloat16)

    def serve(given: Sequence[Any]) -> Tensor:
        x, entries = kind(*given), empty()
        kept = (None if one is None else readable(one) for one in (x.state, x.seen))
        function(*_arguments(x, plan), *kept, eps, entries)
        return entries

    return runner.on_device(serve)


def bind_backward(
    runner: Runner, operands: CompressKvBwdOperands, *, ratio: int, overlap: bool, eps: float
) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
    """d_kv, d_gate, d_ape and d_norm_weight."""
    kind, (tokens, width) = type(operands), operands.kv.shape
    forward = _plan(operands, ratio, overlap)
    if forward is None or tokens < ratio:
        return by_torch(cpu.backward, runner, operands, ratio=ratio, overlap=overlap, eps=eps)
    plan = replace(forward, gradient=True)
    run = _bind_whole if plan.whole else _bind_sliced
    compute = run(runner, plan, tokens // ratio, eps)
    empty = runner.allocator(tokens, width, dtype=torch.bfloat16)
    nothing = runner.allocator(0, dtype=torch.float32)

    def serve(given: Sequence[Any]) -> tuple[Tensor, ...]:
        x = kind(*given)
        d_kv, d_gate = empty(), empty()
        parts = compute(_arguments(x, plan), readable(x.grad_entries), d_kv, d_gate)
        sums = (
            nothing() if part is None or weight is None else part.sum(0).to(weight.dtype)
            for part, weight in zip(parts, (x.ape, x.norm_weight), strict=True)
        )
        return d_kv, d_gate, *sums

    return runner.on_device(serve)


Compute = Callable[..., tuple[Tensor | None, Tensor | None]]
"""Function that writes the gradients of kv and gate: of the arguments of both directions, the
entries' gradient and the two. It returns parts of those of `ape` and of the norm's weight."""


def _bind_whole(runner: Runner, plan: sizes.CompressPlan, entries: int, eps: float) -> Compute:
    """One launch, whose CTAs have all slots of some entries."""
    function = runner.function(COMPRESS_KV, plan)
    ctas = min(-(-entries // plan.entries), plan.resident * runner.num_sms)
    width = plan.d * (1 + plan.overlap)
    of_ape = runner.allocator(ctas, plan.ratio, width, dtype=torch.float32)
    of_weight = runner.allocator(ctas * plan.entries, plan.d, dtype=torch.float32)

    def compute(
        arguments: Sequence[Any], grad: Tensor, *written: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        parts = of_ape() if plan.ape else None, of_weight() if plan.finished else None
        function(*arguments, eps, grad, *written, *parts, ctas)
        return parts

    return compute


def _bind_sliced(runner: Runner, plan: sizes.CompressPlan, entries: int, eps: float) -> Compute:
    """Two launches: numbers of each entry's columns, then slices of the columns of all entries."""
    numbers_of = runner.function(COMPRESS_KV, plan)
    sliced = replace(plan, sliced=True)
    function = runner.function(COMPRESS_KV, sliced)
    stripes = min(entries, max(1, sliced.resident * runner.num_sms * sizes.SLICE // plan.d))
    of_columns = runner.allocator(entries * sizes.NUMBERS, plan.d, dtype=torch.float32)
    of_ape = runner.allocator(stripes * plan.ratio, plan.d, dtype=torch.float32)

    def compute(
        arguments: Sequence[Any], grad: Tensor, *written: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        numbers, parts = of_columns(), of_ape()
        numbers_of(*arguments, eps, grad, numbers, *written)
        function(*arguments, numbers, *written, parts, stripes)
        weight = numbers.unflatten(0, (entries, sizes.NUMBERS))[:, sizes.NUMBERS - 1]
        return parts.unflatten(0, (stripes, plan.ratio)), weight

    return compute


def _plan(
    x: CompressKvOperands | CompressKvBwdOperands, ratio: int, overlap: bool
) -> sizes.CompressPlan | None:
    """The plan of a call, without its direction; None where no kernel serves it."""
    finished = x.norm_weight is not None
    half = None if x.cos is None else x.cos.shape[1]
    for plan in sizes.MODELS:
        served = (ratio, overlap, x.kv.shape[1], x.ape is not None, finished, half) == (
            plan.ratio,
            plan.overlap,
            plan.d * (1 + plan.overlap),
            plan.ape,
            plan.finished,
            sizes.ROTATED // 2 if plan.finished else None,
        )
        if served and x.kv.dtype is torch.bfloat16:
            return plan
    return None


def _arguments(
    x: CompressKvOperands | CompressKvBwdOperands, plan: sizes.CompressPlan
) -> tuple[Tensor | None, ...]:
    """Arguments of both directions as kernels read them."""
    # Of one sequence the offset behind it will do: it is no less than the number of its entries,
    # and the kernels leave out windows that the sequence does not have.
    offsets = x.cu_seqlens.contiguous()
    ends = offsets[1:]
    seen = getattr(x, "seen", None)
    if seen is not None:
        counts = (seen % plan.ratio + offsets.diff()) // plan.ratio  # a sum that int32 holds
        ends = counts.cumsum(0, dtype=torch.int32)
    elif len(ends) > 1:
        ends = (offsets.diff() // plan.ratio).cumsum(0, dtype=torch.int32)
    more = (x.ape, x.norm_weight, x.cos, x.sin)
    ape, weight, cos, sin = (None if y is None else readable(y.float()) for y in more)
    weight = None if weight is None else weight[None]
    return _rows(x.kv), _rows(x.gate), offsets, ends, ape, weight, cos, sin


def _rows(x: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, which may lie apart."""
    reads = x.stride(1) == 1 and x.stride(0) % sizes.ROW_ALIGNMENT == 0
    return aligned(x) if reads else readable(x)
