"""All orders of synchronisation of a small launch, each once: dynamic partial-order reduction.

A *step* is one access by which agents synchronise (an atomic, a strong load or store), with all
that its agent does before the next one. Steps that touch nothing in common commute, and so do two
loads and two additions whose results nobody sees. Two runs that differ only in the order of steps
that commute are one order. Of each order one run is made: where two steps of a run that do not
commute could come the other way round, another run tries that (source sets), and what a run would
only repeat is left out (sleep sets); see Abdulla, Aronsson, Jonsson, Sagonas, "Optimal Dynamic
Partial Order Reduction", POPL 2014.

Runs start anew; a run is told which agents make the first steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

READ, WRITE = "read", "write"
Touches: TypeAlias = "Mapping[Hashable, str]"
"""Places that a step touches, and how: READ, WRITE, or a name of what commutes with its like."""
Clock: TypeAlias = "dict[int, int]"
"""By agent, how many of its steps are known."""


def commute(one: Touches, other: Touches) -> bool:
    """Whether the order of two steps makes no difference."""
    if len(other) < len(one):
        one, other = other, one
    return all(
        (there := other.get(place)) is None or (how == there and how != WRITE)
        for place, how in one.items()
    )


@dataclass(slots=True)
class Step:
    """A step of a run."""

    agent: int
    number: int
    """Its number among the agent's, from 1."""
    touches: Touches
    clock: Clock = field(default_factory=dict)
    """Steps that came before it, itself included."""

    def follows(self, other: Step) -> bool:
        """Whether it comes after `other` in every run of this order."""
        return self.clock.get(other.agent, 0) >= other.number


@dataclass(slots=True)
class Choice:
    """A place in a run where some agent makes the next step."""

    enabled: tuple[int, ...]
    asleep: dict[int, Touches]
    """Agents whose next step other runs have tried here, and what it touches."""
    wanted: set[int] = field(default_factory=set)
    """Agents that are to make the step, in this run or another."""
    tried: dict[int, Touches] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    """Agents that only wait here, in the order in which that was tried; each run tries it again."""
    failed: set[int] = field(default_factory=set)
    """Agents whose step ended the run."""
    chosen: int = -1

    def left(self) -> Iterator[int]:
        """The agents that are still to be tried."""
        return (
            agent
            for agent in sorted(self.wanted)
            if agent not in self.tried
            and agent not in self.asleep
            and agent not in self.idle
            and agent not in self.failed
        )


class Orders:
    """The orders of a launch: what has been tried, and what is next.

    A run asks `choose` who makes each step, says with `step` what that touched, or with `idle` that
    it was none, and tells of `released` and `acquired` between steps. Then `next_run` says whether
    there is another order.
    """

    def __init__(self, fixed: Sequence[int] = ()) -> None:
        """`fixed`: agents of the first steps, in all runs."""
        self._fixed = tuple(fixed)
        self._choices: list[Choice] = []
        self._depth = 0
        self._attempts = 0
        """Agents of this choice that have been tried and only wait."""
        self._steps: list[Step] = []
        self._clocks: dict[int, Clock] = {}
        self._tokens: dict[Hashable, Clock] = {}
        self._places: dict[Hashable, list[Step]] = {}
        self.repeats = 0
        """Runs that broke off, as another one has shown their order."""

    @property
    def path(self) -> list[int]:
        """Agents of the steps of this run, where there was a choice."""
        return [one.chosen for one in self._choices[: self._depth] if len(one.enabled) > 1]

    def choose(self, enabled: Sequence[int]) -> int | None:
        """The agent that makes the next step; None: the run need not go on."""
        if self._depth < len(self._choices):
            choice = self._choices[self._depth]
        else:
            choice = Choice(tuple(enabled), self._asleep())
            self._choices.append(choice)
        if self._attempts < len(choice.idle):
            return choice.idle[self._attempts]
        if choice.chosen < 0 and not choice.tried and not choice.failed:
            choice.chosen = self._candidate(choice)
            choice.wanted.add(choice.chosen)
        return None if choice.chosen < 0 else choice.chosen

    def _candidate(self, choice: Choice) -> int:
        """An agent for a step that no run has chosen yet; -1 if there is none."""
        number = sum(len(one.enabled) > 1 for one in self._choices[: self._depth])
        fixed = self._fixed[number : number + 1]
        if len(choice.enabled) > 1 and fixed and fixed[0] in choice.enabled:
            return fixed[0]
        free = (a for a in choice.enabled if a not in choice.asleep and a not in choice.idle)
        return next(free, -1)

    def _asleep(self) -> dict[int, Touches]:
        """Agents that need not make the next step, given who made the last one."""
        if not self._steps:
            return {}
        before, last = self._choices[self._depth - 1], self._steps[-1]
        known = {**before.asleep, **before.tried}
        return {
            agent: touches
            for agent, touches in known.items()
            if agent != last.agent and commute(touches, last.touches)
        }

    def idle(self) -> None:
        """The agent that was chosen only waits: another one is to be chosen."""
        choice = self._choices[self._depth]
        self._attempts += 1
        if self._attempts > len(choice.idle):
            choice.wanted.discard(choice.chosen)
            choice.idle.append(choice.chosen)
            choice.chosen = next(choice.left(), -1)

    @property
    def all_wait(self) -> bool:
        """Whether all agents that could make the step only wait."""
        choice = self._choices[self._depth]
        return set(choice.idle).issuperset(choice.enabled)

    def failed(self, *, is_cut_off: bool) -> None:
        """The run could not go to its end.

        Args:
            is_cut_off: agents could have gone on. As nobody knows what they would have done, all
                of them are to be tried at every place of the run.
        """
        if self._depth < len(self._choices):
            choice = self._choices[self._depth]
            choice.wanted.discard(choice.chosen)
            choice.failed.add(choice.chosen)
            choice.chosen = -1
        if is_cut_off:
            for choice in self._choices[: self._depth + 1]:
                choice.wanted.update(choice.enabled)

    def step(self, touches: Touches) -> None:
        """The agent that was chosen has made its step."""
        agent = self._choices[self._depth].chosen
        self._depth += 1
        self._attempts = 0
        clock = self._clocks.setdefault(agent, {})
        clock[agent] = clock.get(agent, 0) + 1
        step = Step(agent, clock[agent], touches)
        self._steps.append(step)
        self._find_races(step, clock)
        step.clock = dict(clock)
        for place in touches:
            self._places.setdefault(place, []).append(step)

    def released(self, agent: int, token: Hashable) -> None:
        """The agent's steps are known to whoever acquires the token."""
        _join(self._tokens.setdefault(token, {}), self._clocks.get(agent, {}))

    def acquired(self, agent: int, token: Hashable) -> None:
        """The agent knows what was released there."""
        _join(self._clocks.setdefault(agent, {}), self._tokens.get(token, {}))

    def issued(self, agent: int, by: int) -> None:
        """An agent starts with what another one knows."""
        self._clocks[agent] = dict(self._clocks.get(by, {}))

    def _find_races(self, step: Step, clock: Clock) -> None:
        """Earlier steps that do not commute with this one, and could as well come after it."""
        earlier = {id(one): one for place in step.touches for one in self._places.get(place, ())}
        index = {id(one): number for number, one in enumerate(self._steps)}
        for one in sorted(earlier.values(), key=lambda one: -index[id(one)]):
            if one.agent == step.agent or commute(one.touches, step.touches):
                continue
            if clock.get(one.agent, 0) < one.number:
                self._reverse(index[id(one)], one, step)
                _join(clock, one.clock)

    def _reverse(self, number: int, first: Step, second: Step) -> None:
        """Let another run make `second` come before `first`."""
        choice = self._choices[number]
        between = [s for s in self._steps[number + 1 : -1] if not s.follows(first)]
        between.append(second)
        initials: dict[int, None] = {}
        seen: set[int] = set()
        for position, step in enumerate(between):
            if step.agent in seen:
                continue
            seen.add(step.agent)
            known = step.clock or self._clocks[step.agent]
            if not any(known.get(s.agent, 0) >= s.number for s in between[:position]):
                initials[step.agent] = None
        able = [agent for agent in initials if agent in choice.enabled]
        free = [agent for agent in able if agent not in choice.idle]
        if not able:
            choice.wanted.update(choice.enabled)
        elif free and choice.wanted.isdisjoint(free):
            choice.wanted.add(second.agent if second.agent in free else free[0])

    def next_run(self) -> bool:
        """Go to the next order; False if all have been tried."""
        del self._choices[self._depth + 1 :]
        while self._choices:
            choice, depth = self._choices[-1], len(self._choices) - 1
            if choice.chosen >= 0 and depth < len(self._steps):
                choice.tried[choice.chosen] = self._steps[depth].touches
            following = next(choice.left(), -1)
            if following >= 0:
                choice.chosen = following
                break
            self._choices.pop()
        self._depth = self._attempts = 0
        self._steps.clear()
        self._clocks.clear()
        self._tokens.clear()
        self._places.clear()
        return bool(self._choices)


def _join(clock: Clock, more: Clock) -> None:
    for agent, number in more.items():
        if clock.get(agent, 0) < number:
            clock[agent] = number
