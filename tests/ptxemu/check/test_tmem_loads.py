"""Registers of tcgen05.ld that are used before tcgen05.wait::ld."""

from __future__ import annotations

import pytest

from tests.ptxemu.check.checked_run import POLICIES, check, codes
from tests.ptxemu.kernel_run import TID, store

ALLOC = """
mov.u32 %r1, smem;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1];
mov.u32 %r3, 7;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
"""
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
END = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;\n"
USES = {
    "arithmetic": "add.u32 %r5, %r4, 1;\n",
    "a store": store("out", "%r4"),
    "a predicate": "setp.eq.u32 %p0, %r4, 7;\n@%p0 bra L;\nL:\n",
    "an address": "mul.wide.u32 %rd0, %r4, 4;\nadd.s64 %rd1, %rd_out, %rd0;\n"
    "ld.global.b32 %r6, [%rd1];\n",
}
HOW = {"arch": "sm_100a", "shared": 1024}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_use_before_the_wait_is_an_error_and_one_behind_it_is_not(use: str, policy) -> None:
    early = check(TID + ALLOC + USES[use] + WAIT + END, policy=policy, how=HOW, out=64)
    assert codes(early) == [("tmem-load-not-waited", "error")]
    (finding,) = (f for f in early if f.level == "error")
    assert finding.kind == "isa"
    assert "needs tcgen05.wait::ld" in finding.message
    assert codes(check(TID + ALLOC + WAIT + USES[use] + END, policy=policy, how=HOW, out=64)) == []


def test_the_program_of_the_strangers() -> None:
    """alloc, st, wait::st, ld, add, st.global, wait::ld: it was found clean."""
    body = TID + ALLOC + "add.u32 %r5, %r4, 1;\n" + store("out", "%r5") + WAIT + END
    found = check(body, how=HOW, out=64)
    assert codes(found) == [("tmem-load-not-waited", "error")]


def test_a_copy_before_the_wait_is_none_of_the_programmer() -> None:
    """NVVM packs the registers of a load as soon as it has named them, and waits behind that."""
    copied = "mov.b64 %rd2, {%r4, %r4};\nmov.b64 {%r5, %r6}, %rd2;\n"
    body = TID + ALLOC + copied + "NEXT" + store("out", "%r6") + "LAST" + END
    waited = body.replace("NEXT", WAIT).replace("LAST", "")
    assert codes(check(waited, how=HOW, out=64)) == []
    late = body.replace("NEXT", "").replace("LAST", WAIT)
    assert codes(check(late, how=HOW, out=64)) == [("tmem-load-not-waited", "error")]
