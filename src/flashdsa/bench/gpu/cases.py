"""What `bench indexer` times on a GPU: nine shapes, ragged batches, adversarial scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOPK = 2048
SHAPES = (
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (8, 16384),
    (32, 4096),
    (32, 16384),
    (32, 65536),
    (128, 16384),
    (128, 65536),
)
"""(B, seq_len) of the peers' table."""
# One workload of FlashInfer-Bench's contest, and a sixteenth row: one row only needs scores.
CONTEST_LENGTHS = (88, 91, 91, 96, 1721, 153, 114, 89, 157, 107, 91, 230, 5761, 97, 1, 412)
CONTEST_PAGES = 11923
RAGGED_ROWS, RAGGED_LONGEST = 100, 16384
K = 1024
OUTLIERS = (
    ("128K + 63 x 2K", (128 * K, *[2 * K] * 63)),
    ("128K + 63 x 2049", (128 * K, *[2049] * 63)),
    ("200K + 31 x 8K", (200 * K, *[8 * K] * 31)),
    ("2 x 128K + 126 x 1K", (128 * K, 128 * K, *[K] * 126)),
    ("128K + 7 x 4K", (128 * K, *[4 * K] * 7)),
)
"""A few rows that are far longer than the others."""
SPREAD_LONGEST = 64 * K
LOG_UNIFORM_ROWS = (16, 48, 64, 128, 256)
DISTRIBUTIONS = ("equal", "two", "one bin", "descending", "ascending")
"""Of the scores over token positions; "one bin": random within 2^-8 of each other."""
PLATEAUS = ("equal", "two")
DISTRIBUTION_SHAPES = ((1, 8192), (1, 131072), (32, 16384), (128, 16384))

REQUESTS = (
    (1, 128 * K, 2),
    (8, 16 * K, 2),
    (32, 16 * K, 2),
    (64, 32 * K, 2),
    (128, 16 * K, 2),
    (128, 32 * K, 2),
)
"""(B, tokens, next_n) of multi-token prediction; DeepGEMM takes up to two queries a request."""
OTHER_SHAPES = (
    (2, 128 * K),
    (4, 64 * K),
    (8, 64 * K),
    (48, 64 * K),
    (200, 16 * K),
    (300, 4 * K),
    (1, 64 * K),
    (1, 200_000),
    (2, 32 * K),
    (4, 8 * K),
    (16, 8 * K),
    (16, 64 * K),
    (24, 32 * K),
    (32, 2049),
    (64, 8 * K),
    (64, 32 * K),
    (96, 16 * K),
    (256, 4 * K),
)
"""Rows of one length beside the peers' table."""

NUM_RAGGED = 3 + len(OUTLIERS) + len(LOG_UNIFORM_ROWS)
CONTEST = "ragged, 16 rows, contest-like"
RAGGED = f"ragged, {RAGGED_ROWS} rows, 1 to {RAGGED_LONGEST}"


@dataclass(frozen=True)
class BenchCase:
    """One batch to time.

    Attributes:
        kind: "shape", "equal", "captured", "ragged", "distribution" or "requests". Of "captured"
            every contender is the replay of a CUDA graph.
        lengths: tokens of each row. next_n: neighbouring rows of one request, over the same pages.
        data: "random", or one of DISTRIBUTIONS.
        num_pages: of the cache, at least; the rows' own pages if they need more.
    """

    name: str
    kind: str
    lengths: tuple[int, ...]
    data: str = "random"
    num_pages: int = 0
    next_n: int = 1

    @property
    def tokens(self) -> int:
        """All keys that must be read: of a request's rows those of the longest one."""
        rows, next_n = self.lengths, self.next_n
        return sum(max(rows[i : i + next_n]) for i in range(0, len(rows), next_n))


def requests_case(name: str, lengths: Sequence[int], next_n: int) -> BenchCase:
    """Requests of these lengths with several queries each, the last of which sees all tokens."""
    rows = tuple(n - behind for n in lengths for behind in range(next_n - 1, -1, -1))
    return BenchCase(name, "requests", rows, next_n=next_n)


def shape_name(batch: int, length: int) -> str:
    """As the tables write it: 32/16K, 32/2049."""
    return f"{batch}/{length}" if length % K else f"{batch}/{length // K}K"


def indexer_cases(quick: bool = False) -> list[BenchCase]:
    """Every case, in the order of the table; `quick`: the smallest of each kind."""
    cases = [BenchCase(shape_name(b, n), "shape", (n,) * b) for b, n in SHAPES]
    cases += [BenchCase(shape_name(b, n), "equal", (n,) * b) for b, n in OTHER_SHAPES]
    cases += [BenchCase(f"{shape_name(b, n)}, captured", "captured", (n,) * b) for b, n in SHAPES]
    cases.append(BenchCase(CONTEST, "ragged", CONTEST_LENGTHS, num_pages=CONTEST_PAGES))
    cases.append(BenchCase(RAGGED, "ragged", ragged_lengths()))
    cases += [BenchCase(f"ragged, {name}", "ragged", lengths) for name, lengths in OUTLIERS]
    cases += [
        BenchCase(f"ragged, {rows} rows, log-uniform to 64K", "ragged", log_uniform_lengths(rows))
        for rows in LOG_UNIFORM_ROWS
    ]
    uniform = ragged_lengths(32, SPREAD_LONGEST)
    cases.append(BenchCase("ragged, 32 rows, uniform to 64K", "ragged", uniform))
    cases += [
        BenchCase(f"{shape_name(b, n)} {data}", "distribution", (n,) * b, data)
        for data in DISTRIBUTIONS
        for b, n in DISTRIBUTION_SHAPES
    ]
    cases += [
        requests_case(f"{shape_name(b, n)}, next_n {next_n}", (n,) * b, next_n)
        for b, n, next_n in REQUESTS
    ]
    ragged = log_uniform_lengths(64)
    cases.append(requests_case("64 requests, log-uniform to 64K, next_n 2", ragged, 2))
    small = (shape_name(*SHAPES[0]), CONTEST, f"{shape_name(*SHAPES[0])} equal")
    return [case for case in cases if case.name in small] if quick else cases


def ragged_lengths(
    rows: int = RAGGED_ROWS, longest: int = RAGGED_LONGEST, seed: int = 1
) -> tuple[int, ...]:
    """Uniform lengths from 1 to the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    return tuple(int(length) for length in lengths)


def log_uniform_lengths(rows: int, seed: int = 1) -> tuple[int, ...]:
    """From 1K to SPREAD_LONGEST tokens, their logarithms uniform."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, generator=generator, dtype=torch.float64)
    return tuple(int(length) for length in K * (SPREAD_LONGEST / K) ** share)
