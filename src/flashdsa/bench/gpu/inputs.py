"""The operands of a case, made on the device: random, or with scores of a given distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdsa.bench.gpu.cases import TOPK, BenchCase
from flashdsa.problem import (
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    NUM_INDEX_HEADS,
    PAGE_BYTES,
    PAGE_KEY_BYTES,
    PAGE_SIZE,
)

E4M3_MAX = 448.0
SCORE = 1.265625
"""Of a token of scale 1 in an adversarial case: the middle of the ranking's bin 1.25 to 1.28125."""
_PAGES_AT_ONCE = 16384


@dataclass(frozen=True)
class BenchInputs:
    """Arguments of `dsa_topk_indexer`; every request has pages of its own, in random order.

    Queries, weights, lengths and ids are those of all rows; the block table has a row a request."""

    case: BenchCase
    q: Tensor
    cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor
    ids: Tensor

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """In the operation's order, the output last."""
        return self.q, self.cache, self.weights, self.seq_lens, self.block_table, self.ids

    @property
    def of_requests(self) -> tuple[Tensor, ...]:
        """The same with the queries of a request as the second dimension."""
        next_n = self.case.next_n
        q, weights, seq_lens, ids = (
            rows.unflatten(0, (-1, next_n))
            for rows in (self.q, self.weights, self.seq_lens, self.ids)
        )
        return q, self.cache, weights, seq_lens, self.block_table, ids

    def row_keys(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's e4m3 keys (tokens, 128) and their scales (tokens,), in order of position."""
        length = self.case.lengths[row]
        pages = self.block_table[row // self.case.next_n, : -(-length // PAGE_SIZE)].long()
        raw = self.cache.view(-1, PAGE_BYTES)[pages]
        keys = raw[:, :PAGE_KEY_BYTES].contiguous().view(torch.float8_e4m3fn)
        scales = raw[:, PAGE_KEY_BYTES:].contiguous().view(torch.float32)
        return keys.view(-1, INDEX_HEAD_DIM)[:length], scales.view(-1)[:length]


def make_inputs(case: BenchCase, device: str, seed: int = 0) -> BenchInputs:
    """Operands of `case`; the output is poisoned with -99."""
    generator = torch.Generator(device).manual_seed(seed)
    batch = len(case.lengths)
    rows = [-(-length // PAGE_SIZE) for length in case.lengths]
    pages = [max(rows[i : i + case.next_n]) for i in range(0, batch, case.next_n)]
    pool = max(case.num_pages, sum(pages))
    order = torch.randperm(pool, generator=generator, device=device).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for row, taken in enumerate(order[: sum(pages)].split(pages)):
        table[row, : len(taken)] = taken
    heads = (batch, NUM_INDEX_HEADS)
    q = torch.randn(*heads, INDEX_HEAD_DIM, generator=generator, device=device)
    weights = torch.randn(heads, generator=generator, device=device)
    cache = torch.empty(pool, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    ids = torch.full((batch, TOPK), -99, dtype=torch.int32, device=device)
    inputs = BenchInputs(case, q.to(torch.float8_e4m3fn), cache, weights, lengths, table, ids)
    if case.data == "random":
        _fill_random(cache, generator)
    else:
        _fill_distribution(inputs, generator)
    return inputs


def _fill_random(cache: Tensor, generator: torch.Generator) -> None:
    """Standard normal keys, quantised as the library does."""
    for pages in cache.view(-1, PAGE_BYTES).split(_PAGES_AT_ONCE):
        size = (len(pages), PAGE_SIZE, INDEX_HEAD_DIM)
        keys = torch.randn(size, generator=generator, device=cache.device)
        scales = keys.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
        codes = (keys / scales[..., None]).to(torch.float8_e4m3fn)
        pages[:, :PAGE_KEY_BYTES] = codes.view(torch.uint8).view(len(pages), -1)
        pages[:, PAGE_KEY_BYTES:] = scales.view(torch.uint8).view(len(pages), -1)


def _fill_distribution(inputs: BenchInputs, generator: torch.Generator) -> None:
    """One key vector for all tokens and positive weights: a score is SCORE times its scale."""
    device = inputs.cache.device
    pages = inputs.cache.view(-1, PAGE_BYTES)
    key = torch.randn(INDEX_HEAD_DIM, generator=generator, device=device).to(torch.float8_e4m3fn)
    pages[:, :PAGE_KEY_BYTES] = key.view(torch.uint8).repeat(PAGE_SIZE)
    pages[:, PAGE_KEY_BYTES:] = torch.ones(PAGE_SIZE, device=device).view(torch.uint8)
    weights = inputs.weights.abs_()
    sums = (inputs.q.double() @ key.double()).relu() * weights.double()
    weights.mul_((SCORE / sums.sum(-1, keepdim=True)).float())
    for row, length in enumerate(inputs.case.lengths):
        taken = inputs.block_table[row, : -(-length // PAGE_SIZE)].long()
        scales = torch.ones(len(taken) * PAGE_SIZE, device=device)
        scales[:length] = _scales(inputs.case.data, length, generator, device)
        pages[taken, PAGE_KEY_BYTES:] = scales.view(-1, PAGE_SIZE).view(torch.uint8)


def _scales(data: str, length: int, generator: torch.Generator, device: torch.device) -> Tensor:
    uniform = torch.rand(length, generator=generator, device=device)
    ramp = torch.arange(length, device=device, dtype=torch.float32) / length
    scales: Tensor = {
        "equal": torch.ones_like(uniform),
        "two": torch.where(uniform < 0.5, 1.0, 0.5),
        "ascending": 1 + ramp,
        "descending": 2 - ramp,
        "one bin": 1 + uniform / 256,
    }[data]
    return scales
