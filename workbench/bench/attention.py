"""Sparse MLA of FlashMLA (forward, decode) and cuDNN Frontend (backward)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.bench import attention as ours
from flashdsa.bench.cases import Case, Task, Verdict
from flashdsa.bench.timer import Call
from flashdsa.problem import D_QK, D_V, PAGE_SIZE
from workbench.bench.top_ks import cudnn_function

FLASH_MLA_HEADS, FLASH_MLA_TOPK = 64, 128
"""Its kernels take multiples of these; q is padded with zeros, lists with -1."""
Prepared = tuple[Call, Callable[[Any], Verdict]]


def flash_mla_forward(case: Case, task: Task) -> Prepared:
    """FlashMLA's sparse prefill, of the package sgl-flash-mla."""
    peer = import_module("flash_mla").flash_mla_sparse_fwd
    x: ours.AttentionInputs = task.inputs
    q, sink = padded_heads(x.q, x.attn_sink)
    ids, lengths = padded_lists(x.indices, x.topk_length)
    call = partial(
        peer,
        q,
        x.kv[:, None],
        ids[:, None],
        D_QK**-0.5,
        attn_sink=sink,
        topk_length=lengths,
        use_legacy=True,
    )
    return call, lambda found: ours.judge_forward(x, found[0][:, : case.h])


def flash_mla_decode(case: Case, task: Task) -> Prepared:
    """FlashMLA's decode of packed rows, its metadata made outside the clock.

    Its kernel for these rows refuses lengths: every slot is in use.
    """
    if not case.options["packed"]:
        raise NotImplementedError("takes packed rows only")
    module = import_module("flash_mla")
    x: ours.AttentionInputs = task.inputs
    next_n = int(case.options["next_n"])
    q = padded_heads(x.q)[0].view(case.s // next_n, next_n, -1, D_QK)
    cache = x.kv.view(-1, PAGE_SIZE, 1, x.kv.shape[1])
    ids = x.indices.view(*q.shape[:2], -1)
    plan, _ = module.get_mla_metadata()

    def call() -> Any:
        operands = q, cache, None, None, D_V, plan, None, D_QK**-0.5, False, True, ids
        return module.flash_mla_with_kvcache(*operands, use_legacy=True)

    every_slot = x._replace(topk_length=None)
    heads = q.shape[2]
    return call, lambda found: ours.judge_forward(
        every_slot, found[0].reshape(case.s, heads, D_V)[:, : case.h]
    )


def cudnn_backward(case: Case, task: Task) -> Prepared:
    """cuDNN Frontend's backward from our O and lse, compiled ahead or by its own wrapper."""
    peer = cudnn_function("sparse_attention_backward_wrapper")
    x: ours.BackwardInputs = task.inputs
    forward, sink = x.forward, x.forward.attn_sink
    if sink is None:
        sink = torch.full((case.h,), -torch.inf, device=forward.q.device)
    operands = (forward.q, forward.kv, x.out, x.d_out, x.lse, sink, forward.indices)
    call = partial(peer, *operands, topk_length=forward.topk_length)
    return call, lambda found: ours.judge_backward(x, found["dq"], found["dkv"])


def padded_heads(q: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """q and the sink with as many heads as FlashMLA takes."""
    missing = -q.shape[1] % FLASH_MLA_HEADS
    return pad(q, (0, 0, 0, missing)), None if sink is None else pad(sink, (0, missing))


def padded_lists(ids: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Lists with as many slots as FlashMLA's prefill takes, and lengths that say where they end."""
    queries, topk = ids.shape
    if topk % FLASH_MLA_TOPK == 0:
        return ids, lengths
    if lengths is None:
        lengths = torch.full((queries,), topk, dtype=torch.int32, device=ids.device)
    return pad(ids, (0, -topk % FLASH_MLA_TOPK), value=-1), lengths
