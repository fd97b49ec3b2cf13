"""What `bench indexer` times on a GPU: nine shapes, ragged batches, adversarial scores."""

from __future__ import annotations

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
DISTRIBUTIONS = ("equal", "two", "one bin", "descending", "ascending")
"""Of the scores over token positions; "one bin": random within 2^-8 of each other."""
PLATEAUS = ("equal", "two")
DISTRIBUTION_SHAPES = ((1, 8192), (1, 131072), (32, 16384), (128, 16384))

CONTEST = "ragged, 16 rows, contest-like"
RAGGED = f"ragged, {RAGGED_ROWS} rows, 1 to {RAGGED_LONGEST}"


@dataclass(frozen=True)
class BenchCase:
    """One batch to time.

    Attributes:
        kind: "shape", "ragged" or "distribution".
        lengths: tokens of each row.
        data: "random", or one of DISTRIBUTIONS.
        num_pages: of the cache, at least; the rows' own pages if they need more.
    """

    name: str
    kind: str
    lengths: tuple[int, ...]
    data: str = "random"
    num_pages: int = 0

    @property
    def tokens(self) -> int:
        """All keys that must be read."""
        return sum(self.lengths)


def shape_name(batch: int, length: int) -> str:
    """As the tables write it: 32/16K."""
    return f"{batch}/{length // 1024}K"


def indexer_cases(quick: bool = False) -> list[BenchCase]:
    """Every case, in the order of the table; `quick`: the smallest of each kind."""
    cases = [BenchCase(shape_name(b, n), "shape", (n,) * b) for b, n in SHAPES]
    cases.append(BenchCase(CONTEST, "ragged", CONTEST_LENGTHS, num_pages=CONTEST_PAGES))
    cases.append(BenchCase(RAGGED, "ragged", ragged_lengths()))
    cases += [
        BenchCase(f"{shape_name(b, n)} {data}", "distribution", (n,) * b, data)
        for data in DISTRIBUTIONS
        for b, n in DISTRIBUTION_SHAPES
    ]
    small = (shape_name(*SHAPES[0]), CONTEST, f"{shape_name(*SHAPES[0])} equal")
    return [case for case in cases if case.name in small] if quick else cases


def ragged_lengths(seed: int = 1) -> tuple[int, ...]:
    """Uniform lengths from 1 to RAGGED_LONGEST."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, RAGGED_LONGEST + 1, (RAGGED_ROWS,), generator=generator)
    return tuple(int(length) for length in lengths)
