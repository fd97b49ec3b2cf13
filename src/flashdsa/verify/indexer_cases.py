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


_EDGES = (0, 1, 63, 64, 65, 127, 200)
_ALL_FEATURES: dict[str, Any] = {
    "negative_weights": True,
    "plateaus": True,
    "repeated_pages": True,
    "nan_keys": True,
    "int8_cache": True,
    "strided": True,
}

# fmt: off
INDEXER_CASES: list[IndexerCase] = [
    IndexerCase("page edges", _EDGES, 32),
    IndexerCase("page edges, sorted", _EDGES, 32, sorted=True),
    IndexerCase("topk at the lengths", (63, 64, 65), 64),
    IndexerCase("topk at the lengths, sorted", (63, 64, 65), 64, sorted=True),
    IndexerCase("topk beyond every length", (0, 5, 100), 500),
    IndexerCase("topk beyond every length, sorted", (0, 5, 100), 500, sorted=True),
    IndexerCase("topk 1", (1, 2, 70, 300), 1),
    IndexerCase("model sizes", (2047, 2048, 2049, 5000), 2048),
    IndexerCase("model sizes, sorted", (100, 4000), 2048, sorted=True),
    IndexerCase("one head", (0, 40, 300), 50, num_heads=1, negative_weights=True),
    IndexerCase("odd heads", (130, 700), 100, num_heads=3),
    IndexerCase("negative weights", (64, 500), 100, negative_weights=True),
    IndexerCase("plateaus", (40, 500, 1000), 100, plateaus=True),
    IndexerCase("plateaus, sorted", (40, 500, 1000), 100, plateaus=True, sorted=True),
    IndexerCase("zero scores", (40, 700), 100, zero_scores=True, negative_weights=True),
    IndexerCase("zero scores, sorted", (40, 700), 100, zero_scores=True, negative_weights=True,
                sorted=True),
    IndexerCase("repeated pages", (64, 300, 700), 200, repeated_pages=True),
    IndexerCase("one sequence", tuple(range(2080, 2120)), 2048, one_sequence=True),
    IndexerCase("one sequence, short, sorted", (5, 70, 64, 0, 130, 128), 60, one_sequence=True,
                plateaus=True, sorted=True),
    IndexerCase("NaN keys", (40, 500), 100, nan_keys=True),
    IndexerCase("NaN keys within topk, sorted", (40, 90), 80, nan_keys=True, sorted=True),
    IndexerCase("NaN keys at the cut, sorted", (200, 500), 199, nan_keys=True, sorted=True),
    IndexerCase("int8 cache", (64, 300), 100, int8_cache=True),
    IndexerCase("strided", (64, 300), 100, strided=True),
    IndexerCase("positions", (0, 30, 64, 300, 700), 100, positions=True),
    IndexerCase("positions, sorted", (40, 700), 100, positions=True, sorted=True,
                repeated_pages=True),
    IndexerCase("2 queries a request", (600, 601, 99, 100, 101, 101, 0, 1), 100, next_n=2),
    IndexerCase("3 queries a request, sorted", (70, 300, 65, 128, 129, 130), 64, next_n=3,
                sorted=True, plateaus=True),
    IndexerCase("4 queries a request", (130, 64, 700, 0, 90, 91, 92, 93), 64, next_n=4,
                positions=True, nan_keys=True, strided=True),
    IndexerCase("a slot a token", (0, 1, 64, 300, 701), 100, table_page_size=1, nan_keys=True),
    IndexerCase("a slot a token, sorted, 2 queries a request", (70, 71, 64, 701), 80, next_n=2,
                table_page_size=1, sorted=True, plateaus=True, strided=True),
    IndexerCase("16 tokens a page of the table", (0, 15, 16, 17, 700), 90, table_page_size=16,
                positions=True, repeated_pages=True),
    IndexerCase("keys of 68 bytes", (0, 1, 64, 300, 701), 100, mxfp4=True, negative_weights=True),
    IndexerCase("keys of 68 bytes, sorted, plateaus, NaN keys, int8", (40, 500, 701), 90,
                mxfp4=True, sorted=True, plateaus=True, nan_keys=True, int8_cache=True),
    IndexerCase("keys of 68 bytes, a slot a token", (70, 701), 90, mxfp4=True, table_page_size=1,
                strided=True),
    IndexerCase("blocks of 8", (0, 1, 8, 9, 300, 701), 20, block=8),
    IndexerCase("blocks of 8, sorted, plateaus", (40, 300, 701), 20, block=8, sorted=True,
                plateaus=True),
    IndexerCase("blocks of 64, 2 queries a request", (130, 64, 700, 701), 4, next_n=2, block=64),
    IndexerCase("blocks of 4, NaN keys, a slot a token", (90, 500), 90, block=4, nan_keys=True,
                table_page_size=1),
    IndexerCase("blocks of 2, zero scores", (40, 700), 100, block=2, zero_scores=True,
                negative_weights=True),
    IndexerCase("candidates of 8", (0, 5, 64, 300, 701), 60, block=8, num_candidates=20),
    IndexerCase("candidates of 8, sorted, plateaus, positions", (40, 300, 701), 60, block=8,
                num_candidates=30, sorted=True, plateaus=True, positions=True),
    IndexerCase("fewer candidates than topk, 3 queries a request", (300, 9, 701), 200, block=4,
                next_n=3, num_candidates=9, nan_keys=True, strided=True),
    IndexerCase("candidates of 8, keys of 68 bytes", (90, 500), 60, num_heads=32, block=8,
                num_candidates=20, mxfp4=True),
    IndexerCase("candidates of 1, a slot a token", (90, 500), 100, num_candidates=120,
                table_page_size=1, zero_scores=True),
    IndexerCase("no query", (), 16),
    IndexerCase("every feature", (0, 64, 65, 600), 90, **_ALL_FEATURES),
    IndexerCase("every feature, sorted", (0, 64, 65, 600), 90, sorted=True, **_ALL_FEATURES),
]
# fmt: on
