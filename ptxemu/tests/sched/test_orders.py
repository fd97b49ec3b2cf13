"""`Orders`: every order of steps that do not commute, once; here of programs without a machine."""

from itertools import permutations

import pytest

from ptxemu.sched.orders import READ, WRITE, Orders, Touches, commute

Program = list[list[dict[str, str]]]
"""Steps of each agent."""


def run(orders: Orders, program: Program) -> list[tuple[int, int]] | None:
    """One run: agent and number of each step; None if it broke off."""
    done = [0] * len(program)
    trace: list[tuple[int, int]] = []
    while enabled := [a for a, steps in enumerate(program) if done[a] < len(steps)]:
        agent = orders.choose(enabled)
        if agent is None:
            return None
        orders.step(program[agent][done[agent]])
        trace.append((agent, done[agent]))
        done[agent] += 1
    return trace


def orders_of(program: Program) -> tuple[list[list[tuple[int, int]]], int]:
    """The traces of all complete runs, and the number of those that broke off."""
    orders, traces, broken = Orders(), [], 0
    while True:
        trace = run(orders, program)
        if trace is None:
            broken += 1
        else:
            traces.append(trace)
        if not orders.next_run():
            return traces, broken


def form(program: Program, trace: list[tuple[int, int]]) -> frozenset[tuple[object, object]]:
    """What tells orders apart: which of two steps that do not commute comes first."""
    return frozenset(
        (one, other)
        for number, one in enumerate(trace)
        for other in trace[number + 1 :]
        if one[0] != other[0] and not commute(touches(program, one), touches(program, other))
    )


def touches(program: Program, step: tuple[int, int]) -> Touches:
    return program[step[0]][step[1]]


def wanted(program: Program) -> set[frozenset[tuple[object, object]]]:
    """The forms of all interleavings, by brute force."""
    agents = [agent for agent, steps in enumerate(program) for _ in steps]
    found = set()
    for turns in set(permutations(agents)):
        done = [0] * len(program)
        trace = []
        for agent in turns:
            trace.append((agent, done[agent]))
            done[agent] += 1
        found.add(form(program, trace))
    return found


R, W, ADD = (lambda place, how=how: {place: how} for how in (READ, WRITE, "add"))


PROGRAMS: dict[str, Program] = {
    "tickets of one counter": [[W("x")] * 2] * 3,
    "additions": [[ADD("x"), ADD("x")], [ADD("x")], [ADD("x")]],
    "additions and a look": [[ADD("x"), ADD("x")], [ADD("x")], [R("x")]],
    "apart": [[W("x"), W("x")], [W("y"), W("y")]],
    "store buffering": [[W("x"), R("y")], [W("y"), R("x")]],
    "independent reads": [[W("x")], [W("y")], [R("x"), R("y")], [R("y"), R("x")]],
    "write to read to write": [[W("x")], [R("x"), W("y")], [R("y"), R("x")]],
    "reads alone": [[R("x")], [R("x")], [R("x")]],
    "a lock and a counter": [[W("l"), W("c"), W("l")], [W("l"), W("c")], [R("c")]],
    "two words at once": [[{"x": WRITE, "y": READ}], [W("y")], [R("x"), W("y")]],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_order_is_run_once(program: Program) -> None:
    traces, _ = orders_of(program)
    forms = [form(program, trace) for trace in traces]
    assert len(forms) == len(set(forms))
    assert set(forms) == wanted(program)


def test_what_a_barrier_orders_has_one_order() -> None:
    """Agent 1 writes behind a barrier at which agent 0 arrives behind its own write."""
    orders, traces = Orders(), []
    while True:
        trace = []
        assert orders.choose([0]) == 0
        orders.step(W("x"))
        orders.released(0, "barrier")
        orders.acquired(1, "barrier")
        assert orders.choose([1]) == 1
        orders.step(W("x"))
        traces.append(trace)
        if not orders.next_run():
            break
    assert len(traces) == 1


def test_a_fixed_path_is_followed() -> None:
    orders = Orders(fixed=(1, 1, 0))
    program = [[W("x")] * 2, [W("x")] * 2]
    assert run(orders, program) == [(1, 0), (1, 1), (0, 0), (0, 1)]
