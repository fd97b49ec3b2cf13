"""Tensor memory of a pair of CTAs: neither frees it while the other one still uses its own."""

import pytest
from tests.check.checked_run import POLICIES, check, codes
from tests.kernel_run import TID, store

from ptxemu.sched.policy import Policy

USE = """
mov.u32 %r1, smem; tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1]; mov.u32 %r3, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
tcgen05.wait::ld.sync.aligned;
"""
OTHER = """
tcgen05.fence::before_thread_sync; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;
"""
FREE = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 32;\n"
SOURCE = {"arch": "sm_100a", "shared": 1024}


def verdict(text: str, policy: Policy | None = None) -> list[tuple[str, str]]:
    own = "mov.u32 %r5, %ctaid.x;\nmad.lo.u32 %r0, %r5, 32, %r0;\n"
    body = TID + own + USE + text + store("out", "%r4")
    return codes(check(body, grid=2, cluster=2, policy=policy, how=SOURCE, out=64))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_pair_frees_behind_the_last_use_of_both(policy: Policy) -> None:
    assert verdict(OTHER + FREE, policy) == []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_freeing_while_the_other_cta_still_reads_is_an_error(policy: Policy) -> None:
    assert ("tmem-dealloc-race", "error") in verdict(FREE, policy)


def test_a_barrier_that_nobody_waits_at_is_not_enough() -> None:
    arrived = OTHER.replace("barrier.cluster.wait.aligned;", "")
    end = "barrier.cluster.wait.aligned;\n"
    assert ("tmem-dealloc-race", "error") in verdict(arrived + FREE + end)
