"""The indexer beside DeepGEMM's paged logits and the top-k of cuDNN Frontend, FlashInfer or torch.

A pair of peers is one call of both kernels, its scores warm in L2. DeepGEMM's scheduling metadata
is counted: ours looks at the lengths in each call, too. Turning the peers' positions into token ids
is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.bench.cases import Case, Operation, Task, Verdict
from flashdsa.bench.indexer import (
    SHAPES,
    IndexerInputs,
    K,
    indexer_case,
    indexer_task,
    judge_positions,
    make_inputs,
    positions_of,
    ragged_case,
    requests_case,
    scored_rows,
)
from flashdsa.bench.runner import Peer
from flashdsa.bench.timer import Call
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES, PAGE_KEY_BYTES, PAGE_SIZE
from workbench.bench.top_ks import NAMES, load_top_k

SCORE = 1.265625
"""Score of a token of scale 1 in an adversarial case: the middle of a bin of the ranking."""
EXACT = ("equal", "two", "ascending", "descending")
"""Distributions whose best tokens are the same in any arithmetic."""
DISTRIBUTIONS = (*EXACT, "one bin")
"""Scores over token positions; "one bin": random within 2^-8 of each other."""
_LOGITS_ALIGNMENT, DEEP_GEMM_HEADS = 256, 32


def make_task(case: Case, device: str, seed: int, backend: str) -> Task:
    """The library's, with the option data: one of DISTRIBUTIONS."""
    x = make_inputs(case, device, seed, backend)
    data = case.options.get("data")
    if data is not None:
        fill_scores(x, data, torch.Generator(device).manual_seed(seed + 1))
    task = indexer_task(x, backend)
    return replace(task, judge=partial(judge_ties, x, task.judge)) if data in EXACT else task


def fill_scores(x: IndexerInputs, data: str, generator: torch.Generator) -> None:
    """One key vector for all tokens and positive weights: a score is SCORE times its scale."""
    device = x.cache.device
    pages = x.cache.view(-1, PAGE_BYTES)
    key = torch.randn(INDEX_HEAD_DIM, generator=generator, device=device).to(torch.float8_e4m3fn)
    pages[:, :PAGE_KEY_BYTES] = key.view(torch.uint8).repeat(PAGE_SIZE)
    weights = x.weights.abs_()
    sums = (x.q.double() @ key.double()).relu() * weights.double()
    weights.mul_((SCORE / sums.sum(-1, keepdim=True)).float())
    for row, length in enumerate(x.lengths):
        taken = x.pages(row)
        scales = torch.ones(len(taken) * PAGE_SIZE, device=device)
        uniform = torch.rand(length, generator=generator, device=device)
        ramp = torch.arange(length, device=device, dtype=torch.float32) / length
        scales[:length] = {
            "equal": torch.ones_like(uniform),
            "two": torch.where(uniform < 0.5, 1.0, 0.5),
            "ascending": 1 + ramp,
            "descending": 2 - ramp,
            "one bin": 1 + uniform / 256,
        }[data]
        pages[taken, PAGE_KEY_BYTES:] = scales.view(-1, PAGE_SIZE).view(torch.uint8)


def judge_ties(x: IndexerInputs, judge: Callable[[Tensor], Verdict], ids: Tensor) -> Verdict:
    """Besides, that ties went to the smallest positions."""
    verdict = judge(ids)
    if verdict.findings:
        return verdict
    for row in scored_rows(len(x.lengths)):
        positions, _ = positions_of(x, row, ids[row])
        _, scales = x.row_keys(row)
        best = scales.sort(descending=True, stable=True).indices[: positions.numel()]
        if not torch.equal(best.sort().values, positions.sort().values):
            verdict.findings.append(f"row {row}: ties not broken to the smallest positions")
    return verdict


def judge_peer(x: IndexerInputs, positions: Tensor) -> Verdict:
    """A peer's positions (B, topk): the rows that it had to choose in, no tie rule."""
    findings, topk = [], x.ids.shape[1]
    for row in scored_rows(len(x.lengths)):
        if x.lengths[row] > topk:
            finding = judge_positions(x, row, positions[row, :topk].long())
            findings += [f"row {row}: {finding}"] if finding else []
    return Verdict({}, findings)


class DeepGemm:
    """DeepGEMM's paged logits of fp8 in their best legal form; beyond a row's length anything.

    It takes 32 or 64 heads, so that fewer are padded, and one or two queries a request: four are
    twice two of the same pages, three are three times one.
    """

    def __init__(self, x: IndexerInputs) -> None:
        self.gemm: Any = import_module("deep_gemm")
        together = {3: 1, 4: 2}.get(x.next_n, x.next_n)
        missing = max(0, DEEP_GEMM_HEADS - x.q.shape[1])
        q = pad(x.q.view(torch.uint8), (0, 0, 0, missing)).view(x.q.dtype)
        table = x.block_table.repeat_interleave(x.next_n // together, 0)
        self.lengths = x.seq_lens.view(-1, together)
        self.width = padded(max(x.lengths))
        operands = q.unflatten(0, (-1, together)), x.cache, pad(x.weights, (0, missing))
        self.operands = (*operands, self.lengths, table)
        self.plan: Any = None

    def make_plan(self) -> None:
        """The scheduling metadata, which depend on lengths alone."""
        sms = self.gemm.get_num_sms()
        self.plan = self.gemm.get_paged_mqa_logits_metadata(self.lengths, PAGE_SIZE, sms)

    def logits(self) -> Tensor:
        """Scores (rows, width)."""
        scores: Tensor = self.gemm.fp8_paged_mqa_logits(
            *self.operands, self.plan, self.width, clean_logits=False
        )
        return scores


def padded(width: int) -> int:
    """As many as DeepGEMM's rows have: a view of fewer would be copied by the top-k."""
    return -(-width // _LOGITS_ALIGNMENT) * _LOGITS_ALIGNMENT


def pair(name: str) -> Peer:
    """DeepGEMM's logits, then the named top-k."""

    def prepare(case: Case, task: Task) -> tuple[Call, Callable[[Any], Verdict]]:
        x: IndexerInputs = task.inputs
        peer = DeepGemm(x)
        top_k = load_top_k(name, x.seq_lens, peer.width, case.topk)

        def call() -> Tensor:
            peer.make_plan()
            return top_k(peer.logits())

        return call, partial(judge_peer, x)

    return prepare


PEERS: dict[str, Peer] = {f"DeepGEMM + {name}": pair(name) for name in NAMES}

# One workload of FlashInfer-Bench's contest, and a sixteenth row: one row only needs scores.
CONTEST_LENGTHS = (88, 91, 91, 96, 1721, 153, 114, 89, 157, 107, 91, 230, 5761, 97, 1, 412)
CONTEST_PAGES = 11923
OTHER_SHAPES = (
    *((1, 64 * K), (1, 200_000), (2, 32 * K), (2, 128 * K), (4, 8 * K), (4, 64 * K), (8, 64 * K)),
    *((16, 8 * K), (16, 64 * K), (24, 32 * K), (32, 2049), (48, 64 * K), (64, 8 * K)),
    *((64, 32 * K), (96, 16 * K), (200, 16 * K), (256, 4 * K), (300, 4 * K)),
)
"""Rows of one length beside the library's."""
OUTLIERS = (
    ("128K + 63 x 2K", (128 * K, *[2 * K] * 63)),
    ("128K + 63 x 2049", (128 * K, *[2049] * 63)),
    ("200K + 31 x 8K", (200 * K, *[8 * K] * 31)),
    ("2 x 128K + 126 x 1K", (128 * K, 128 * K, *[K] * 126)),
    ("128K + 7 x 4K", (128 * K, *[4 * K] * 7)),
)
"""A few rows that are far longer than the others."""
REQUESTS = (
    *((1, 128 * K, 2), (8, 16 * K, 2), (32, 16 * K, 2)),
    *((64, 32 * K, 2), (128, 16 * K, 2), (128, 32 * K, 2)),
)
"""(B, tokens, next_n); DeepGEMM takes up to two queries a request."""
DISTRIBUTION_SHAPES = ((1, 8 * K), (1, 128 * K), (32, 16 * K), (128, 16 * K))


def uniform_lengths(rows: int, longest: int, seed: int = 1) -> tuple[int, ...]:
    """Return lengths from 1 to `longest`, uniform."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, longest + 1, (rows,), generator=generator).tolist())


def log_uniform_lengths(rows: int, seed: int = 1) -> tuple[int, ...]:
    """Return lengths from 1K to 64K tokens, their logarithms uniform."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, generator=generator, dtype=torch.float64)
    return tuple(int(length) for length in K * 64**share)


def _cases() -> Iterator[Case]:
    for batch, length in (*SHAPES, *OTHER_SHAPES):
        yield indexer_case(batch, length)
    yield ragged_case("ragged, 16 rows, contest", CONTEST_LENGTHS, num_pages=CONTEST_PAGES)
    yield ragged_case("ragged, 100 rows, 1 to 16384", uniform_lengths(100, 16 * K))
    yield ragged_case("ragged, 32 rows, uniform to 64K", uniform_lengths(32, 64 * K))
    for name, lengths in OUTLIERS:
        yield ragged_case(f"ragged, {name}", lengths)
    for rows in (16, 48, 64, 128, 256):
        lengths = log_uniform_lengths(rows)
        yield ragged_case(f"ragged, {rows} rows, log-uniform to 64K", lengths)
    for data in DISTRIBUTIONS:
        for batch, length in DISTRIBUTION_SHAPES:
            case = indexer_case(batch, length, data=data)
            yield replace(case, name=f"{case.name} {data}")
    for batch, length, next_n in REQUESTS:
        name = indexer_case(batch, length).name
        yield requests_case(f"{name}, next_n {next_n}", (length,) * batch, next_n)
    yield requests_case("64 requests, log-uniform, next_n 2", log_uniform_lengths(64), 2)


CASES = tuple(_cases())
OPERATION = Operation("indexer", make_task, {"cuda": CASES}, ("cold", "captured"))
