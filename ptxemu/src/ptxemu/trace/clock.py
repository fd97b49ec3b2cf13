"""Logical time of a run: the order in which it ran, or what its dependencies alone would allow.

Neither is a performance model: an instruction takes one tick, and a copy or product one tick for
every 256 bytes of shared memory that it reads or writes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ptxemu.events import Agent

BYTES_PER_TICK = 256
CLOCKS = ("parallel", "schedule")


class Clock:
    """Tells the time of an agent from the events of a run, of which most take no time."""

    def now(self, agent: Agent) -> float:
        """The agent's time."""
        raise NotImplementedError

    def executed(self, agent: Agent, count: int) -> None:
        """A warp executed `count` instructions."""

    def issued(self, operation: Any, issuer: Agent) -> None:
        """An operation starts at its issuer's time."""

    def begun(self, operation: Agent) -> float | None:
        """An operation does its first step: since when it is at work, if that is not its issue."""
        return None

    def moved(self, operation: Agent, size: int) -> None:
        """An operation has read or written `size` bytes of shared memory."""

    def released(self, agent: Agent, token: Hashable) -> None:
        """An arrival."""

    def acquired(self, agent: Agent, token: Hashable) -> None:
        """A wait for arrivals is over."""

    def completed(self, operation: Agent) -> None:
        """An operation is done."""

    def joined(self, agent: Agent, operation: Agent) -> None:
        """A wait for an operation is over."""


class ScheduleClock(Clock):
    """One clock for all: the events in the order in which this run had them."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self, agent: Agent) -> float:
        """The instructions and completions so far."""
        return self._now

    def executed(self, agent: Agent, count: int) -> None:
        """Every instruction of any warp is a tick."""
        self._now += count

    def completed(self, operation: Agent) -> None:
        """A completion is a tick."""
        self._now += 1


class ParallelClock(Clock):
    """A clock for each agent, as if all ran at once: a wait ends when what it waits for is there.

    It follows barriers, groups and the order of asynchronous operations, whatever the schedule was;
    not flags that a warp polls in memory.
    """

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._tokens: dict[Hashable, float] = {}
        self._after: dict[int, list[int]] = {}

    def now(self, agent: Agent) -> float:
        """The agent's own time."""
        return self._times.get(agent.agent_id, 0.0)

    def executed(self, agent: Agent, count: int) -> None:
        """The warp's instructions are ticks."""
        self._times[agent.agent_id] = self.now(agent) + count

    def issued(self, operation: Any, issuer: Agent) -> None:
        """Start it now, or when the operations before it in its pipeline are done."""
        self._times[operation.agent_id] = self.now(issuer)
        before = (*operation.after, *operation.ordering.after)
        if before:
            self._after[operation.agent_id] = [other.agent_id for other in before]

    def begun(self, operation: Agent) -> float | None:
        """Start it: the operations before it in its pipeline are done."""
        self._begin(operation)
        return self.now(operation)

    def moved(self, operation: Agent, size: int) -> None:
        """Bytes take time."""
        self._begin(operation)
        self._times[operation.agent_id] += size / BYTES_PER_TICK

    def released(self, agent: Agent, token: Hashable) -> None:
        """The last arrival in this time decides."""
        self._begin(agent)
        self._tokens[token] = max(self._tokens.get(token, 0.0), self.now(agent))

    def acquired(self, agent: Agent, token: Hashable) -> None:
        """Not before the last arrival."""
        self._not_before(agent, self._tokens.get(token, 0.0))

    def completed(self, operation: Agent) -> None:
        """Operations after it may start."""
        self._begin(operation)

    def joined(self, agent: Agent, operation: Agent) -> None:
        """Not before the operation's end."""
        self._not_before(agent, self.now(operation))

    def _begin(self, agent: Agent) -> None:
        for other in self._after.pop(agent.agent_id, ()):
            self._not_before(agent, self._times.get(other, 0.0))

    def _not_before(self, agent: Agent, time: float) -> None:
        if time > self.now(agent):
            self._times[agent.agent_id] = time


def clock(name: str) -> Clock:
    """The clock of a name in CLOCKS."""
    if name not in CLOCKS:
        raise ValueError(f"clock: expected one of {', '.join(CLOCKS)}; got {name!r}")
    return ParallelClock() if name == "parallel" else ScheduleClock()
