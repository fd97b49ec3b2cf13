"""Arrivals at another CTA's mbarrier: their scope, and CTAs that have exited."""

from __future__ import annotations

import pytest
from tests.check.checked_run import POLICIES, check
from tests.kernel_run import TID

REMOTE = (
    TID
    + """
mov.u32 %r1, smem;
setp.ne.u32 %p0, %r0, 0;
mov.u32 %r9, %cluster_ctarank;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
setp.eq.u32 %p1, %r9, 0;
@%p1 bra OWNER;
@%p0 bra DONE;
mapa.shared::cluster.u32 %r2, %r1, 0;
mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2];
bra DONE;
OWNER:
{wait}
DONE:
{end}
"""
)
WAIT = """
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0;
@!%p2 bra W;
"""
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


def found(policy, **parts: str) -> set[tuple[str, str, str]]:
    """(code, level, kind) of a cluster of two CTAs."""
    findings = check(REMOTE.format(**parts), grid=2, cluster=2, policy=policy, how={"shared": 1024})
    return {(f.code, f.level, f.kind) for f in findings}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_scope_of_a_remote_arrival(policy) -> None:
    def scope(text: str) -> set[tuple[str, str, str]]:
        return found(policy, scope=text, wait=WAIT, end="")

    assert scope(".release.cluster") == set()
    assert scope(".release.cta") == {("remote-mbarrier-scope", "error", "isa")}
    assert scope("") == {("remote-mbarrier-scope", "note", "")}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_arrival_at_a_peer_that_may_have_exited(policy) -> None:
    def ending(wait: str, end: str) -> set[tuple[str, str, str]]:
        return found(policy, scope=".release.cluster", wait=wait, end=end)

    assert ending("", "") == {("signal-after-exit", "error", "hardware")}
    assert ending("", CLUSTER) == set()
    assert ending(WAIT, "") == set()
