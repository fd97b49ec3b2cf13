"""What `bench sparse_mla_fwd` times on a GPU: prefills of shared and random keys, odd ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashdsa.operands import SparseMlaOperands
from flashdsa.problem import D_QK, D_V

CHANGED = 0.05
"""Of a list, from one query to the next, where ids are correlated."""
RANDOM, CORRELATED = "random", "correlated"
RANDOM_KEYS, CORRELATED_KEYS = 8192, 32768


@dataclass(frozen=True)
class ForwardCase:
    """One call to time.

    Attributes:
        ids: RANDOM: distinct, of RANDOM_KEYS rows; CORRELATED: 5 % of a list changes from one query
            to the next, of CORRELATED_KEYS rows, with a few repeats.
        lengths: topk_length is drawn from 1 to topk. invalid: 30 % of the slots name no row.
        sink: there are attention sinks. max_logits: they are asked for.
    """

    name: str
    heads: int
    ids: str = CORRELATED
    queries: int = 4096
    topk: int = 2048
    lengths: bool = False
    invalid: bool = False
    sink: bool = False
    max_logits: bool = False

    @property
    def num_keys(self) -> int:
        """S_kv."""
        return RANDOM_KEYS if self.ids == RANDOM else CORRELATED_KEYS

    def quick(self) -> ForwardCase:
        """The same, cut down to what takes no time."""
        return replace(self, queries=min(self.queries, 256), topk=min(self.topk, 256))


FORWARD_CASES = (
    ForwardCase("H=128, random", 128, RANDOM),
    ForwardCase("H=128, correlated", 128),
    ForwardCase("H=64, random", 64, RANDOM),
    ForwardCase("H=64, correlated", 64),
    ForwardCase("H=32, correlated", 32),
    ForwardCase("H=16, correlated", 16),
    ForwardCase("H=16, random", 16, RANDOM),
    ForwardCase("H=8, correlated", 8),
    ForwardCase("H=20, padded to 64", 20),
    ForwardCase("H=100, padded to 128", 100),
    ForwardCase("topk = 2,000", 128, topk=2000),
    ForwardCase("lengths from 1 to 2,048", 128, lengths=True),
    ForwardCase("30 % of the slots invalid", 128, invalid=True),
    ForwardCase("sinks and largest logits", 128, sink=True, max_logits=True),
    ForwardCase("140 queries", 128, queries=140),
)


@dataclass(frozen=True)
class ForwardInputs:
    """Operands of a case: q (S, H, 576), kv (S_kv, 576) bf16, indices (S, topk) int32, or None."""

    case: ForwardCase
    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None

    @property
    def operands(self) -> SparseMlaOperands:
        """As the public operation takes them."""
        return SparseMlaOperands(self.q, self.kv, self.indices, self.topk_length, self.attn_sink)

    @property
    def flop(self) -> float:
        """Of the slots that are valid."""
        valid = (self.indices >= 0).sum(1)
        if self.topk_length is not None:
            reached = torch.arange(self.case.topk, device=self.q.device) < self.topk_length[:, None]
            valid = ((self.indices >= 0) & reached).sum(1)
        return 2.0 * float(valid.sum()) * self.case.heads * (D_QK + D_V)


def draw_ids(case: ForwardCase, generator: torch.Generator, device: str) -> Tensor:
    """int32 (S, topk) of the case's kind, all valid."""
    shape, keys = (case.queries, case.topk), case.num_keys
    if case.ids == RANDOM:
        order = torch.rand(case.queries, keys, device=device, generator=generator).argsort(1)
        return order[:, : case.topk].int()
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    changed = max(1, round(case.topk * CHANGED))
    row = torch.randperm(keys, device=device, generator=generator)[: case.topk].int()
    places = torch.randint(case.topk, (case.queries, changed), device=device, generator=generator)
    fresh = torch.randint(
        keys, (case.queries, changed), device=device, generator=generator, dtype=torch.int32
    )
    for query in range(case.queries):
        row[places[query]] = fresh[query]
        ids[query] = row
    return ids


def make_forward_inputs(case: ForwardCase, device: str, seed: int = 0) -> ForwardInputs:
    """Standard normal q and kv; the same seed gives the same values on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    indices = draw_ids(case, generator, device)
    if case.invalid:
        bad = torch.rand(indices.shape, device=device, generator=generator) < 0.3
        indices.masked_fill_(bad, -1)
    lengths = sink = None
    if case.lengths:
        lengths = torch.randint(
            1, case.topk + 1, (case.queries,), device=device, generator=generator
        ).int()
    if case.sink:
        sink = torch.randn(case.heads, device=device, generator=generator)
    q, kv = normal(case.queries, case.heads, D_QK), normal(case.num_keys, D_QK)
    return ForwardInputs(case, q, kv, indices, lengths, sink)
