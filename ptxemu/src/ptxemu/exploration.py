"""All orders of synchronisation of one launch: a proof for its data, or an order with a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ptxemu.api import LaunchResult, array_bytes
from ptxemu.check import Finding
from ptxemu.errors import DeadlockError, ExecutionError, Interruption
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.guided import not_explored
from ptxemu.sched.orders import Orders
from ptxemu.sched.policy import Guided, Policy

MOST_ORDERS = 1000


@dataclass(frozen=True, slots=True)
class Order:
    """One order, and what a run in it found."""

    path: tuple[int, ...]
    """Agents of the steps where there was a choice."""
    findings: Sequence[Finding]
    result: LaunchResult | None
    """None of a run that could not go to its end."""
    failure: str | None = None
    interruption: Interruption | None = None


class Exploration:
    """The orders of a launch, one after the other, each from the memory that the launch began with.

    Attributes:
        orders: runs that came to an end, each in another order.
        is_complete: there is no other order.
        left_out: what another order could change and was not tried, in words.
    """

    def __init__(
        self, setup: LaunchSetup, *, policy: Policy | None = None, fixed: Sequence[int] = ()
    ) -> None:
        """Args:
        policy: limits and fill of each run.
        fixed: agents of the first steps where there is a choice, in all runs.
        """
        for number, arg in enumerate(setup.args):
            if isinstance(arg, np.ndarray) or hasattr(arg, "data_ptr"):
                setup.memory.register(array_bytes(arg), f"argument {number}")
        self._setup = setup
        self._orders = Orders(fixed)
        given = policy or Policy()
        self._policy = Guided(
            limit=given.limit, fill=given.fill, warp_lanes=given.warp_lanes, orders=self._orders
        )
        self._before = [(one, one.data.copy()) for one in setup.memory.allocations]
        self.orders = 0
        self.is_complete = False
        self.left_out = not_explored(setup.module.program(setup.kernel))

    def run(self, most: int = MOST_ORDERS) -> Iterator[Order]:
        """Run the launch in each order, at most `most` of them."""
        while self.orders < most:
            repeats = self._orders.repeats
            order = self._run_once()
            if self._orders.repeats == repeats:
                self.orders += 1
                yield order
            if order.interruption is not None:
                return
            if not self._orders.next_run():
                self.is_complete = True
                return

    def _run_once(self) -> Order:
        result: LaunchResult | None = None
        failure, interruption, is_cut_off = None, None, True
        findings: Sequence[Finding]
        try:
            result = self._setup.launch(memory=self._restored(), policy=self._policy, check=True)
            findings = result.findings
        except ExecutionError as error:
            failure, findings = str(error), error.findings
            is_cut_off = not isinstance(error, DeadlockError)
        except Interruption as error:
            interruption, findings = error, error.findings
        path = tuple(self._orders.path)
        if failure is not None:
            self._orders.failed(is_cut_off=is_cut_off)
        return Order(path, findings, result, failure, interruption)

    def _restored(self) -> GlobalMemory:
        old = self._setup.memory
        memory = GlobalMemory(allow_unregistered=old.allow_unregistered)
        memory.blank = old.blank
        for one, before in self._before:
            if one.may_be_written:
                one.data[:] = before
            memory.register(
                one.data, one.name, base=one.base, writable=one.writable, is_shared=one.is_shared
            )
        return memory
