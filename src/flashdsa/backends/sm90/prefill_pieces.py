"""Division of a prefill call among launches and clusters: so that the last wave fills the device.

A tile of queries is one CTA's, or a cluster's, whose CTAs have a part of its keys each. Tiles
beyond whole waves of one kind are a second launch. Times are estimates, in units of the time that a
CTA takes for 64 keys, for a device that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from flashdsa.backends.indexer.choice import USUAL_CLUSTER
from flashdsa.backends.reasons import Candidate, Choice
from flashdsa.backends.runner import Runner, allowed_clusters
from flashdsa.heuristics.h200 import Prefill
from flashdsa.kernels.indexer.sm90.prefill.plan import TILE_KEYS, PrefillPlan

SHOWN = 4
"""Divisions that an explanation names."""


class Piece(NamedTuple):
    """A launch."""

    first: int  # query
    end: int
    num_ctas: int
    cluster_size: int  # 1: no CTA shares a tile


class Work(NamedTuple):
    """Tiles, the last one first: those before it see fewer keys."""

    tiles: int  # that need scores
    unscored: int  # further ones
    longest: float  # key tiles of the first
    shorter: float  # key tiles by which each next one has fewer

    def behind(self, tiles: int) -> Work:
        """The work without the first `tiles`."""
        left = self.longest - self.shorter * tiles
        return self._replace(tiles=self.tiles - tiles, longest=left)


def pieces_of(
    runner: Runner, shared: PrefillPlan, queries: int, keys: int, topk: int, ragged: bool
) -> tuple[Piece, ...]:
    """Choose the launches of a call, in their order.

    Args:
        shared: the plan whose CTAs share tiles.
        ragged: each query's first key is known to the device alone, so that nobody knows how long
            the tiles take. Clusters share tiles then only if all tiles of their launch are theirs
            at once. Otherwise the last query sees all keys, and each one before it a key less: a
            guess.
    """
    at_once = clusters_at_once(runner, shared)
    return _pieces(at_once, shared.tile_queries, queries, keys, topk, ragged)


def clusters_at_once(runner: Runner, shared: PrefillPlan) -> tuple[tuple[int, int], ...]:
    """(CTAs of a cluster, such clusters that run at once), from one CTA on."""
    capacity = runner.cluster_capacity(shared.threads, shared.smem_bytes)
    allowed = allowed_clusters(capacity, USUAL_CLUSTER)
    return tuple(
        (size, min(number, runner.num_sms // size))
        for size, number in sorted({**allowed, 1: runner.num_sms}.items())
        if size <= shared.most_parts and min(number, runner.num_sms // size) > 0
    )


def explain(
    runner: Runner, shared: PrefillPlan, queries: int, keys: int, topk: int, ragged: bool
) -> Choice:
    """Say why a call has these launches, beside the nearest others. Arguments as of `pieces_of`."""
    clusters = dict(clusters_at_once(runner, shared))
    work = work_of(shared.tile_queries, queries, keys, topk, ragged)
    taken, divisions = divide(clusters, work, ragged)
    alone = divisions[0][0]
    nearest = sorted(divisions, key=lambda one: (one[1] != taken, one))[:SHOWN]
    rows = tuple(
        Candidate(
            ", then ".join(f"clusters of {size}" if size > 1 else "CTAs alone" for size in sizes),
            f"{len(sizes)} launch" + "es" * (len(sizes) > 1),
            f"{time / alone:.2f} of the estimated time of CTAs alone",
            taken=sizes == taken,
        )
        for time, sizes in nearest
    )
    pays = f"clusters share tiles where they take {Prefill.WORTHWHILE:g} of the time or less"
    return Choice(f"the first of {len(divisions)} is taken; {pays}", rows)


@lru_cache(maxsize=256)
def _pieces(
    at_once: tuple[tuple[int, int], ...],
    tile_queries: int,
    queries: int,
    keys: int,
    unscored: int,
    ragged: bool,
) -> tuple[Piece, ...]:
    """Choose by the number of clusters that run at once, (size, number) from size 1 on."""
    clusters = dict(at_once)
    work = work_of(tile_queries, queries, keys, unscored, ragged)
    sizes, _ = divide(clusters, work, ragged)
    pieces: list[Piece] = []
    end, left = queries, work
    for size in sizes:
        taken = left.tiles // clusters[size] * clusters[size]
        first = ((end - 1) // tile_queries - (taken - 1)) * tile_queries
        if len(pieces) == len(sizes) - 1:
            first = 0
        most = -(-(end - first) // tile_queries)
        number = clusters[1] if size == 1 else min(clusters[size], most) * size
        pieces.append(Piece(first, end, number, size))
        end, left = first, left.behind(taken)
    return tuple(pieces)


def work_of(tile_queries: int, queries: int, keys: int, unscored: int, ragged: bool) -> Work:
    """The work of a call; arguments as of `pieces_of`, `unscored` its topk."""
    tiles = -(-queries // tile_queries)
    scored = min(tiles, max(-(-(keys - unscored) // tile_queries), 0))
    if ragged and scored:
        return Work(tiles, 0, keys / TILE_KEYS, 0.0)
    return Work(scored, tiles - scored, keys / TILE_KEYS, tile_queries / TILE_KEYS)


def divide(
    clusters: Mapping[int, int], work: Work, ragged: bool
) -> tuple[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]:
    """Return the size of each launch's clusters, and all divisions, as `_divisions` gives them; the
    first one has one launch of CTAs alone."""
    alone, *_ = divisions = list(_divisions(clusters, work, 2, ragged))
    time, sizes = min(divisions)
    return (1,) if time > Prefill.WORTHWHILE * alone[0] else sizes, divisions


def _divisions(
    clusters: Mapping[int, int], work: Work, launches: int, ragged: bool
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(time, size of each launch's clusters): all tiles in one launch, or whole waves and the
    rest."""
    for size, number in clusters.items():
        if ragged and size > 1 and number < work.tiles:
            continue
        rest = -(-work.unscored // number) * Prefill.UNSCORED
        yield _time(size, number, work) + rest, (size,)
        whole = work.tiles // number * number
        if launches > 1 and 0 < whole < work.tiles:
            rest_of_work = work.behind(whole)
            time, sizes = min(_divisions(clusters, rest_of_work, launches - 1, ragged))
            own = _time(size, number, work._replace(tiles=whole))
            yield own + Prefill.LAUNCH + time, (size, *sizes)


def _time(size: int, number: int, work: Work) -> float:
    """Time of a launch of `number` clusters of `size` CTAs: each turn is as long as the tile that
    has most keys, the first."""
    turns = -(-work.tiles // number)
    longest = work.longest - work.shorter * number * (turns - 1) / 2  # of a turn, on average
    return turns * (longest / size + Prefill.RANKING + Prefill.SHARING * (size > 1))
