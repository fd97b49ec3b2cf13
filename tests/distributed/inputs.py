"""Inputs of the checks, what one process makes of them, and what a call must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import flashdsa

D_QK, D_V, HEADS, TOPK = 24, 16, 4, 20


class Whole(NamedTuple):
    """q (S, H, d_qk), kv (S, d_qk), positions (S, topk) int32, sink (H,), d_out (S, H, d_v)."""

    q: Tensor
    kv: Tensor
    positions: Tensor
    sink: Tensor
    d_out: Tensor


def whole(seq_len: int, dtype: torch.dtype, seed: int = 0) -> Whole:
    """Every query names keys before it, some more than once, and invalid slots."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    share = torch.rand(seq_len, TOPK, generator=generator)
    positions = (share * torch.arange(1, seq_len + 1)[:, None]).int()
    positions[torch.rand(seq_len, TOPK, generator=generator) < 0.1] = -1
    positions[seq_len // 3] = -1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Whole(
        normal(seq_len, HEADS, D_QK),
        normal(seq_len, D_QK),
        positions,
        torch.randn(HEADS, generator=generator).to(wide),
        normal(seq_len, HEADS, D_V),
    )


class Result(NamedTuple):
    """O and the gradients of q, kv and the sink."""

    out: Tensor
    dq: Tensor
    dkv: Tensor
    d_sink: Tensor


def one_process(x: Whole) -> Result:
    """What a process that holds everything computes."""
    q, kv, sink = (one.clone().requires_grad_() for one in (x.q, x.kv, x.sink))
    out = flashdsa.sparse_mla(q, kv, x.positions, d_v=D_V, attn_sink=sink, deterministic=True)
    return Result(out.detach(), *torch.autograd.grad(out, (q, kv, sink), x.d_out))


Call = Callable[[], object]


def require_error(call: Call, kind: type[Exception], *parts: str) -> Exception:
    """The error: `call` raises `kind` with all `parts` in its message."""
    try:
        call()
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return error
    raise AssertionError(f"expected {kind.__name__}: {parts}")
