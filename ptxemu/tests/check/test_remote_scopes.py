"""Arrivals at another CTA's mbarrier: their scope, and CTAs that have exited."""

import pytest
from tests.check.checked_run import POLICIES, check
from tests.kernel_run import TID

REMOTE = (
    TID
    + """
mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; mov.u32 %r9, %cluster_ctarank; @%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
setp.eq.u32 %p1, %r9, 0; @%p1 bra OWNER; @%p0 bra DONE; mapa.shared::cluster.u32 %r2, %r1, 0;
mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2]; bra DONE;
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


HANDED_OVER = REMOTE.replace(
    "mbarrier.arrive{scope}", "mov.u32 %r3, 5;\n{data}\nmbarrier.arrive{scope}"
)
BY_STORE = "st.shared::cluster.b32 [%r2+64], %r3;"
BY_COPY = (
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r2], 4;\n"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2+64], %r3, [%r2];"
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (".acquire.cta", {("narrow-wait-race", "error", "isa")}),
        (".acquire.cluster", set()),
        ("", set()),
    ],
)
def test_a_wait_of_cta_scope_does_not_acquire_what_another_cta_stored(
    policy, wait: str, expected: set[tuple[str, str, str]]
) -> None:
    text = WAIT.replace(".acquire.cluster", wait) + "ld.shared.b32 %r4, [%r1+64];"
    body = HANDED_OVER.replace("{data}", BY_STORE)
    result = check(
        body.format(scope=".release.cluster", wait=text, end=CLUSTER),
        grid=2,
        cluster=2,
        policy=policy,
        how={"shared": 1024},
    )
    assert {(f.code, f.level, f.kind) for f in result} == expected


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_bytes_that_are_delivered_into_a_cta_need_no_wider_wait(policy) -> None:
    text = WAIT.replace(".acquire.cluster", ".acquire.cta") + "ld.shared.b32 %r4, [%r1+64];"
    body = REMOTE.replace("mbarrier.arrive{scope}.shared::cluster.b64 _, [%r2];", BY_COPY)
    body = body.replace("mapa.shared", "mov.u32 %r3, 5;\nmapa.shared")
    result = check(
        body.format(wait=text, end=""), grid=2, cluster=2, policy=policy, how={"shared": 1024}
    )
    assert result == []


RING = (
    TID
    + """
mov.u32 %r1, smem; add.u32 %r2, %r1, 128; setp.ne.u32 %p0, %r0, 0; setp.lt.u32 %p5, %r0, 32;
@%p0 bra READY; mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 32;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @!%p5 bra CONSUMER; @%p0 bra END;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x], 128, [%r1];
EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+8], 0; @!%p2 bra EMPTY;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x+128], 128, [%r1];
bra END;
CONSUMER:
FULL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra FULL;
and.b32 %r0, %r0, 31; shl.b32 %r5, %r0, 2; add.u32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6];
{before}
mbarrier.arrive{arrive}.cta.shared::cta.b64 _, [%r1+8];
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 1; @!%p2 bra AGAIN;
ld.shared.u32 %r8, [%r6];
END:
"""
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("arrive", "before", "expected"),
    [
        (".release", "", set()),
        (".relaxed", "", {"race", "missing-wait"}),
        (".relaxed", "fence.acq_rel.cta;", set()),
    ],
)
def test_a_relaxed_arrival_frees_no_buffer_for_the_next_copy(
    policy, arrive: str, before: str, expected: set[str]
) -> None:
    """A consumer hands a slot back, and the producer's next bulk copy overwrites it."""
    body = RING.format(arrive=arrive, before=before)
    found = check(body, block=64, policy=policy, how={"shared": 1024}, x=64)
    assert {f.code for f in found if f.level == "error"} == expected
