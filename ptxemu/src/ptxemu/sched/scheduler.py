"""Runs a machine to its end: picks warps and asynchronous steps, finds deadlocks."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from time import monotonic
from typing import overload

from ptxemu.errors import DeadlockError, StepLimitError
from ptxemu.events import LaunchProgress, OnProgress
from ptxemu.machine.device import ctas_per_sm
from ptxemu.machine.grid import clusters_left, deal, skip_time, start_clusters
from ptxemu.machine.lane_group import LanesApart
from ptxemu.machine.lanes import lane_names
from ptxemu.machine.state import LOOP_ROUNDS, AsyncOperation, Cluster, Machine, Warp
from ptxemu.machine.warp import BLOCKED, EXITED, advance, expire_waits, fingerprint, sleep
from ptxemu.sched.crew import STEPS_BEFORE, Crew
from ptxemu.sched.policy import Policy

# The warps of the resident CTAs, and which of them are worth asking.


class ResidentWarps(Sequence["Warp"]):
    """Warps in the order in which they started, each awake or asleep.

    Args:
        woken: where warps whose sleep ended are put; taken out here.
    """

    def __init__(self, woken: list[Warp]) -> None:
        self._warps: list[Warp] = []
        self._ids: list[int] = []
        """Their agent ids, which grow."""
        self._awake = bytearray()
        self._woken = woken

    def __len__(self) -> int:
        return len(self._warps)

    @overload
    def __getitem__(self, index: int) -> Warp: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Warp]: ...
    def __getitem__(self, index: int | slice) -> Warp | Sequence[Warp]:
        return self._warps[index]

    def extend(self, warps: Iterable[Warp]) -> None:
        """Warps of CTAs that have become resident."""
        for warp in warps:
            self._warps.append(warp)
            self._ids.append(warp.agent_id)
            self._awake.append(1)

    def keep(self, is_kept: Callable[[Warp], bool]) -> None:
        """Forget the others."""
        kept = [index for index, warp in enumerate(self._warps) if is_kept(warp)]
        self._warps = [self._warps[index] for index in kept]
        self._ids = [self._ids[index] for index in kept]
        self._awake = bytearray(self._awake[index] for index in kept)

    def remove(self, index: int) -> None:
        """A warp has exited."""
        del self._warps[index], self._ids[index], self._awake[index]

    def sleep(self, index: int) -> None:
        """A warp waits; it is awake again when it is found in `woken`."""
        self._awake[index] = 0

    def next_awake(self, first: int, end: int) -> int:
        """Index of the first warp of [first, end) that is awake; -1 where none is."""
        if self._woken:
            self._wake()
        return self._awake.find(1, first, end)

    def _wake(self) -> None:
        for warp in self._woken:
            index = bisect_left(self._ids, warp.agent_id)
            if index < len(self._ids) and self._ids[index] == warp.agent_id:
                self._awake[index] = 1
        self._woken.clear()


SECONDS_BETWEEN_COUNTS = 0.25
"""Progress is told, and who stops a launch is heard, as often as this if steps take long."""
STEPS_BETWEEN_COUNTS = 1024
"""Steps after which the instructions are counted against the limit."""
STEPS_A_TURN = 8
"""Visible instructions that concern no other warp and that one executes in a turn, unheard."""
SPINNING_STEPS_PER_WARP = 64
"""Steps of every warp without any progress after which asynchronous work is forced."""
PATIENT_NAPS = 8
"""Executions of nanosleep without any progress after which it is forced, too."""
LIVELOCK_ROUNDS = 50
"""Such rounds, with no asynchronous work left and every warp where it was before, after which the
warps spin for ever."""


class Scheduler:
    """One run of a machine under a policy."""

    def __init__(
        self, machine: Machine, policy: Policy, *, on_progress: OnProgress | None = None
    ) -> None:
        self._machine = machine
        self._policy = policy
        if machine.observer is None and policy.asynchronous != "eager":
            machine.step_share = LOOP_ROUNDS // STEPS_A_TURN
        if policy.lanes_apart:
            machine.lanes_apart = LanesApart(policy.lanes_apart, policy.seed)
        self._random = random.Random(policy.seed)
        self._on_progress = on_progress
        self._told_until = monotonic() + SECONDS_BETWEEN_COUNTS
        self._warps = ResidentWarps(machine.woken)
        self._clusters: list[Cluster] = []
        self._waiting: Iterator[Cluster] = iter(())
        self._finished = 0
        self._room = machine.device.num_sms
        """CTAs that are kept resident."""
        self._crew = Crew(machine, policy.processes)
        self._naps = 0
        """Naps of the machine that have been answered."""
        self._states: set[int] = set()
        self._states_since = -1
        self.steps = 0
        """Warp steps taken."""

    def run(self) -> None:
        """Run until every CTA has exited and every asynchronous operation has completed.

        Raises:
            DeadlockError: nothing can go on.
            StepLimitError: the policy's limit was reached.
        """
        try:
            self._run()
            self._totals()
            self._finished += self._crew.finish(self._tell_progress)
            self._tell_progress()
        except BaseException as error:
            self._crew.give_up(error)
            raise

    @property
    def warp_instructions(self) -> int:
        """Number of instructions that all warps have executed."""
        return self._totals()[1]

    def _begin(self) -> None:
        self._waiting = start_clusters(self._machine)
        self._start_clusters()

    def _run(self) -> None:
        self._begin()
        spinning, seen, idle_rounds = 0, self._machine.progress, 0
        policy, machine, random = self._policy, self._machine, self._random.random
        is_eager, is_random = (policy.asynchronous == mode for mode in ("eager", "random"))
        while self._warps or machine.pending:
            moved = self._step_some_warp()
            if is_eager:
                self._drain()
            elif is_random and random() < policy.probability:
                self._step_async()
            if policy.timeouts:
                self._time_out()
            self._count()
            if machine.progress != seen:
                spinning, seen, idle_rounds = 0, machine.progress, 0
                self._naps = machine.naps
                continue
            spinning += moved
            if self._have_slept() and self._step_async():
                continue
            if not moved or spinning > SPINNING_STEPS_PER_WARP * max(len(self._warps), 1):
                spinning = 0
                if self._step_async():
                    idle_rounds = 0
                    continue
                idle_rounds = 0 if self._is_new_state() else idle_rounds + 1
                if moved and idle_rounds and skip_time(machine):
                    idle_rounds = 0
                    continue
                if (idle_rounds or not moved) and self._make_room():
                    idle_rounds = 0
                    continue
                if not moved and idle_rounds <= LIVELOCK_ROUNDS and self._expire_waits():
                    continue
                if not moved or idle_rounds > LIVELOCK_ROUNDS:
                    self._deadlock(spins=moved)

    def _count(self) -> None:
        """Hold what was done against the limit now and then, and tell it."""
        if not self.steps % STEPS_BETWEEN_COUNTS:
            self._check_limit()
            self._tell_progress()
            if self._crew.can_deal and self.steps >= STEPS_BEFORE:
                self._deal()
        elif monotonic() >= self._told_until:
            self._tell_progress()

    def _deal(self) -> None:
        """Go on with a share of the clusters, and leave the others to other processes."""
        left = len(self._clusters) + clusters_left(self._machine)
        number, count = self._crew.deal(left, self._finished)
        if not self._crew.is_first:
            self._on_progress = None
        if count == 1:
            return
        resident = len(self._clusters)
        self._clusters = self._clusters[number::count]
        mine = {cluster.index for cluster in self._clusters}
        self._warps.keep(lambda warp: warp.cta.cluster.index in mine)
        self._machine.pending.keep(lambda operation: operation.cta.cluster.index in mine)
        deal(self._machine, (number - resident) % count, count)
        self._start_clusters()

    def _start_clusters(self) -> None:
        """Keep as many clusters resident as there is room for."""
        ctas_per_cluster = len(self._clusters[0].ctas) if self._clusters else 1
        while len(self._clusters) * ctas_per_cluster < self._room:
            cluster = next(self._waiting, None)
            if cluster is None:
                return
            self._clusters.append(cluster)
            ctas_per_cluster = len(cluster.ctas)
            self._warps.extend(warp for cta in cluster.ctas for warp in cta.warps)

    def _make_room(self) -> bool:
        """Let every SM hold one CTA more, if it can; whether one started.

        An SM holds several CTAs, but there is no order in which they start: as long as the
        resident ones go on by themselves the others wait, which costs less memory. A grid barrier
        needs all of them.
        """
        machine = self._machine
        threads = prod(machine.launch.block)
        directives = machine.program.function.directives
        most = ctas_per_sm(machine.device, threads, machine.layout.shared_bytes, directives)
        if self._room >= most * machine.device.num_sms:
            return False
        self._room += machine.device.num_sms
        resident = len(self._clusters)
        self._start_clusters()
        return len(self._clusters) > resident

    def _step_some_warp(self) -> bool:
        """Advance one warp that can move; False when none can."""
        count = len(self._warps)
        if not count:
            return False
        if self._policy.warps == "random":
            start = int(self._random.random() * count)
        else:
            start = self.steps % count
        warps, first, end = self._warps, start, count
        while True:
            index = warps.next_awake(first, end)
            if index < 0:
                if end != count or not start:
                    return False
                first, end = 0, start  # around from `start`, each warp at most once
                continue
            warp = warps[index]
            status = advance(warp)
            if status is BLOCKED:
                if sleep(warp):
                    warps.sleep(index)
                first = index + 1
                continue
            self.steps += 1
            if status is EXITED:
                self._remove(index, warp)
            return True

    def _remove(self, index: int, warp: Warp) -> None:
        """A warp has exited."""
        self._machine.progress += 1
        self._machine.warp_instructions += warp.instruction_count
        self._warps.remove(index)
        self._warp_exited(warp)

    def _warp_exited(self, warp: Warp) -> None:
        cta = warp.cta
        if any(w.groups for w in cta.warps):
            return
        cta.exited = True
        for check in cta.exit_checks:
            check()
        if self._machine.observer is not None:
            self._machine.observer.cta_exited(cta)
        cluster = cta.cluster
        if all(c.exited for c in cluster.ctas):
            self._finish_cluster(cluster)

    def _finish_cluster(self, cluster: Cluster) -> None:
        self._clusters.remove(cluster)
        self._finished += 1
        # Memory for the clusters that are left, where no operation writes registers any more.
        if clusters_left(self._machine) and not self._machine.pending:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    del warp.registers
        self._tell_progress()
        self._start_clusters()

    def _tell_progress(self) -> None:
        self._told_until = monotonic() + SECONDS_BETWEEN_COUNTS
        if self._on_progress is not None:
            finished, instructions = self._totals()
            done = finished + self._machine.cancelled_clusters
            clusters = prod(self._machine.launch.clusters)
            self._on_progress(LaunchProgress(done, clusters, instructions))

    def _step_async(self) -> bool:
        ready = self._machine.pending.ready
        if not ready:
            return False
        operation: AsyncOperation
        if self._policy.asynchronous == "slow":
            operation = next((one for one in ready if not one.kind.startswith("cp.")), ready[0])
        else:
            operation = self._random.choice(ready)
        self._machine.take_step(operation)
        return True

    def _have_slept(self) -> bool:
        """Whether warps have slept often since the last progress, or since this was true."""
        have = self._machine.naps - self._naps > PATIENT_NAPS
        if have:
            self._naps = self._machine.naps
        return have

    def _is_new_state(self) -> bool:
        """Whether some warp is where it never was since the last progress.

        A warp that spins comes back to the same registers at the same pc; one that computes
        does not.
        """
        if self._machine.progress != self._states_since:
            self._states.clear()
            self._states_since = self._machine.progress
        before = len(self._states)
        self._states.update(fingerprint(warp) for warp in self._warps)
        return len(self._states) > before

    def _time_out(self) -> None:
        """Now and then some warp's wait with a time limit gives up."""
        if self._warps and self._random.random() < self._policy.timeouts:
            expire_waits(self._random.choice(self._warps))

    def _expire_waits(self) -> bool:
        """End the waits that have a time limit; whether there was one."""
        return any([expire_waits(warp) for warp in self._warps])

    def _drain(self) -> None:
        ready = self._machine.pending.ready
        while ready:
            self._machine.take_step(ready[0])

    def _check_limit(self) -> None:
        _, count = self._totals()
        limit = self._policy.limit
        if count > limit:
            where = "\n  ".join(self._whereabouts()[:10])
            raise StepLimitError(
                f"stopped after {count:,} warp instructions, the limit is {limit:,} (Policy(limit="
                f"...), --step-limit): a loop that never ends, or a problem too large?\n  {where}"
            )

    def _totals(self) -> tuple[int, int]:
        """Clusters finished and instructions executed so far, by all processes."""
        under_way = sum(warp.instruction_count for warp in self._warps)
        return self._crew.totals(self._finished, self._machine.warp_instructions + under_way)

    def _whereabouts(self) -> list[str]:
        """Describe the positions of the warps that can run."""
        return [
            f"{warp.label} is near {warp.program.function.instructions[group.pc].span}"
            for warp in self._warps
            for group in warp.groups
            if group.blocked is None and group.pc < len(warp.program.function.instructions)
        ]

    def _deadlock(self, *, spins: bool) -> None:
        reasons = [reason for warp in self._warps for reason in _blocked_reasons(warp)]
        spinning = [where.replace(" is near", " spins near") for where in self._whereabouts()]
        kind = "livelock" if spins else "deadlock"
        lines = "\n  ".join((reasons + spinning)[:40] + self._not_started())
        raise DeadlockError(f"{kind}: nothing can go on.\n  {lines}")

    def _not_started(self) -> list[str]:
        """Describe the CTAs that wait for room, for the report of a deadlock."""
        machine = self._machine
        each = prod(machine.launch.cluster)
        left = clusters_left(machine)
        if not left:
            return []
        return [
            f"{left * each} CTAs have not started: the device has room for {self._room} at once "
            f"({machine.device.num_sms} SMs)"
        ]


def _blocked_reasons(warp: Warp) -> list[str]:
    """Describe what each blocked group of a warp waits for."""
    instructions = warp.program.function.instructions
    return [
        f"{warp.label}, {int(g.mask.sum())} lanes, {instructions[g.pc - 1].span}: "
        f"{g.blocked.reason()}"
        for g in warp.groups
        if g.blocked is not None
    ] + [
        f"{warp.label}, lanes {lane_names(g.mask)}, {instructions[g.pc].span}: "
        f"wait for lanes {lane_names(g.awaited & warp.alive & ~g.mask)} of the warp"
        for g in warp.groups
        if g.awaited is not None
    ]
