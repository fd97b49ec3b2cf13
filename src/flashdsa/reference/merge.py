"""Attention over parts of the keys, merged: each query and head by the formula."""

import math

import torch
from torch import Tensor

from flashdsa.reference.quant import f64

__all__ = ["merge_attention"]


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """O `[S, H, d_v]` and lse `[S, H]` of P parts of such shapes, both float64.

    `lse = log sum_p exp(lse_p)`, `O = sum_p exp(lse_p - lse) O_p` over the parts that have a key:
    an lse of +inf says that a part has none. If there is no part, O = 0 and lse = +inf.
    """
    parts = [(f64(out), f64(lse)) for out, lse in zip(outs, lses, strict=True)]
    O, total = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], math.inf)
    for s in range(O.shape[0]):
        for h in range(O.shape[1]):
            own = [(out[s, h], lse[s, h]) for out, lse in parts if lse[s, h] != math.inf]
            if own:
                total[s, h] = torch.logsumexp(torch.stack([lse for _, lse in own]), dim=0)
                O[s, h] = sum(((lse - total[s, h]).exp() * out for out, lse in own), start=O[s, h])
    return O, total
