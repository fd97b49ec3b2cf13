"""Constants of a choice, fitted to documents of ways: the choice is made anew for every draw.

A draw says all that the host knows of its call. So other constants can be tried without a GPU: the
way that they choose has its time in the document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.recorder import Recorder
from flashdsa.backends.sm90.sparse_mla_ways import Call, ways
from flashdsa.heuristics.h200 import SPARSE_MLA
from flashdsa.heuristics.sparse_mla import SparseMlaConstants
from flashdsa.problem import D_QK, PAGE_SIZE
from flashdsa.row_formats import V32
from workbench.draws.distribution import Draw, draw
from workbench.ways.judge import CONDITIONS

OPERATIONS = ("forward", "prompts", "decode", "chats")
"""Operations whose draws say their calls: one list of ids a query, 576 columns."""
FACTORS = (0.8, 0.9, 0.96, 1.04, 1.1, 1.25)
"""By which each constant is tried, one after another."""
LEAST_GAIN = 1e-4
"""Share of the time from which another value is kept."""
Rows = Sequence[Mapping[str, Any]]
Path = tuple[Any, ...]


class Fit(NamedTuple):
    """Constants, and what they are worth.

    Attributes:
        loss: of those that were given, and of these, over the draws that they are fitted to.
        other_half: the same where they are fitted to every second draw and tried on the others, in
            the mean of both halves: what to expect of new draws.
    """

    constants: SparseMlaConstants
    loss: tuple[float, float]
    other_half: tuple[float, float]


class Tried(NamedTuple):
    """A draw's call, and the times of its ways over the fastest one's, the mean of hot and cold."""

    call: Call
    times: Mapping[str, float]


def call_of(draw: Draw) -> Call:
    """The call of a draw, of one of OPERATIONS, as the backend describes it."""
    v, lists = draw.values, (draw.values["topk"], 0)
    form, most = None, v.get("max_logits", False)
    if draw.operation == "forward":
        queries, keys, given = v["S"], v["S_kv"], v["lengths"] is not None
    elif draw.operation == "prompts":
        queries, keys, given = draw.queries, draw.keys, v["lengths"]
    else:
        next_n = v["next_n"]
        queries, given = len(draw.lengths) * next_n, v["lengths"]
        keys = sum(-(-tokens // PAGE_SIZE) for tokens in draw.lengths) * PAGE_SIZE
        if draw.operation == "decode":
            given = given or min(draw.lengths) - next_n + 1 < v["topk"]
        form = V32 if v["rows"] == "packed" else None
    return Call(
        queries, v["heads"], D_QK, lists, lists, keys, form, lengths=given,
        lacks_lengths=not given, max_logits=most,
    )  # fmt: skip


def tried(rows: Rows) -> list[Tried]:
    """The calls of a document's draws that have several ways."""
    found = []
    for row in rows:
        timed = {name: way for name, way in row["ways"].items() if CONDITIONS[0] in way}
        if len(timed) > 1:
            operation, seed, number = row["line"].split(maxsplit=1)[0].split("/")
            logs = dict.fromkeys(timed, 0.0)
            for condition in CONDITIONS:
                fastest = min(way[condition] for way in timed.values())
                for name, way in timed.items():
                    logs[name] += math.log(way[condition] / fastest) / len(CONDITIONS)
            # Since 2026-11-30 every forward has the largest logits.
            times = {name.replace("_max_logits", ""): math.exp(log) for name, log in logs.items()}
            found.append(Tried(call_of(draw(operation, int(seed), int(number))), times))
    return found


def loss(calls: Iterable[Tried], of: SparseMlaConstants) -> float:
    """Time of the ways that the constants choose over the fastest ones', in the mean.

    A way that was not timed counts as the slowest one.
    """
    runner, logs = Recorder(H200), []
    for call, times in calls:
        found = ways(runner, call, of)
        taken = str(min(found, key=found.__getitem__))
        logs.append(math.log(times.get(taken, max(times.values()))))
    return math.exp(math.fsum(logs) / len(logs))


def paths(value: Any) -> Iterator[Path]:
    """Paths to all numbers of constants: fields and keys, from the outermost."""
    if isinstance(value, int | float):
        yield ()
        return
    for key, inner in _parts(value).items():
        yield from ((key, *path) for path in paths(inner))


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, SparseMlaConstants):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value._asdict())


def changed(value: Any, path: Path, factor: float) -> Any:
    """The same constants but for the number at a path, which is multiplied."""
    if not path:
        new = value * factor
        return round(new) if isinstance(value, int) else float(f"{new:.3g}")
    inner = {path[0]: changed(_parts(value)[path[0]], path[1:], factor)}
    if isinstance(value, Mapping):
        return {**value, **inner}
    if isinstance(value, SparseMlaConstants):
        return replace(value, **inner)
    return value._replace(**inner)


def fitted(
    calls: Sequence[Tried],
    of: SparseMlaConstants = SPARSE_MLA,
    on_progress: Callable[[float, int, str], None] = lambda *_: None,
) -> SparseMlaConstants:
    """Constants that choose better: each number is moved as long as the loss falls."""
    least, all_paths, moved = loss(calls, of), list(paths(of)), True
    while moved:
        moved = False
        for number, path in enumerate(all_paths):
            on_progress(number, len(all_paths), f"{least:.4f}")
            for factor in FACTORS:
                new = changed(of, path, factor)
                found = loss(calls, new)
                if found < least - LEAST_GAIN:
                    of, least, moved = new, found, True
    return of


def fit(rows: Rows, on_progress: Callable[[float, int, str], None] = lambda *_: None) -> Fit:
    """Fit the constants of the forward and decode to documents' draws."""
    calls = tried(rows)
    halves = calls[::2], calls[1::2]
    others = [loss(b, fitted(a, on_progress=on_progress)) for a, b in (halves, halves[::-1])]
    before = [loss(half, SPARSE_MLA) for half in halves]
    best = fitted(calls, on_progress=on_progress)
    both = loss(calls, SPARSE_MLA), loss(calls, best)
    return Fit(best, both, (math.sqrt(math.prod(before)), math.sqrt(math.prod(others))))
