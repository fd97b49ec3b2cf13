"""Groups of asynchronous operations: which commits and waits could go without any effect."""

from types import SimpleNamespace

import pytest

from ptxemu.events import Space
from ptxemu.mutate.groups import Groups, family_of
from ptxemu.syntax.parser import parse_module

WARP = 7
HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"


class Run:
    """Groups of a straight line of instructions, executed one by one."""

    def __init__(self, *lines):
        self.function = parse_module(HEADER + "\n".join(lines) + "\nret;\n}\n").functions["k"]
        self.groups = Groups(self.function)

    def execute(self, pc):
        self.groups.executed(WARP, self.function.instructions[pc])

    def issue(self, number, register):
        operation = SimpleNamespace(
            agent_id=number, kind="wgmma", instruction=None, registers=(register,)
        )
        self.groups.issued(WARP, operation)


def two_groups(wait):
    """A product on register 1, a commit (pc 0), one on register 2, a commit (1), a wait (2)."""
    run = Run(COMMIT, COMMIT, WAIT.format(wait), WAIT.format(0))
    run.issue(1, register=1)
    run.execute(0)
    run.issue(2, register=2)
    run.execute(1)
    run.execute(2)
    return run


def test_a_commit_in_front_of_a_wait_for_all_is_not_needed_if_another_one_follows():
    run = two_groups(wait=0)
    run.groups.handed_on(WARP)
    assert run.groups.effective == {(1, "removed"), (2, "removed"), (2, "one group more")}


def test_a_commit_in_front_of_a_wait_for_some_is():
    run = two_groups(wait=1)
    run.groups.handed_on(WARP)
    assert (0, "removed") in run.groups.effective


def test_what_is_waited_for_again_before_anything_depends_on_it_is_not_needed():
    run = two_groups(wait=0)
    run.execute(3)
    run.groups.handed_on(WARP)
    assert not {change for change in run.groups.effective if change[0] == 2}


def test_registers_of_a_product_that_would_be_pending_depend_on_the_wait():
    run = two_groups(wait=1)
    run.groups.touched(WARP, [2])
    assert run.groups.effective == set()
    run.groups.touched(WARP, [1])
    assert {(0, "removed"), (2, "removed"), (2, "one group more")} <= run.groups.effective


def test_products_do_not_depend_on_global_memory():
    run = two_groups(wait=1)
    run.groups.accessed(WARP, Space.GLOBAL)
    assert run.groups.effective == set()
    run.groups.accessed(WARP, Space.SHARED)
    assert (2, "removed") in run.groups.effective


@pytest.mark.parametrize(
    ("line", "family"),
    [
        ("cp.async.commit_group;", "cp.async"),
        ("cp.async.wait_all;", "cp.async"),
        ("cp.async.bulk.wait_group.read 0;", "bulk"),
        (COMMIT, "wgmma"),
        ("bar.sync 0;", None),
    ],
)
def test_families(line, family):
    assert family_of(Run(line).function.instructions[0]) == family
