"""The indexer and top-k to time, judged against scores in float64 on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import flashdsa
from flashdsa.bench.cases import Case, Operation, Task, Verdict, products_ceiling, reading_ceiling
from flashdsa.problem import (
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    NUM_INDEX_HEADS,
    PAGE_BYTES,
    PAGE_KEY_BYTES,
    PAGE_SIZE,
)
from flashdsa.verify.tolerances import SCORE_TOLERANCES

E4M3_MAX = 448.0
SCORED_ROWS = 16
_PAGES_AT_ONCE = 16384
K = 1024


@dataclass(frozen=True)
class IndexerInputs:
    """Arguments of `dsa_topk_indexer`; every request has pages of its own, in random order.

    Queries, weights, lengths and ids are those of all rows; the block table has a row a request.

    Attributes:
        lengths: tokens of each row. next_n: neighbouring rows of one request, over the same pages.
    """

    lengths: tuple[int, ...]
    next_n: int
    q: Tensor
    cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor
    ids: Tensor
    tolerance: float
    """Error of a score relative to the sum of its terms' sizes."""

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Operands in the operation's order, the output last. Several queries of a request are a
        second dimension."""
        rows = (self.q, self.weights, self.seq_lens, self.ids)
        if self.next_n > 1:
            rows = tuple(one.unflatten(0, (-1, self.next_n)) for one in rows)
        q, weights, seq_lens, ids = rows
        return q, self.cache, weights, seq_lens, self.block_table, ids

    @property
    def tokens(self) -> int:
        """All keys that must be read: of a request's rows those of the longest one."""
        return sum(max(of_one) for of_one in _requests(self.lengths, self.next_n))

    def pages(self, row: int) -> Tensor:
        """The pages of a row, in order of position."""
        count = -(-self.lengths[row] // PAGE_SIZE)
        return self.block_table[row // self.next_n, :count].long()

    def row_keys(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's e4m3 keys (tokens, 128) and their scales (tokens,), in order of position."""
        raw = self.cache.view(-1, PAGE_BYTES)[self.pages(row)]
        keys = raw[:, :PAGE_KEY_BYTES].contiguous().view(torch.float8_e4m3fn)
        scales = raw[:, PAGE_KEY_BYTES:].contiguous().view(torch.float32)
        length = self.lengths[row]
        return keys.view(-1, INDEX_HEAD_DIM)[:length], scales.view(-1)[:length]


def _requests(lengths: Sequence[int], next_n: int) -> list[Sequence[int]]:
    return [lengths[i : i + next_n] for i in range(0, len(lengths), next_n)]


def make_inputs(case: Case, device: str, seed: int, backend: str = "cpu") -> IndexerInputs:
    """Standard normal operands; the output is poisoned with -99.

    Options: lengths: of the rows, where they differ; next_n.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = tuple(case.options.get("lengths") or (case.s_kv,) * case.s)
    next_n = int(case.options.get("next_n", 1))
    pages = [-(-max(of_one) // PAGE_SIZE) for of_one in _requests(lengths, next_n)]
    pool = max(sum(pages), 1)
    order = torch.randperm(pool, generator=generator, device=device).int()
    table = torch.zeros(len(pages), max(1, *pages), dtype=torch.int32, device=device)
    for row, taken in enumerate(order[: sum(pages)].split(pages)):
        table[row, : len(taken)] = taken
    heads = (len(lengths), case.h)
    q = torch.randn(*heads, INDEX_HEAD_DIM, generator=generator, device=device)
    weights = torch.randn(heads, generator=generator, device=device)
    cache = torch.empty(pool, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8, device=device)
    for some in cache.view(-1, PAGE_BYTES).split(_PAGES_AT_ONCE):  # quantised as the library does
        keys = torch.randn(len(some), PAGE_SIZE, INDEX_HEAD_DIM, generator=generator, device=device)
        scales = keys.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
        codes = (keys / scales[..., None]).to(torch.float8_e4m3fn)
        some[:, :PAGE_KEY_BYTES] = codes.view(torch.uint8).view(len(some), -1)
        some[:, PAGE_KEY_BYTES:] = scales.view(torch.uint8).view(len(some), -1)
    return IndexerInputs(
        lengths,
        next_n,
        q.to(torch.float8_e4m3fn),
        cache,
        weights,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table,
        torch.full((len(lengths), case.topk), -99, dtype=torch.int32, device=device),
        SCORE_TOLERANCES[backend],
    )


def make_indexer(case: Case, device: str, seed: int, backend: str) -> Task:
    """`dsa_topk_indexer`, bound by products on a CPU and by reading keys on a GPU."""
    return indexer_task(make_inputs(case, device, seed, backend), backend)


def indexer_task(x: IndexerInputs, backend: str) -> Task:
    """The call on some inputs, and how it is judged."""
    device, operands = x.cache.device.type, x.operands

    def call() -> Tensor:
        flashdsa.dsa_topk_indexer(*operands, backend=backend)
        return x.ids

    work, ceiling = float(x.tokens * INDEX_TOKEN_BYTES), reading_ceiling(device)
    if device == "cpu":
        work = 2.0 * sum(x.lengths) * x.q.shape[1] * INDEX_HEAD_DIM
        ceiling = products_ceiling(device)
    return Task(call, partial(judge_ids, x), work, ceiling, x, exact=True)


def judge_ids(x: IndexerInputs, ids: Tensor) -> Verdict:
    """Every row's form, and SCORED_ROWS' scores."""
    findings, scored = [], scored_rows(len(x.lengths))
    for row in range(len(x.lengths)):
        positions, finding = positions_of(x, row, ids[row])
        if finding is None and row in scored:
            finding = judge_positions(x, row, positions)
        if finding:
            findings.append(f"row {row}: {finding}")
    return Verdict({}, findings)


def scored_rows(batch: int) -> list[int]:
    """The rows whose scores are recomputed: evenly spread ones."""
    count = min(batch, SCORED_ROWS)
    return [row * batch // count for row in range(count)]


def judge_positions(x: IndexerInputs, row: int, positions: Tensor) -> str | None:
    """Return what is wrong with the positions chosen in a row; None if nothing is."""
    length = x.lengths[row]
    if positions.numel() and not bool(((positions >= 0) & (positions < length)).all()):
        return "a position outside the row"
    if positions.unique().numel() != positions.numel():
        return "a token twice"
    if positions.numel() in (0, length):
        return None
    return judge_choice(*float64_scores(x, row), positions, x.tolerance)


def judge_choice(scores: Tensor, sizes: Tensor, positions: Tensor, tolerance: float) -> str | None:
    """Whether a better score was left out; `sizes` are the sums of the scores' terms' sizes."""
    chosen = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    chosen[positions] = True
    lost = float(scores[~chosen].max() - scores[chosen].min())
    limit = 2 * tolerance * float(sizes.max())
    return None if lost <= limit else f"left out a score better by {lost:.3g} (limit {limit:.3g})"


def float64_scores(x: IndexerInputs, row: int) -> tuple[Tensor, Tensor]:
    """A row's scores, and the same of |weights|."""
    keys, scales = x.row_keys(row)
    dots = (keys.double() @ x.q[row].double().T).relu()
    weights = x.weights[row].double()
    return (dots @ weights) * scales, (dots @ weights.abs()) * scales


def positions_of(x: IndexerInputs, row: int, ids: Tensor) -> tuple[Tensor, str | None]:
    """The row's chosen positions, and what is wrong with the form of its ids."""
    count = min(x.lengths[row], len(ids))
    if not bool((ids[count:] == -1).all()):
        return ids, "not -1 after the last id"
    chosen, num_pages = ids[:count].long(), len(x.cache)
    if not bool(((chosen >= 0) & (chosen < num_pages * PAGE_SIZE)).all()):
        return ids, "an id outside the cache"
    pages = x.pages(row)
    place = torch.full((num_pages,), -1, dtype=torch.long, device=ids.device)
    place[pages] = torch.arange(len(pages), device=ids.device)
    places = place[chosen // PAGE_SIZE]
    if bool((places < 0).any()):
        return ids, "an id of another row's page"
    return places * PAGE_SIZE + chosen % PAGE_SIZE, None


def make_topk(case: Case, device: str, seed: int, backend: str) -> Task:
    """`topk_indices` of random scores, held to reading these once."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(case.s, case.s_kv, generator=generator, device=device)
    lengths = torch.full((case.s,), case.s_kv, dtype=torch.int32, device=device)
    call = partial(flashdsa.topk_indices, scores, lengths, case.topk, backend=backend)

    def judge(found: Tensor) -> Verdict:
        count = min(case.topk, case.s_kv)
        picked = scores.gather(1, found[:, :count].long().clamp(0, case.s_kv - 1))
        same = torch.equal(picked.sort(1).values, scores.topk(count, 1).values.flip(1))
        twice = any(row.unique().numel() != count for row in found[:, :count])
        return Verdict({}, [] if same and not twice else ["not the best scores, each once"])

    size = float(scores.numel() * scores.element_size())
    return Task(call, judge, size, reading_ceiling(device), scores, exact=True)


def indexer_case(batch: int, length: int, **options: object) -> Case:
    """Rows of one length, named as 32/16K or 32/2049."""
    short = f"{length // K}K" if length % K == 0 else str(length)
    return Case(batch, length, NUM_INDEX_HEADS, 2048, "fp8", options, f"{batch}/{short}")


def ragged_case(name: str, lengths: Sequence[int], **options: object) -> Case:
    """Rows of these lengths."""
    rest = {"lengths": tuple(lengths)} | options
    return Case(len(lengths), max(lengths), NUM_INDEX_HEADS, 2048, "fp8", rest, name)


def requests_case(name: str, lengths: Sequence[int], next_n: int) -> Case:
    """Requests of these lengths with several queries each, the last of which sees all tokens."""
    rows = [n - behind for n in lengths for behind in range(next_n - 1, -1, -1)]
    return ragged_case(name, rows, next_n=next_n)


SHAPES = (
    *((1, n * K) for n in (8, 32, 128)),
    *((8, 16 * K), (32, 4 * K), (32, 16 * K), (32, 64 * K), (128, 16 * K), (128, 64 * K)),
)
"""(B, seq_len)."""
INDEXER_CASES = (
    *(indexer_case(batch, length) for batch, length in SHAPES),
    ragged_case("ragged, 128K + 63 x 2K", (128 * K, *[2 * K] * 63)),
    requests_case("32/16K, next_n 2", (16 * K,) * 32, 2),
)
_CPU = (Case(h=NUM_INDEX_HEADS, dtype="fp8"),)
OPERATIONS = (
    Operation("indexer", make_indexer, {"cpu": _CPU, "cuda": INDEXER_CASES}, ("cold",)),
    Operation(
        "topk",
        make_topk,
        {
            "cpu": (Case(h=1, dtype="float32"),),
            "cuda": tuple(Case(b, n, 1, 2048, "float32", name=f"{b} x {n}") for b, n in SHAPES),
        },
        ("cold",),
    ),
)
