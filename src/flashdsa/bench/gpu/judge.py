"""Is what was timed right? Ids against scores in float64, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.bench.gpu.inputs import BenchInputs
from flashdsa.problem import PAGE_SIZE
from flashdsa.verify.tolerances import SCORE_TOLERANCES

TOLERANCE = SCORE_TOLERANCES["sm90"]
"""Error of a score relative to the sum of its terms' sizes: Hopper's short fp8 accumulator."""
EXACT = ("equal", "two", "ascending", "descending")
"""Distributions whose best tokens are the same in any arithmetic."""
SCORED_ROWS = 16


def judge_ids(inputs: BenchInputs, ids: Tensor) -> list[str]:
    """What is wrong with the ids, in words; every row's form, SCORED_ROWS rows' scores."""
    findings = []
    scored = scored_rows(len(inputs.case.lengths))
    for row in range(len(inputs.case.lengths)):
        positions, finding = _positions(inputs, row, ids[row])
        if finding is None and row in scored:
            finding = judge_positions(inputs, row, positions, inputs.case.data in EXACT)
        if finding:
            findings.append(f"row {row}: {finding}")
    return findings


def judge_peer(inputs: BenchInputs, positions: Tensor) -> list[str]:
    """The same for a peer's positions (B, topk): the rows that it had to choose in, no tie rule."""
    findings = []
    topk = inputs.ids.shape[1]
    for row in scored_rows(len(inputs.case.lengths)):
        if inputs.case.lengths[row] > topk:
            finding = judge_positions(inputs, row, positions[row, :topk].long(), exact=False)
            findings += [f"row {row}: {finding}"] if finding else []
    return findings


def scored_rows(batch: int) -> list[int]:
    """Which rows' scores are recomputed: evenly spread ones."""
    count = min(batch, SCORED_ROWS)
    return [row * batch // count for row in range(count)]


def judge_positions(inputs: BenchInputs, row: int, positions: Tensor, exact: bool) -> str | None:
    """What is wrong with the positions chosen in a row; None if nothing is."""
    length = inputs.case.lengths[row]
    if positions.numel() and not bool(((positions >= 0) & (positions < length)).all()):
        return "a position outside the row"
    if positions.unique().numel() != positions.numel():
        return "a token twice"
    if positions.numel() in (0, length):
        return None
    scores, sizes = float64_scores(inputs, row)
    if exact:
        _, scales = inputs.row_keys(row)
        best = scales.sort(descending=True, stable=True).indices[: positions.numel()]
        same = bool((best.sort().values == positions.sort().values).all())
        return None if same else "ties not broken to the smallest positions"
    chosen = torch.zeros(length, dtype=torch.bool, device=scores.device)
    chosen[positions] = True
    lost = float(scores[~chosen].max() - scores[chosen].min())
    limit = 2 * TOLERANCE * float(sizes.max())
    return f"left out a score better by {lost:.3g} (limit {limit:.3g})" if lost > limit else None


def float64_scores(inputs: BenchInputs, row: int) -> tuple[Tensor, Tensor]:
    """A row's scores, and the same of |weights|."""
    keys, scales = inputs.row_keys(row)
    dots = (keys.double() @ inputs.q[row].double().T).relu()
    weights = inputs.weights[row].double()
    return (dots @ weights) * scales, (dots @ weights.abs()) * scales


def _positions(inputs: BenchInputs, row: int, ids: Tensor) -> tuple[Tensor, str | None]:
    """The row's chosen positions, and what is wrong with the form of its ids."""
    length = inputs.case.lengths[row]
    count = min(length, len(ids))
    if not bool((ids[count:] == -1).all()):
        return ids, "not -1 behind the last id"
    chosen = ids[:count].long()
    num_pages = len(inputs.cache)
    if not bool(((chosen >= 0) & (chosen < num_pages * PAGE_SIZE)).all()):
        return ids, "an id outside the cache"
    pages = inputs.block_table[row // inputs.case.next_n, : -(-length // PAGE_SIZE)].long()
    place = torch.full((num_pages,), -1, dtype=torch.long, device=ids.device)
    place[pages] = torch.arange(len(pages), device=ids.device)
    places = place[chosen // PAGE_SIZE]
    if bool((places < 0).any()):
        return ids, "an id of another row's page"
    return places * PAGE_SIZE + chosen % PAGE_SIZE, None
