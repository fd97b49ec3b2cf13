"""The ids that the indexer must give for `exact_inputs`, and those that it gives."""

from __future__ import annotations

import torch
from torch import Tensor

import flashdsa
from flashdsa.problem import PAGE_KEY_BYTES
from tests.kernels.indexer.exact_inputs import Inputs


def expected_ids(inputs: Inputs, topk: int, by_score: bool = False) -> Tensor:
    """The contract in torch, row by row, bad lengths and pages included."""
    cache = inputs.k_index_cache_fp8.view(torch.uint8).view(-1, 8448)
    out = inputs.output(topk, fill=-1)
    offsets = torch.arange(64, device=cache.device)
    width = inputs.block_table.shape[1] * 64
    for row, length in enumerate(inputs.seq_lens.tolist()):
        length = min(max(length, 0), width)
        pages = inputs.block_table[row, : -(-length // 64)].long()
        good = (pages >= 0) & (pages < len(cache))
        valid = good.repeat_interleave(64)[:length]
        ids = (pages[:, None] * 64 + offsets).flatten()[:length][valid]
        if not by_score and length <= topk:
            out[row, : len(ids)] = ids.int()
            continue
        bytes_ = cache[pages.where(good, 0)]
        keys = bytes_[:, :PAGE_KEY_BYTES].contiguous().view(torch.float8_e4m3fn).view(-1, 128)
        scales = bytes_[:, PAGE_KEY_BYTES:].contiguous().view(torch.float32).flatten()
        dots = inputs.q_index_fp8[row].double() @ keys.double().t()
        scores = (dots.clamp_min(0) * inputs.weights[row].double()[:, None]).sum(0) * scales
        scores = scores[:length][valid].nan_to_num(nan=-torch.inf) + 0.0
        best = scores.sort(descending=True, stable=True).indices[:topk]
        best = best if by_score else best.sort().values
        out[row, : len(best)] = ids[best].int()
    return out


def select(inputs: Inputs, topk: int, by_score: bool = False) -> Tensor:
    """The operation's ids."""
    ids = inputs.output(topk)
    flashdsa.dsa_topk_indexer(*inputs, ids, sorted=by_score, backend="sm90")
    return ids
