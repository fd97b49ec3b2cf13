"""What `bench sparse_mla_decode` times on a GPU: few queries over a cache far above L2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdsa.api import quantize_kv
from flashdsa.operands import SparseMlaOperands
from flashdsa.problem import D_QK, D_V, KV_ROW_BYTES

ROWS = 2**22
"""Of the cache: 2.75 GB of packed rows."""
BF16_ROWS = 2**20
TOPK = 2048
SHORT = 256
"""Slots in use of every other query where lengths are ragged."""
_BLOCK = 2**14
"""Rows with values of their own; the cache repeats them."""
_SHAPES = (
    (64, 1, 1),
    (64, 8, 1),
    (64, 32, 1),
    (64, 128, 1),
    (128, 1, 1),
    (128, 8, 1),
    (128, 64, 1),
    (128, 128, 2),
    (16, 8, 1),
    (16, 128, 1),
)
"""Heads, requests, queries of each."""
_RAGGED = ((64, 32, 1), (64, 128, 1), (64, 512, 1))


@dataclass(frozen=True)
class DecodeCase:
    """One call to time.

    Attributes:
        next_n: queries of a request. packed: rows of 656 bytes, else bf16.
        ragged: every other query has SHORT slots in use.
    """

    heads: int
    requests: int
    next_n: int = 1
    packed: bool = True
    ragged: bool = False

    @property
    def queries(self) -> int:
        """S."""
        return self.requests * self.next_n

    @property
    def name(self) -> str:
        """As the table writes it: H=64, 128 x 2, ragged."""
        several = f" x {self.next_n}" if self.next_n > 1 else ""
        kind = ", ragged" if self.ragged else "" if self.packed else ", bf16"
        return f"H={self.heads}, {self.requests}{several}{kind}"


def decode_cases(quick: bool = False) -> list[DecodeCase]:
    """Every case, in the order of the table; `quick`: the smallest of each kind."""
    shapes, ragged = (_SHAPES[:1], _RAGGED[:1]) if quick else (_SHAPES, _RAGGED)
    cases = [DecodeCase(*shape) for shape in shapes]
    cases += [DecodeCase(*shape, packed=False) for shape in shapes]
    return cases + [DecodeCase(*shape, ragged=True) for shape in ragged]


@dataclass(frozen=True)
class DecodeInputs:
    """Operands of a case: q (S, H, 576) bf16, kv (S_kv, 656) uint8 or (S_kv, 576) bf16, indices
    (S, topk) int32, topk_length (S,) int32 or None."""

    case: DecodeCase
    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None

    @property
    def operands(self) -> SparseMlaOperands:
        """As the public operation takes them."""
        return SparseMlaOperands(self.q, self.kv, self.indices, self.topk_length)

    @property
    def valid(self) -> int:
        """Slots that count, of all queries."""
        if self.topk_length is None:
            return self.indices.numel()
        return int(self.topk_length.sum())

    @property
    def flop(self) -> float:
        """Of the slots that count."""
        return 2.0 * self.valid * self.case.heads * (D_QK + D_V)

    @property
    def row_bytes(self) -> int:
        """Of a row of the cache."""
        return KV_ROW_BYTES if self.case.packed else 2 * D_QK


def make_cache(packed: bool, num_rows: int, device: str, seed: int = 0) -> Tensor:
    """Rows of standard normal values, packed with power-of-two scales or bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    block = torch.randn(min(num_rows, _BLOCK), D_QK, device=device, generator=generator).bfloat16()
    rows = quantize_kv(block) if packed else block
    return rows.repeat(num_rows // len(rows), 1)


def make_decode_inputs(
    case: DecodeCase, cache: Tensor, topk: int = TOPK, seed: int = 1
) -> DecodeInputs:
    """A query's ids are random rows of all the cache."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    shape = (case.queries, topk)
    indices = torch.randint(
        len(cache), shape, device=cache.device, generator=generator, dtype=torch.int32
    )
    q = torch.randn(case.queries, case.heads, D_QK, device=cache.device, generator=generator)
    lengths = None
    if case.ragged:
        lengths = torch.full((case.queries,), topk, dtype=torch.int32, device=cache.device)
        lengths[::2] = min(SHORT, topk)
    return DecodeInputs(case, q.bfloat16(), cache, indices, lengths)
