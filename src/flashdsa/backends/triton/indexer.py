"""The fp8 indexer by Triton: pieces of rows are scored into memory, then ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_logits, check_values
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.memory import readable, written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.launch import SCORES_BYTES, fenced, has_fp8, launch, tile
from flashdsa.backends.triton.topk import Scores, choose
from flashdsa.problem import PAGE_BYTES, PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import IndexerOperands, TopkIndexerOperands


PROGRAMS = 32
"""Programs that score at least, for each SM, if there are so many tiles: some take longer."""


def bind(
    runner: Runner,
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    table_page_size: int,
    check: bool,
) -> Callable[[Sequence[Any]], None]:
    """Write each row's best token ids into `topk_indices`, as `cpu.indexer.topk_indexer` does;
    `check` reads values where FLASHDSA_CHECK is set."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*given)
        if check and values_are_checked():
            check_values(x.seq_lens, x.block_table, len(x.k_index_cache_fp8), table_page_size)
        rows, width = len(x.seq_lens), x.block_table.shape[1] * table_page_size
        if not rows or not width or not len(x.k_index_cache_fp8):
            x.topk_indices.fill_(-1)
            return
        next_n = rows // len(x.block_table)
        for first, end in spans(rows, rows_at_once(width, next_n)):
            own, of_own = slice(first, end), slice(first // next_n, end // next_n)
            keys = keys_of(runner, x.k_index_cache_fp8, x.block_table[of_own], table_page_size)
            bits = runner.empty(end - first, width, dtype=torch.int32)
            ends = x.seq_lens[own].contiguous()
            score(runner, keys, x.q_index_fp8[own], x.weights[own], None, ends, bits, next_n)
            scores = Scores(bits, ends, None, True)
            if not positions:
                scores = scores._replace(table=keys.table, table_page=table_page_size)
            choose(runner, scores, x.topk_indices[own], sorted=sorted)

    return runner.on_device(written_apart(serve, operands, "topk_indices"))


def bind_logits(
    runner: Runner, operands: IndexerOperands, *, max_len: int, table_page_size: int
) -> Callable[[Sequence[Any]], Tensor]:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond; those of a bad page
    are -inf, too. Bit-equal to what is ranked."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> Tensor:
        x = kind(*given)
        if values_are_checked():
            check_logits(x, max_len, table_page_size)
        scores = runner.empty(len(x.seq_lens), max_len, dtype=torch.float32).fill_(-math.inf)
        if scores.numel() and x.block_table.numel() and len(x.k_index_cache_fp8):
            bits, table = scores.view(torch.int32), x.block_table
            keys = keys_of(runner, x.k_index_cache_fp8, table, table_page_size)
            ends = x.seq_lens.clamp(max=table.shape[1] * table_page_size)
            score(runner, keys, x.q_index_fp8, x.weights, None, ends, bits, 1)
            scores.masked_fill_(bits == -1, -math.inf)  # index_scores.NEVER
        return scores

    return runner.on_device(serve)


def rows_at_once(width: int, of: int) -> int:
    """Rows of `width` scores that a piece has, a multiple of `of`."""
    return of * max(1, SCORES_BYTES // (4 * width * of))


class Keys(NamedTuple):
    """Keys of a call.

    Attributes:
        rows: (S_kv, 128), or pages' memory. scales: (S_kv,) fp32, the same memory, or None.
        table: (B, max_pages) int32 for pages. of_entry: tokens that its entries name, or 0.
        num_entries: of the cache. step: bytes from page to page.
    """

    rows: Tensor
    scales: Tensor | None
    table: Tensor | None = None
    of_entry: int = 0
    num_entries: int = 0
    step: int = 0


def keys_of(runner: Runner, cache: Tensor, table: Tensor, of_entry: int) -> Keys:
    """A cache's keys."""
    step = cache.stride(0) if len(cache) > 1 else PAGE_BYTES
    pages = cache.as_strided(((len(cache) - 1) * step + PAGE_BYTES,), (1,))
    rows = pages.view(torch.float8_e4m3fn if has_fp8(runner) else torch.uint8)
    num_entries = len(cache) * (PAGE_SIZE // of_entry)
    return Keys(rows, pages.view(torch.float32), table, of_entry, num_entries, step)


def score(
    runner: Runner,
    keys: Keys,
    q: Tensor,
    weights: Tensor,
    begins: Tensor | None,
    ends: Tensor,
    out: Tensor,
    run: int,
    unscored: int = 0,
) -> None:
    """Write the bits of the scores from `begins` (S,), or 0, to `ends` into `out` (S, width) int32,
    those of a bad page as `index_scores.NEVER`.

    Args:
        q: (S, H, 128) e4m3, or as the keys. weights: (S, H) fp32.
        run: queries that read a tile of keys together, and share a row of the table.
        unscored: ranges of at most so many keys need no scores, as all of them are chosen.
    """
    from flashdsa.kernels.triton import index_scores

    (rows, width), num_heads = out.shape, q.shape[1]
    name = "scores" if keys.table is not None else "scores of prompts"
    shape = tile(name, runner.capability, num_heads)
    if shape.heads > 64:  # as many sums and bytes
        shape = shape._replace(keys=min(shape.keys, 128), parts=max(1, shape.parts // 2))
    if q.dtype == torch.float8_e4m3fn and not has_fp8(runner):
        q = q.to(torch.bfloat16)  # which is exact
    runs = -(-rows // run)
    table = ends if keys.table is None else keys.table
    scales = weights if keys.scales is None else keys.scales
    launch(
        runner,
        index_scores.score,
        (runs, min(-(-width // shape.keys), -(-PROGRAMS * runner.num_sms // runs)), 1),
        (readable(q), keys.rows, scales, readable(weights), ends if begins is None else begins,
         ends, table, out, rows, width, unscored, keys.num_entries, keys.step, table.stride(0)),
        shape, BLOCK_T=shape.keys, BLOCK_H=shape.heads, NUM_HEADS=num_heads,
        RUN=run, BLOCK_Q=shape.parts, TABLE_PAGE=keys.of_entry, SCALED=keys.scales is not None,
        FROM_0=begins is None, NARROW=keys.rows.dtype == torch.uint8, FENCED=fenced(runner),
    )  # fmt: skip
