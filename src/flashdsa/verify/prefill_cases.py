"""Cases of the indexer over shared keys: which keys each query sees, and what is planted there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.problem import INDEX_HEAD_DIM
from flashdsa.reference import quantize_index_k, quantize_index_q
from flashdsa.verify.indexer_cases import Selection, draw_candidates
from flashdsa.verify.layouts import poisoned_rows, strided_copy

SPARE_KEYS = 9
"""Rows behind all ranges, which nobody may read to effect."""


@dataclass(frozen=True)
class PrefillCase(Selection):
    """One call; keys and queries are normal numbers, quantised where the dtype is e4m3."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    """(start, end) of each query."""
    topk: int
    num_heads: int = 64
    dtype: torch.dtype = torch.float8_e4m3fn
    no_starts: bool = False
    """Called without starts: all of them are 0."""

    @property
    def num_keys(self) -> int:
        return max((end for _, end in self.ranges), default=0) + SPARE_KEYS


@dataclass(frozen=True)
class PrefillInputs:
    """q_index (S, H, 128), k_index (S_kv, 128), weights (S, H), starts, ends (S,), k_scale,
    candidates (S, num_candidates) or None."""

    case: PrefillCase
    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    starts: Tensor | None
    ends: Tensor
    k_scale: Tensor | None
    candidates: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """The operation's inputs, in its order."""
        return self.q_index, self.k_index, self.weights, self.starts, self.ends

    @property
    def options(self) -> dict[str, Any]:
        return {"k_scale": self.k_scale}

    @property
    def choices(self) -> dict[str, Any]:
        """Arguments that the selection and its reference have under one name."""
        case = self.case
        return {"sorted": case.sorted, "block": case.block, "candidates": self.candidates}

    def output_buffer(self) -> Tensor:
        """`[S, topk]` int32 full of poison, strided where the case says so."""
        queries, case = len(self.case.ranges), self.case
        return poisoned_rows(queries, case.topk, device=self.ends.device, strided=case.strided)


def make_prefill_inputs(
    case: PrefillCase, seed: int, device: str | torch.device = "cpu"
) -> PrefillInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device.

    Keys that no query sees are NaN or enormous: they would win, or show, if they were read.
    """
    generator = torch.Generator().manual_seed(seed)
    queries, heads, keys = len(case.ranges), case.num_heads, case.num_keys
    distinct = 5 if case.plateaus else keys
    k = torch.randn(distinct, INDEX_HEAD_DIM, generator=generator)
    k = k * torch.exp2(torch.randn(distinct, 1, generator=generator))
    if case.plateaus:
        k = k[torch.randint(distinct, (keys,), generator=generator)]
    if case.zero_scores:
        k[0::2] = 0
    if case.nan_keys:
        k[3::7, 5] = torch.nan
    q = torch.randn(queries, heads, INDEX_HEAD_DIM, generator=generator)
    weights = torch.randn(queries, heads, generator=generator).abs()
    if case.zero_scores:
        weights[:, 0::2], weights[:, 1::2] = 0.0, -0.0
    if case.negative_weights:
        weights[0::2, 0::2] *= -1
        weights[1::2, 1::2] *= -1
    seen = torch.zeros(keys, dtype=torch.bool)
    for start, end in case.ranges:
        seen[start:end] = True
    k[~seen] = torch.nan
    scale = None
    if case.dtype == torch.float8_e4m3fn:
        codes, scale = quantize_index_k(k)
        if case.nan_keys:
            scale[6::11] = torch.nan
        scale[~seen] = 1e6
        q_codes, weights = quantize_index_q(q, weights)
        q, k = q_codes.view(case.dtype), codes.view(case.dtype)

    def finish(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype).to(device)
        if not case.strided:
            return x
        if dtype == torch.float8_e4m3fn:
            return strided_copy(x.view(torch.uint8)).view(dtype)
        return strided_copy(x)

    lengths = [end - start for start, end in case.ranges]
    candidates = draw_candidates(lengths, case.block, case.num_candidates, generator)
    bounds = torch.tensor(case.ranges, dtype=torch.int32).view(-1, 2)
    starts, ends = (bounds[:, side].contiguous().to(device) for side in (0, 1))
    assert not case.no_starts or not starts.any()
    return PrefillInputs(
        case,
        finish(q, case.dtype),
        finish(k, case.dtype),
        finish(weights, torch.float32),
        None if case.no_starts else starts,
        ends,
        None if scale is None else scale.to(device),
        None if candidates is None else finish(candidates, torch.int32),
    )


def causal(queries: int, keys: int, first_key: int = 0) -> tuple[tuple[int, int], ...]:
    """Return ranges of the last `queries` of a sequence of `keys` that begins at `first_key`."""
    return tuple((first_key, first_key + keys - queries + s + 1) for s in range(queries))
