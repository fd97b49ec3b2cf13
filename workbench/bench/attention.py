"""Sparse MLA beside FlashMLA (forward, decode) and cuDNN Frontend (backward): cases and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.bench import attention
from flashdsa.bench.attention import (
    AttentionInputs,
    BackwardInputs,
    decode_case,
    judge_backward,
    judge_forward,
)
from flashdsa.bench.cases import Case, Task, Verdict
from flashdsa.bench.runner import Peer
from flashdsa.bench.timer import Call
from flashdsa.problem import D_QK, D_V, PAGE_SIZE
from workbench.bench.top_ks import cudnn_function

FLASH_MLA_HEADS, FLASH_MLA_TOPK = 64, 128
"""Its kernels take multiples of these; q is padded with zeros, lists with -1."""
Prepared = tuple[Call, Callable[[Any], Verdict]]


def flash_mla_forward(case: Case, task: Task) -> Prepared:
    """FlashMLA's sparse prefill, of the package sgl-flash-mla."""
    peer = import_module("flash_mla").flash_mla_sparse_fwd
    x: AttentionInputs = task.inputs
    q, sink, ids, lengths = _padded(x.q), x.attn_sink, x.indices, x.topk_length
    if case.topk % FLASH_MLA_TOPK:
        if lengths is None:
            lengths = torch.full((case.s,), case.topk, dtype=torch.int32, device=q.device)
        ids = pad(ids, (0, -case.topk % FLASH_MLA_TOPK), value=-1)
    if sink is not None:
        sink = pad(sink, (0, q.shape[1] - case.h))
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
    return call, lambda found: judge_forward(x, found[0][:, : case.h])


def flash_mla_decode(case: Case, task: Task, *, lengths: bool = False) -> Prepared:
    """FlashMLA's decode of packed rows, its metadata made outside the clock.

    It is judged as if every slot were in use, as it is without `lengths`: those of requests.
    """
    if not case.options["packed"]:
        raise NotImplementedError("takes packed rows only")
    module = import_module("flash_mla")
    x: AttentionInputs = task.inputs
    next_n = int(case.options["next_n"])
    q = _padded(x.q).view(case.s // next_n, next_n, -1, D_QK)
    cache = x.kv.view(-1, PAGE_SIZE, 1, x.kv.shape[1])
    ids = x.indices.view(*q.shape[:2], -1)
    plan, _ = module.get_mla_metadata()
    more = {}
    if lengths:
        if x.topk_length is None:
            raise NotImplementedError("no lengths are given")
        more["topk_length"] = x.topk_length.view(-1, next_n).amax(1)

    def call() -> Any:
        operands = q, cache, None, None, D_V, plan, None, D_QK**-0.5, False, True, ids
        return module.flash_mla_with_kvcache(*operands, use_legacy=True, **more)

    every_slot = x._replace(topk_length=None)
    heads = q.shape[2]
    return call, lambda found: judge_forward(
        every_slot, found[0].reshape(case.s, heads, D_V)[:, : case.h]
    )


def cudnn_backward(case: Case, task: Task) -> Prepared:
    """cuDNN Frontend's backward from our O and lse, compiled ahead or by its own wrapper."""
    if case.options.get("deterministic"):
        raise NotImplementedError("not deterministic on Hopper")
    peer = cudnn_function("sparse_attention_backward_wrapper")
    x: BackwardInputs = task.inputs
    forward, sink = x.forward, x.forward.attn_sink
    if sink is None:
        sink = torch.full((case.h,), -torch.inf, device=forward.q.device)
    operands = (forward.q, forward.kv, x.out, x.d_out, x.lse, sink, forward.indices)
    call = partial(peer, *operands, topk_length=forward.topk_length)
    return call, lambda found: judge_backward(x, found["dq"], found["dkv"])


def _padded(q: Tensor) -> Tensor:
    return pad(q, (0, 0, 0, -q.shape[1] % FLASH_MLA_HEADS))


_CORRELATED = attention.FORWARD_CASES[1]
FORWARD_CASES = (
    *attention.FORWARD_CASES,
    replace(_CORRELATED, h=8, name="H=8, correlated"),
    replace(_CORRELATED, h=20, name="H=20, padded to 64"),
    replace(_CORRELATED, h=100, name="H=100, padded to 128"),
    replace(_CORRELATED, topk=2000, name="H=128, topk = 2,000"),
    replace(_CORRELATED, s=140, name="H=128, 140 queries"),
)
DECODE_CASES = (
    *attention.DECODE_CASES,
    decode_case(128, 1, kind="bf16"),
    decode_case(128, 64, kind="bf16"),
    decode_case(16, 128, kind="bf16"),
    decode_case(64, 128, kind="ragged"),
)
BACKWARD_CASES = (
    *attention.BACKWARD_CASES,
    *(
        replace(case, s_kv=131072, name=f"{case.name}, 128K rows")
        for case in attention.BACKWARD_CASES[:7]
        if case.h != 32
    ),
)
FORWARD_PEERS: dict[str, Peer] = {"FlashMLA": flash_mla_forward}
DECODE_PEERS: dict[str, Peer] = {"FlashMLA": flash_mla_decode}
BACKWARD_PEERS: dict[str, Peer] = {"cuDNN Frontend": cudnn_backward}
