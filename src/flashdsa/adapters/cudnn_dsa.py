"""cuDNN Frontend's sparse attention: `from flashdsa.adapters.cudnn_dsa import DSA`.

The functions of `cudnn.deepseek_sparse_attention` (1.32) that run and train attention, and its
top-k. Scores of the indexer and its training are not here: they are of bf16 or block-scaled keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.adapters.arguments import best_positions, copy_into, with_a_column
from flashdsa.dispatch.checks import as_int32
from flashdsa.errors import ArgumentValueError
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.attention_backward import mla_bwd
from flashdsa.ops.blocks import valid_first
from flashdsa.problem import D_V


class TupleDict(dict[str, Any]):
    """Results by name, by number, and in their order when unpacked."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    trusted_compact_metadata: bool = False,
) -> TupleDict:
    """Differentiable sparse attention, by `flashdsa.sparse_mla`.

    Args:
        q: (S, H, d_qk) bf16. kv: (S_kv, d_qk). indices: (S, topk) int32, any values.
        attn_sink: (H,) fp32. softmax_scale: ``d_qk ** -0.5`` by default.
        topk_length: (S,) int32.
        trusted_compact_metadata: not used: every slot is checked, at no cost.

    Returns:
        out (S, H, 512), max_logits and lse (S, H) fp32 of the keys without the sink, natural, not
        differentiable; -inf and +inf for a query without a valid slot.
    """
    out, lse, max_logits = sparse_mla_fwd(
        q,
        kv,
        with_a_column(indices),
        d_v=D_V,
        sm_scale=softmax_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        return_max_logits=True,
    )
    return TupleDict(out=out, max_logits=max_logits, lse=lse)


def sparse_attention_forward_wrapper(
    q: Tensor,
    kv: Tensor,
    topk_idxs: Tensor,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    softmax_scale: float | None = None,
    indexer_topk: int = 0,
    stream: Any = None,
) -> TupleDict:
    """`sparse_attention` without gradients.

    Args:
        indexer_topk: 0, or of how many of the first slots `lse_indexer` is; a second pass.
        stream: a CUDA stream as torch, cuda-python or an integer has it; torch's current one by
            default. Others: as for `sparse_attention`.

    Returns:
        out, max_logits, lse, and lse_indexer (S, H) fp32, or None with indexer_topk=0.
    """
    if not 0 <= indexer_topk <= topk_idxs.shape[-1]:
        raise ArgumentValueError(
            f"indexer_topk: expected 0 to {topk_idxs.shape[-1]}, the columns of topk_idxs; "
            f"got {indexer_topk}"
        )
    with torch.no_grad(), _on_stream(stream, q):
        result = sparse_attention(
            q, kv, topk_idxs, attn_sink, softmax_scale=softmax_scale, topk_length=topk_length
        )
        of_first = None
        if indexer_topk:
            first = topk_idxs[:, :indexer_topk].contiguous()
            of_first = sparse_attention(
                q, kv, first, softmax_scale=softmax_scale, topk_length=topk_length
            )["lse"]
    return TupleDict(**dict(result.items()), lse_indexer=of_first)


def sparse_attention_backward_wrapper(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    dq: Tensor | None = None,
    dkv: Tensor | None = None,
    block_tile: int = 64,
    deterministic: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    q_cluster_mode: str = "off",
) -> TupleDict:
    """Gradients of `sparse_attention`, by `flashdsa.mla_bwd`, whose order is dO, lse, O.

    Args:
        q, kv, topk_idxs, softmax_scale, topk_length: the forward's.
        out, lse: what it returned. dout: the gradient of out.
        attn_sink: (H,) fp32; -inf everywhere stands for none.
        dq, dkv: buffers for the results.
        block_tile, workspace, q_cluster_mode: not used: choices of cuDNN's kernels.
        deterministic: bit-identical from run to run.
        stream: see `sparse_attention_forward_wrapper`.

    Returns:
        dq (S, H, d_qk) and dkv (S_kv, d_qk) in q's dtype, d_sink (H,) fp32.
    """
    with torch.no_grad(), _on_stream(stream, q):
        gradients = mla_bwd(
            q,
            kv,
            dout,
            lse,
            out,
            with_a_column(topk_idxs),
            sm_scale=softmax_scale,
            topk_length=topk_length,
            attn_sink=attn_sink,
            deterministic=deterministic,
            dkv_dtype=kv.dtype,
        )
        return TupleDict(
            dq=copy_into(dq, gradients[0]), dkv=copy_into(dkv, gradients[1]), d_sink=gradients[-1]
        )


def indexer_top_k_wrapper(
    input_values: Tensor,
    seq_lens: Tensor,
    top_k: int,
    next_n: int = 1,
    return_val: bool = True,
    num_copy_bits: int = 256,
    stream: Any = None,
    tie_break: int = 0,
    deterministic: bool = False,
) -> TupleDict:
    """The best scores of each row, by `flashdsa.topk_indices`, exact.

    Args:
        input_values: (rows, columns) fp32, bf16 or fp16 (made fp32, exactly).
        seq_lens: (rows / next_n,) int32; row j of a group of next_n sees next_n - 1 - j fewer.
        top_k: how many. return_val: whether values are wanted, too.
        num_copy_bits: not used. stream: see `sparse_attention_forward_wrapper`.
        tie_break: 0 (any), 1 (the smallest index) or 2 (the largest).
        deterministic: not used: always so, in ascending order.

    Returns:
        indices (rows, top_k) int32 with -1 behind those of a short row, and values in the dtype of
        input_values with -inf there, or None.
    """
    if len(input_values) != len(seq_lens) * next_n:
        raise ArgumentValueError(
            f"input_values: expected {len(seq_lens)} x next_n = {len(seq_lens) * next_n} rows; "
            f"got {len(input_values)}"
        )
    with torch.no_grad(), _on_stream(stream, input_values):
        back = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
        lengths = (as_int32(seq_lens, 0).to(torch.int32)[:, None] + back).clamp_(0).flatten()
        indices = best_positions(input_values, lengths, top_k, tie_break)
        values = None
        if return_val:
            columns = input_values if input_values.shape[1] else pad(input_values, (0, 1))
            chosen = columns.gather(1, indices.clamp_min(0).long())
            values = chosen.masked_fill(indices < 0, -torch.inf)
    return TupleDict(indices=indices, values=values)


def local_to_global_wrapper(
    local_indices: Tensor,
    seqlen_k: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """Ids within a sequence as ids in all keys; negative ones become -1.

    Args:
        local_indices: (B, S, topk), or packed (T, topk) with both `cu_seqlens`, int32 or int64.
        seqlen_k: keys of a sequence where they are not packed.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, where sequences begin.

    Returns:
        indices int32 in the shape of local_indices.
    """
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ArgumentValueError("cu_seqlens_q, cu_seqlens_k: expected both or none")
    packed = cu_seqlens_q is not None
    if local_indices.dim() != (2 if packed else 3):
        raise ArgumentValueError(
            "local_indices: expected [B, S, topk], or with cu_seqlens [T, topk]; "
            f"got {list(local_indices.shape)}"
        )
    with _on_stream(stream, local_indices):
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            token = torch.arange(len(local_indices), device=local_indices.device)
            lasts = cu_seqlens_q[1:].long().contiguous()
            sequence = torch.searchsorted(lasts, token, right=True)
            first = cu_seqlens_k.long()[sequence][:, None]
        else:
            batch = torch.arange(len(local_indices), device=local_indices.device)
            first = (batch * seqlen_k)[:, None, None]
        local = as_int32(local_indices, -1)
        moved = torch.where(local >= 0, local + first.long(), -1)
    return TupleDict(indices=as_int32(moved, -1))


def compactify_wrapper(indices: Tensor, stream: Any = None) -> TupleDict:
    """Each row's ids >= 0 first, in their order, then -1.

    Args:
        indices: (M, topk) or (B, S, topk) int32.

    Returns:
        indices (M or B * S, topk) int32, topk_length (M or B * S,) int32.
    """
    with _on_stream(stream, indices):
        compact, lengths = valid_first(indices.reshape(-1, indices.shape[-1]))
        return TupleDict(indices=compact, topk_length=lengths)


def _on_stream(stream: Any, tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, `stream` is torch's current one; None changes nothing."""
    if stream is None or not tensor.is_cuda:
        return nullcontext()
    return torch.cuda.stream(_torch_stream(stream, tensor.device))


def _torch_stream(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream as torch has it. Handle 0 is the default stream, for which torch's
    ExternalStream would take a new one, that waits for nothing."""
    if isinstance(stream, torch.cuda.Stream):
        return stream
    handle = int(stream)
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


class DSA:
    """The same functions as attributes, as `cudnn.deepseek_sparse_attention.DSA` has them."""

    sparse_attention = staticmethod(sparse_attention)
    sparse_attention_forward_wrapper = staticmethod(sparse_attention_forward_wrapper)
    sparse_attention_backward_wrapper = staticmethod(sparse_attention_backward_wrapper)
    indexer_top_k_wrapper = staticmethod(indexer_top_k_wrapper)
    local_to_global_wrapper = staticmethod(local_to_global_wrapper)
    compactify_wrapper = staticmethod(compactify_wrapper)
