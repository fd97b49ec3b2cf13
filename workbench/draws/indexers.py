"""Calls of indexers over pages or shared keys: best tokens, best blocks, best of listed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import flashdsa
from flashdsa.bench import cases
from flashdsa.bench.indexer import IndexerInputs
from flashdsa.problem import INDEX_HEAD_DIM, MXFP4_TOKEN_BYTES, PAGE_SIZE
from flashdsa.reference.quant import decode_e2m1
from flashdsa.verify.tolerances import (
    PRODUCT_TOLERANCE,
    PRODUCT_TOLERANCE_ANY_DATA,
    SCORE_TOLERANCES,
    TRAINED_SCORE_CUT,
)
from workbench.bench import prefill
from workbench.bench.attention import Prepared
from workbench.draws.distribution import Draw

JUDGED = 64
"""Rows whose ids are judged."""
PIECE = 2**26
"""Scores that are sorted at a time."""
PAGES_AT_ONCE = 16_384
SCALE_BYTES = 4
"""A token's, in either row of pages."""
LOWEST_SCALE, SCALES = 122, 9
"""ue8m0 bytes of drawn MXFP4 keys: the lowest, and how many; e4m3 holds such a key exactly."""
Rows = Tensor
"""Numbers of some queries, int64."""


class Mxfp4Inputs(IndexerInputs):
    """The same over pages of 68 bytes a token."""

    def row_keys(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's keys (tokens, 128) float64, and scales of 1."""
        raw = self.cache.flatten(1)[self.pages(row)].cpu()
        codes, scales = raw.split(
            [raw.shape[1] - PAGE_SIZE * SCALE_BYTES, PAGE_SIZE * SCALE_BYTES], 1
        )
        values = decode_e2m1(codes.reshape(-1, INDEX_HEAD_DIM // 2)).unflatten(1, (SCALE_BYTES, -1))
        bytes_ = scales.reshape(-1, SCALE_BYTES, 1).double()
        values = values * torch.exp2(bytes_ - 127).where(bytes_ < 255, torch.nan)
        keys = values.flatten(1)[: self.lengths[row]].to(self.cache.device)
        return keys, torch.ones(len(keys), device=keys.device)


class Row(NamedTuple):
    """Operands of one query's scores, in its positions' order."""

    q: Tensor  # (H, 128)
    keys: Tensor  # (length, 128)
    scales: Tensor  # (length,) or one number
    weights: Tensor  # (H,)


@dataclass(frozen=True)
class Levels:
    """A call of an indexer, with its operands apart from where keys lie.

    Attributes:
        choose: writes topk_indices, with block, candidates and sorted.
        scores_of: our own scores (n, width) of some rows, by position.
        row: operands of a row's scores.
        ids_of: ids (n, k) of tokens at positions (n, k) of some rows; -1 stays.
        lengths: (rows,) positions. width: of the longest row, at least 1.
        share: error of a score over the sum of its products' sizes, beside `tolerance` over that
            of its terms.
    """

    choose: Callable[..., None]
    scores_of: Callable[[Rows], Tensor]
    row: Callable[[int], Row]
    ids_of: Callable[[Rows, Tensor], Tensor]
    lengths: Tensor
    width: int
    topk: int
    block: int
    sorted: bool
    tolerance: float
    share: float
    candidates: Tensor | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether tokens are chosen, not blocks."""
        return self.candidates is not None or self.block == 1

    def choice(self, topk: int) -> Callable[..., Tensor]:
        """A call that writes a buffer of its own, of -99."""
        shape = len(self.lengths), topk
        ids = torch.full(shape, -99, dtype=torch.int32, device=self.lengths.device)

        def call(**how: Any) -> Tensor:
            self.choose(topk_indices=ids, block=self.block, **how)
            return ids

        return call

    def listed(self, kind: tuple[str, int] | None, g: torch.Generator) -> Levels:
        """The same among candidates: the best blocks, or any ids, some of which name none."""
        if kind is None:
            return self
        name, count = kind
        if name == "best":
            return replace(self, candidates=self.choice(count)())
        shape, blocks = (len(self.lengths), count), -(-self.lengths // self.block)
        share = torch.rand(shape, device=g.device, generator=g)
        drawn = (share * (blocks[:, None] + 3)).int() - 2
        far = torch.iinfo(torch.int32)
        drawn[:, ::7], drawn[:, 1::9] = far.max, far.min
        return replace(self, candidates=drawn)

    def ranked(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Scores (n, entries) of what may be chosen in some rows, and which entries these are."""
        scores, lengths = self.scores_of(rows), self.lengths[rows, None].long()
        scores = scores.nan_to_num(nan=-torch.inf)
        count, places = -(-scores.shape[1] // self.block), torch.arange(scores.shape[1])
        seen = places.to(lengths) < lengths
        if self.candidates is not None:
            some = self.candidates[rows].long()
            some = some.where((some >= 0) & (some < count), count)
            marks = torch.zeros(len(rows), count + 1, dtype=torch.bool, device=seen.device)
            marks.scatter_(1, some, True)
            seen &= marks[:, :count].repeat_interleave(self.block, 1)[:, : seen.shape[1]]
        if self.of_tokens:
            return scores.where(seen, -torch.inf), seen
        more = (0, -scores.shape[1] % self.block)
        best = pad(scores.where(seen, -torch.inf), more, value=-torch.inf)
        best = best.unflatten(1, (count, self.block)).amax(2)
        newest = (lengths - 1) // self.block
        best = best.masked_fill(torch.arange(count).to(newest) == newest, torch.inf)
        return best, seen[:, :: self.block]

    def best(self, values: Tensor, seen: Tensor) -> Tensor:
        """Entries (n, topk) of the best values by a stable sort, then -1."""
        order = values.sort(dim=1, descending=True, stable=True).indices
        behind = (~seen).gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices
        order = order.gather(1, behind)[:, : self.topk]
        order = pad(order, (0, self.topk - order.shape[1]), value=-1)
        slots = torch.arange(self.topk, device=order.device)
        return order.where(slots < seen.sum(1, keepdim=True), -1)

    def pieces(self) -> Iterator[Rows]:
        """The judged rows, some at a time."""
        count = len(self.lengths)
        rows = torch.linspace(0, count - 1, min(count, JUDGED), device=self.lengths.device)
        yield from rows.round().long().split(max(1, PIECE // self.width))

    def judge(self, ids: Tensor) -> cases.Verdict:
        """Scores of four rows in float64; ids of JUDGED rows by our own scores, all of them."""
        findings = [
            found for row in cases.judged_queries(len(ids)) for found in self._judge_scores(row)
        ]
        for rows in self.pieces():
            right = self.best(*self.ranked(rows))
            if self.of_tokens:
                right = self.ids_of(rows, right)
            found = ids[rows].long()
            bad = ((found < 0) != (right < 0)).any(1)
            if not self.sorted:
                found, right = (one.sort(dim=1).values for one in (found, right))
            bad |= (found != right).any(1)
            findings += [f"row {row}: not the best ids" for row in rows[bad].tolist()]
        return cases.Verdict({}, findings)

    def _judge_scores(self, number: int) -> list[str]:
        x, length = self.row(number), int(self.lengths[number])
        own = self.scores_of(torch.tensor([number], device=self.lengths.device))[0, :length]
        dots = x.keys.double() @ x.q.double().T
        sizes = x.keys.double().abs() @ x.q.double().abs().T
        weights, scales = x.weights.double(), torch.as_tensor(x.scales).double()
        right = (dots.relu() @ weights) * scales
        limit = self.tolerance * (dots.relu() @ weights.abs()) * scales
        limit += self.share * (sizes @ weights.abs()) * scales
        bad = ~((own - right).abs() <= limit) & ~(own.isnan() & right.isnan())
        return [f"row {number}: {int(bad.sum())} wrong scores"] if bool(bad.any()) else []


def make_two_levels(draw: Draw, x: Any, g: torch.Generator, backend: str) -> cases.Task:
    """The call of a draw over pages (`IndexerInputs`) or shared keys (`prefill.Inputs`)."""
    v = draw.values
    rest = v["topk"], backend, v["block"], v["sorted"]
    if draw.is_prefill:
        levels = over_keys(_planted_keys(v["keys"], x, g), *rest)
        seen = float(levels.lengths.double().sum())
        work = 2.0 * seen * v["heads"] * INDEX_HEAD_DIM
        ceiling = cases.products_ceiling(g.device.type)
    else:
        x = _planted_pages(v["keys"], x, g, mxfp4=v["dtype"] == "mxfp4")
        levels = over_pages(x, *rest)
        work, ceiling = float(x.tokens), cases.reading_ceiling(g.device.type)
        work *= x.cache.shape[-1]
    levels = levels.listed(v["candidates"], g)
    how = {"candidates": levels.candidates, "sorted": v["sorted"]}
    if v.get("ids") == "position" and levels.candidates is not None:
        how["ids"] = "position"
        levels = replace(levels, ids_of=lambda _, positions: positions)
    call = partial(levels.choice(v["topk"]), **how)
    return cases.Task(call, levels.judge, work, ceiling, levels, exact=True)


def by_torch(_: cases.Case, task: cases.Task) -> Prepared:
    """Our scores of all rows as a matrix, then torch: a maximum or a mask, and a top-k."""
    x: Levels = task.inputs
    every = torch.arange(len(x.lengths), device=x.lengths.device)
    if len(every) * x.width > prefill.TORCH_LIMIT:
        raise NotImplementedError("too many scores")

    def call() -> Tensor:
        values, seen = x.ranked(every)
        best = values.topk(min(x.topk, values.shape[1]))
        return best.indices.where(seen.gather(1, best.indices), -1)

    def judge(found: Tensor) -> cases.Verdict:
        findings = []
        for rows in x.pieces():
            values, seen = x.ranked(rows)
            right, some = x.best(values, seen)[:, : found.shape[1]], found[rows]
            taken = (values.gather(1, one.clamp(min=0)).sort(1).values for one in (right, some))
            if not torch.equal(*taken):
                findings.append(f"not the best values in rows {rows.tolist()}")
        return cases.Verdict({}, findings)

    return call, judge


def over_keys(
    x: prefill.Inputs, topk: int, backend: str, block: int = 1, by_score: bool = False
) -> Levels:
    """A call on keys that all queries share."""
    k, scale, weights = x["k_index"], x["k_scale"], x["weights"]
    starts, ends = x["starts"], x["ends"]
    begins = torch.zeros_like(ends) if starts is None else starts
    lengths = ends - begins
    width = max(1, int(lengths.max()))

    def scores_of(rows: Rows) -> Tensor:
        given = None if starts is None else starts[rows]
        q = x["q_index"].view(torch.uint8)[rows].view(k.dtype)
        scores = flashdsa.prefill_logits(
            q, k, weights[rows], given, ends[rows], k_scale=scale, backend=backend
        )
        at = begins[rows, None].long() + torch.arange(width, device=scores.device)
        return scores.gather(1, at.clamp(max=len(k) - 1))

    def row(number: int) -> Row:
        own = slice(int(begins[number]), int(ends[number]))
        some = torch.tensor(1.0) if scale is None else scale[own]
        return Row(x["q_index"][number], k[own], some, weights[number])

    def ids_of(rows: Rows, positions: Tensor) -> Tensor:
        return (positions + begins[rows, None]).where(positions >= 0, -1)

    choose = partial(flashdsa.dsa_topk_prefill, **x, backend=backend)
    share = 0.0 if backend == "cpu" else TRAINED_SCORE_CUT if scale is None else PRODUCT_TOLERANCE
    level = topk, block, by_score, SCORE_TOLERANCES[backend], share
    return Levels(choose, scores_of, row, ids_of, lengths, width, *level)


def over_pages(
    x: IndexerInputs, topk: int, backend: str, block: int = 1, by_score: bool = False
) -> Levels:
    """A call on pages of each request."""

    def scores_of(rows: Rows) -> Tensor:
        return flashdsa.indexer_logits(
            x.q.view(torch.uint8)[rows].view(x.q.dtype), x.cache, x.weights[rows],
            x.seq_lens[rows], x.block_table[rows // x.next_n], max(1, *x.lengths), backend=backend,
        )  # fmt: skip

    def row(number: int) -> Row:
        return Row(x.q[number], *x.row_keys(number), x.weights[number])

    def ids_of(rows: Rows, positions: Tensor) -> Tensor:
        pages = x.block_table[rows // x.next_n].long()
        pages = pages.gather(1, positions.clamp(min=0) // PAGE_SIZE)
        return (pages * PAGE_SIZE + positions % PAGE_SIZE).where(positions >= 0, -1)

    def choose(topk_indices: Tensor, candidates: Tensor | None = None, **how: Any) -> None:
        """Several queries of a request are a second dimension."""
        ids, some = topk_indices, candidates
        if x.next_n > 1:
            ids = ids.unflatten(0, (-1, x.next_n))
            some = None if some is None else some.unflatten(0, (-1, x.next_n))
        q, cache, weights, lengths, table, _ = x.operands
        inputs = q, cache, weights, lengths, table
        flashdsa.dsa_topk_indexer(*inputs, ids, candidates=some, backend=backend, **how)

    is_mxfp4 = x.cache.shape[-1] == MXFP4_TOKEN_BYTES
    share = PRODUCT_TOLERANCE_ANY_DATA if is_mxfp4 else PRODUCT_TOLERANCE
    level = topk, block, by_score, x.tolerance, 0.0 if backend == "cpu" else share
    width = max(1, *x.lengths)
    return Levels(choose, scores_of, row, ids_of, x.seq_lens, width, *level)


def _distinct(keys: str | None) -> int | None:
    """Number of different keys; None: all are drawn."""
    return {"equal": 1, "five": 5, "rising": 1, "falling": 1}.get(keys or "")


def _planted_keys(keys: str | None, x: prefill.Inputs, g: torch.Generator) -> prefill.Inputs:
    """Operands with shared keys of one of the kinds."""
    k, scale, rises = x["k_index"].clone(), x["k_scale"], keys in ("rising", "falling")
    count = len(k)
    distinct = _distinct(keys)
    if distinct:
        pick = torch.randint(min(distinct, count), (count,), device=g.device, generator=g)
        k = k.view(torch.uint8)[pick].view(k.dtype)
        scale = None if scale is None else scale[pick]
    factor = torch.ones(count, device=g.device)
    if rises:
        factor += torch.arange(count, device=g.device) / count
        factor = factor.flip(0) if keys == "falling" else factor
    if keys == "NaN":
        factor[::5] = torch.nan
    weights = x["weights"].abs() if rises else x["weights"]
    if scale is None:
        return x | {"k_index": k * factor[:, None].to(k.dtype), "weights": weights}
    return x | {"k_index": k, "k_scale": scale * factor, "weights": weights}


def _planted_pages(
    keys: str | None, x: IndexerInputs, g: torch.Generator, *, mxfp4: bool
) -> IndexerInputs:
    """Operands with pages of one of the kinds, of 68 bytes a token or of 132."""
    if mxfp4:
        shape = (*x.cache.shape[:3], MXFP4_TOKEN_BYTES)
        cache = torch.randint(256, shape, dtype=torch.uint8, device=g.device, generator=g)
        scales = cache.flatten(1)[:, -PAGE_SIZE * SCALE_BYTES :]
        scales.remainder_(SCALES).add_(LOWEST_SCALE)
        x = Mxfp4Inputs(**vars(x) | {"cache": cache})
    if keys in ("rising", "falling"):
        x.weights.abs_()
    place = torch.zeros(len(x.cache), PAGE_SIZE, device=g.device)  # of a token along its request
    for row in range(0, len(x.lengths), x.next_n):
        own = x.pages(max(range(row, row + x.next_n), key=x.lengths.__getitem__))
        ramp = torch.arange(len(own) * PAGE_SIZE, device=g.device) / max(1, len(own) * PAGE_SIZE)
        place[own] = (1 - ramp if keys == "falling" else ramp).view(-1, PAGE_SIZE)
    pages, distinct = x.cache.flatten(1), _distinct(keys)
    of_scales = PAGE_SIZE * SCALE_BYTES
    first = pages[0, :-of_scales].clone().view(PAGE_SIZE, -1)
    first_scales = pages[0, -of_scales:].clone().view(PAGE_SIZE, -1)
    is_e4m3 = first.shape[1] == INDEX_HEAD_DIM
    for some, at in zip(pages.split(PAGES_AT_ONCE), place.split(PAGES_AT_ONCE), strict=True):
        codes, scales = some[:, :-of_scales], some[:, -of_scales:]
        if distinct:
            pick = torch.randint(distinct, at.shape, device=g.device, generator=g)
            codes.copy_(first[pick].flatten(1))
            scales.copy_(first_scales[pick].flatten(1))
        if is_e4m3:
            values = scales.contiguous().view(torch.float32)
            values *= 1 + at if keys in ("rising", "falling") else 1
            if keys == "NaN":
                values[:, ::5] = torch.nan
            scales.copy_(values.view(torch.uint8))
        elif keys in ("rising", "falling"):
            byte = LOWEST_SCALE + (at * SCALES).clamp(max=SCALES - 1).to(torch.uint8)
            scales.copy_(byte.repeat_interleave(SCALE_BYTES, 1))
        elif keys == "NaN":
            scales[:, :: 5 * SCALE_BYTES] = 255
    return x
