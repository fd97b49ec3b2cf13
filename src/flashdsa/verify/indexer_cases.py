"""Indexer cases: what each one is about, and the paged inputs that it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.problem import INDEX_HEAD_DIM, INT32_MAX, PAGE_SIZE
from flashdsa.reference import quantize_index_k, quantize_index_q
from flashdsa.verify.layouts import poisoned_rows, strided_copy

SPARE_PAGES = 3
SPARE_COLUMNS = 2


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Choices of a call of either indexer, and what is planted in its keys."""

    sorted: bool = False
    block: int = 1
    """Positions of a block, which are chosen, or from which positions are."""
    num_candidates: int = 0
    """Blocks to choose from; 0: no candidates."""
    negative_weights: bool = False
    plateaus: bool = False
    """Keys are drawn from five, so most of them are equal."""
    zero_scores: bool = False
    """Every score is a zero, of either sign."""
    nan_keys: bool = False
    """Some keys have a NaN, some scales are NaN."""
    strided: bool = False


@dataclass(frozen=True)
class IndexerCase(Selection):
    """Lengths and features of one call; keys and queries are quantized normals unless told else."""

    name: str
    seq_lens: tuple[int, ...]
    topk: int
    num_heads: int = 64
    positions: bool = False
    repeated_pages: bool = False
    """One page comes twice in each row, and in every row."""
    one_sequence: bool = False
    """Every row walks the same pages, as the queries of one sequence do."""
    next_n: int = 1
    """Neighbouring rows of one request, which share its pages; `seq_lens` has all rows."""
    table_page_size: int = PAGE_SIZE
    """Tokens that an entry of the table names; those of a row's entries lie apart."""
    mxfp4: bool = False
    """Keys of 68 bytes; in some of them the scales span more than e4m3 does."""
    int8_cache: bool = False

    @property
    def choices(self) -> dict[str, Any]:
        """Arguments that the operation and its reference have under one name."""
        names = "sorted", "table_page_size", "block"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class IndexerInputs:
    """q `[B, H, 128]` e4m3, cache `[pages, 64, 1, 132]`, weights, seq_lens, block_table with a row
    for each request, candidates `[B, num_candidates]` or None."""

    case: IndexerCase
    q: Tensor
    cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor
    candidates: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The operation's five inputs, in its order."""
        return self.q, self.cache, self.weights, self.seq_lens, self.block_table

    @property
    def operands_of_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same with a row of the table for each query."""
        table = self.block_table.repeat_interleave(self.case.next_n, dim=0)
        return self.q, self.cache, self.weights, self.seq_lens, table

    def of_requests(self, rows: Tensor) -> Tensor:
        """`rows` `[B, ...]` as the public function takes them, `[B / next_n, next_n, ...]`."""
        next_n = self.case.next_n
        return rows if next_n == 1 else rows.unflatten(0, (-1, next_n))

    @property
    def max_len(self) -> int:
        """A width for the scores that goes beyond the longest row."""
        return max(self.case.seq_lens, default=0) + 5

    def output_buffer(self) -> Tensor:
        """`[B, topk]` int32 full of poison, strided where the case says so."""
        rows, case = len(self.case.seq_lens), self.case
        return poisoned_rows(rows, case.topk, device=self.q.device, strided=case.strided)


def pack_pages(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes uint8 `[64 n, 128]` and scales fp32 `[64 n]` -> a cache uint8 `[n, 64, 1, 132]`; of
    MXFP4 `[64 n, 64]` and uint8 `[64 n, 4]` -> `[n, 64, 1, 68]`."""
    keys = codes.reshape(-1, PAGE_SIZE * codes.shape[1])
    scales = scale.contiguous().view(torch.uint8).reshape(-1, 4 * PAGE_SIZE)
    return torch.cat([keys, scales], dim=1).view(-1, PAGE_SIZE, 1, codes.shape[1] + 4)


def _draw_tokens(
    case: IndexerCase, num_tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[num_tokens, 128]` and scales fp32 `[num_tokens]`; of MXFP4 `[num_tokens, 64]`
    and uint8 `[num_tokens, 4]`."""
    distinct = 5 if case.plateaus else num_tokens
    if case.mxfp4:
        codes = torch.randint(256, (distinct, INDEX_HEAD_DIM // 2), generator=generator).byte()
        scale = torch.randint(122, 130, (distinct, 4), generator=generator).byte()
        scale[::5, 1] -= 16
        codes[0] = 0
    else:
        codes, scale = quantize_index_k(torch.randn(distinct, INDEX_HEAD_DIM, generator=generator))
        scale = scale * torch.exp2(torch.randn(distinct, generator=generator))
    if case.plateaus:
        drawn = torch.randint(distinct, (num_tokens,), generator=generator)
        codes, scale = codes[drawn], scale[drawn]
    if case.zero_scores:
        codes[0::3], scale[1::3], scale[2::3] = 0, 0.0, -0.0
    if case.nan_keys and case.mxfp4:
        scale[4::7, 2] = 255
    elif case.nan_keys:
        codes[3::7, 5], codes[4::7, 127], scale[6::11] = 0x7F, 0xFF, torch.nan
    return codes, scale


def _entries_of_requests(case: IndexerCase) -> list[int]:
    """Entries of the table that each request's longest row needs."""
    entries = [-(-length // case.table_page_size) for length in case.seq_lens]
    return [max(entries[i : i + case.next_n]) for i in range(0, len(entries), case.next_n)]


def _draw_table(case: IndexerCase, num_entries: int, generator: torch.Generator) -> Tensor:
    """int32 `[B, max_pages]`: entries in random order; those that no length needs name no page."""
    needed = _entries_of_requests(case)
    columns = max(needed, default=0) + SPARE_COLUMNS
    unused = torch.tensor([-1, INT32_MAX, num_entries])[torch.arange(columns) % 3]
    table = unused.repeat(len(needed), 1)
    order = torch.randperm(num_entries, generator=generator)
    start = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[start : start + count]
        start += 0 if case.one_sequence else count
        if case.repeated_pages and count:
            table[b, 0] = table[b, count // 2] = order[0]
    return table.to(torch.int32)


def draw_candidates(
    lengths: Sequence[int], block: int, count: int, generator: torch.Generator
) -> Tensor | None:
    """int32 `[B, count]` in any order: visible blocks, some twice, and ids that name none."""
    if not count:
        return None
    rows = torch.full((len(lengths), count), -1, dtype=torch.int32)
    for row, length in zip(rows, lengths, strict=True):
        blocks = -(-length // block)
        row[:] = torch.randint(-1, blocks + 2, (count,), generator=generator)
        row[::7], row[1::9] = INT32_MAX, -(2**31)
        some = torch.randperm(blocks, generator=generator)[: count // 2]
        row[count - len(some) :] = some.int()
    return rows


def make_indexer_inputs(
    case: IndexerCase, seed: int, device: str | torch.device = "cpu"
) -> IndexerInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device.

    Whatever lies beyond a row's length would win if it were read: the unused tokens of a row's
    last page resemble its query, those of unused pages have the largest keys, and their scales are
    enormous.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads = len(case.seq_lens), case.num_heads
    needed, of_entry = _entries_of_requests(case), case.table_page_size
    used = max(needed, default=0) if case.one_sequence else sum(needed)
    num_pages = -(-used * of_entry // PAGE_SIZE) + SPARE_PAGES
    codes, scale = _draw_tokens(case, num_pages * PAGE_SIZE, generator)
    table = _draw_table(case, num_pages * (PAGE_SIZE // of_entry), generator)

    raw_q = torch.randn(batch, heads, INDEX_HEAD_DIM, generator=generator)
    raw_weights = torch.randn(batch, heads, generator=generator).abs()
    if case.negative_weights:  # every other head's, and a single head's in every other row
        raw_weights[0::2, 0::2] *= -1
        raw_weights[1::2, 1::2] *= -1
    q, weights = quantize_index_q(raw_q, raw_weights)

    visible = torch.zeros(num_pages * PAGE_SIZE, dtype=torch.bool)
    tempting = torch.full_like(codes, 0x77 if case.mxfp4 else 0x7E)
    for b, length in enumerate(case.seq_lens):
        for column, entry in enumerate(table[b // case.next_n, : -(-length // of_entry)].tolist()):
            count = min(of_entry, length - column * of_entry)
            start = entry * of_entry
            visible[start : start + count] = True
            if not case.mxfp4:
                tempting[start + count : start + of_entry] = q[b, weights[b].argmax()]
    codes = torch.where(visible[:, None], codes, tempting)
    scale[~visible] = 200 if case.mxfp4 else 1e6

    candidates = draw_candidates(case.seq_lens, case.block, case.num_candidates, generator)

    def finish(x: Tensor) -> Tensor:
        return strided_copy(x.to(device)) if case.strided else x.to(device)

    cache = pack_pages(codes, scale).to(device)
    if case.strided:  # whole pages apart: inside a page the bytes are one block
        apart = torch.full((2 * num_pages, *cache.shape[1:]), 0x7F, dtype=torch.uint8)
        apart = apart.to(device)
        apart[::2] = cache
        cache = apart[::2]
    return IndexerInputs(
        case=case,
        q=finish(q).view(torch.float8_e4m3fn),
        cache=cache.view(torch.int8) if case.int8_cache else cache,
        weights=finish(weights),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        block_table=finish(table),
        candidates=None if candidates is None else finish(candidates),
    )
