"""Counts what the Hopper indexer's slowest warp executes, for the table of the performance model.

    python -m workbench.probes.count_indexer_paths

Prints the lines of `_COUNTED` in workbench/model/indexer_sm90.py, with the way to the
first page behind each; emulated runs of every shape; ten minutes, most of them for 112 CTAs.

A CTA's slowest warp is counted before and after its last matrix instruction, so that what overlaps
with the stream of operands can be told from what comes behind it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from flashdsa.backends.emulated.runner import compiled
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from ptxemu.cutedsl import emulate
from ptxemu.events import Agent, Observer
from workbench.model.indexer_sm90 import shapes

GLOBAL, SHARED, SHUFFLE, BARRIER, ATOMIC, FENCE = (
    "global_trips",
    "shared_trips",
    "shuffles",
    "barriers",
    "atomics",
    "fences",
)


@dataclass
class Path:
    """One warp's work, or a part of it.

    Attributes:
        instructions: executed, of PTX. global_trips, shared_trips: runs of loads with nothing
            visible between them: the loads of a run are in flight together. shuffles: and votes.
        barriers: of the CTA's warps. atomics, fences: of device memory.
    """

    instructions: int = 0
    global_trips: int = 0
    shared_trips: int = 0
    shuffles: int = 0
    barriers: int = 0
    atomics: int = 0
    fences: int = 0

    def minus(self, other: Path) -> Path:
        """What is left without `other`."""
        mine, theirs = asdict(self), asdict(other)
        return Path(**{name: mine[name] - theirs[name] for name in mine})

    def copy(self) -> Path:
        """The same, apart."""
        return Path(**asdict(self))


def event_of(modifiers: tuple[str, ...]) -> str | None:
    """Which wait an instruction stands for; None: none of its own."""
    name = modifiers[0]
    if name == "ld":
        if "global" in modifiers:
            return GLOBAL
        return SHARED if any(m.startswith("shared") for m in modifiers) else None
    if name in ("shfl", "vote", "redux"):
        return SHUFFLE
    if name in ("bar", "barrier") and "cluster" not in modifiers:
        return BARRIER
    if name == "atom":
        return SHARED if any(m.startswith("shared") for m in modifiers) else ATOMIC
    if name in ("fence", "membar"):
        return FENCE if {"gpu", "gl", "sys"} & set(modifiers) else None
    return None


class WarpPaths(Observer):
    """Listens to a launch; afterwards `slowest` gives the longest warp of every CTA."""

    def __init__(self) -> None:
        self._all: dict[int, Path] = {}
        self._until_mma: dict[int, Path] = {}
        self._until_copy: dict[int, Path] = {}
        self._last: dict[int, str | None] = {}
        self._place: dict[int, tuple[int, int]] = {}

    def cta_started(self, cta: Any) -> None:
        """Know the warps."""
        for warp in cta.warps:
            self._all[warp.agent_id] = Path()
            self._place[warp.agent_id] = (len(self._place) // len(cta.warps), warp.index)

    def block_executed(self, agent: Agent, first_pc: int, count: int, lanes: int) -> None:
        """A run of pure instructions."""
        self._all[agent.agent_id].instructions += count

    def instruction_executed(self, agent: Agent, instruction: Any, lanes: int) -> None:
        """A visible one."""
        path = self._all.get(agent.agent_id)
        if path is None:
            return
        path.instructions += 1
        event = event_of(instruction.modifiers)
        repeated = event in (GLOBAL, SHARED) and event == self._last.get(agent.agent_id)
        if event is not None and not repeated:
            setattr(path, event, getattr(path, event) + 1)
        self._last[agent.agent_id] = event
        if instruction.modifiers[0] == "wgmma":
            self._until_mma[agent.agent_id] = path.copy()
        if instruction.modifiers[:4] == ("cp", "async", "bulk", "tensor"):
            self._until_copy.setdefault(agent.agent_id, path.copy())

    def slowest(self) -> dict[int, tuple[Path, Path]]:
        """Of every CTA (in the order in which they started) the warp with most instructions, up to
        its last matrix instruction and after it."""
        found: dict[int, tuple[Path, Path]] = {}
        for agent_id, path in self._all.items():
            cta, _ = self._place[agent_id]
            until = self._until_mma.get(agent_id)
            if until is None:
                continue
            before = found.get(cta)
            if before is None or path.instructions > sum(p.instructions for p in before):
                found[cta] = (until, path.minus(until))
        return found

    def until_first_copy(self) -> Path:
        """The longest way of a warp to its first tensor copy."""
        return max(self._until_copy.values(), key=lambda path: path.instructions)


class RowPaths(NamedTuple):
    """Of the CTA whose slowest warp executes most."""

    scoring: Path  # until its last matrix instruction
    ranking: Path  # what comes behind
    first_copy: Path  # a producer's way to its first page


def count_row(tokens: int, ctas: int, num_splits: int = 1) -> RowPaths:
    """One row of normal data on `ctas` CTAs, which form `num_splits` clusters, unchecked."""
    plan = IndexerPlan(splits=num_splits > 1)
    how: tuple[Any, ...] = (1, ctas)
    if plan.splits:
        arrivals = torch.zeros(1, dtype=torch.int32)
        slots = torch.zeros(ctas, plan.slot_words, dtype=torch.int32)
        how = (arrivals, slots, num_splits, ctas // num_splits, num_splits)
    inputs = make_indexer_inputs(IndexerCase("one row", (tokens,), plan.topk), seed=0)
    q, cache, *others = inputs.operands
    heard: list[WarpPaths] = []

    def listen(_: Any) -> WarpPaths:
        heard.append(WarpPaths())
        return heard[-1]

    function = compiled(INDEXER, plan)
    with emulate(arch="sm_90a", on_launch=listen, check=False):
        function(
            q,
            cache.view(torch.uint8),
            *others,
            inputs.output_buffer(),
            *how,
        )
    (paths,) = heard
    slowest = paths.slowest().values()
    scoring, ranking = max(slowest, key=lambda both: sum(path.instructions for path in both))
    return RowPaths(scoring, ranking, paths.until_first_copy())


def main() -> int:
    """One line a shape."""
    for shape in shapes():
        found = count_row(shape.tokens, shape.ctas, shape.num_splits)
        scoring, ranking, first = (
            (p.instructions, p.global_trips, p.shared_trips, p.shuffles, p.barriers) for p in found
        )
        row = f"({shape.ctas}, {shape.num_splits}, {scoring}, {ranking})"
        print(f'"{shape.name}": {row},  # {first}', flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
