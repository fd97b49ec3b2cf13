"""Registers of tcgen05.ld that are needed before tcgen05.wait::ld."""

import pytest
from tests.check.checked_run import POLICIES, check, codes
from tests.kernel_run import TID, store

from ptxemu.sched.policy import Policy

ALLOC = """
mov.u32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1]; mov.u32 %r3, 7; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
"""
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
BARRIER = "bar.sync 0;\n"
END = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;\n"
USES = {
    "arithmetic and a store": "add.u32 %r5, %r4, 1;\n" + store("out", "%r5"),
    "a store": store("out", "%r4"),
    "a predicate": "setp.eq.u32 %p0, %r4, 7;\n@%p0 bra L;\nL:\n",
    "an address": "mul.wide.u32 %rd0, %r4, 4;\nadd.s64 %rd1, %rd_out, %rd0;\n"
    "ld.global.b32 %r6, [%rd1];\n",
}
HOW = {"arch": "sm_100a", "shared": 1024}
EARLY, MISSING = ("tmem-load-used-early", "warning"), ("tmem-load-not-waited", "error")


def verdict(text: str, policy: Policy | None = None) -> list[tuple[str, str]]:
    return codes(check(TID + ALLOC + text, policy=policy, how=HOW, out=64))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_use_without_a_wait_is_an_error(use: str, policy: Policy) -> None:
    assert verdict(USES[use] + BARRIER + WAIT + END, policy) == [MISSING, EARLY]
    assert verdict(WAIT + USES[use] + BARRIER + END, policy) == []


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_use_before_the_wait_is_a_warning(policy: Policy) -> None:
    """The strangers' program, which was found clean, and what Triton 3.9 emits: the ISA keeps the
    true dependency, and the wait comes before anything is handed on."""
    body = "add.u32 %r5, %r4, 1;\n" + store("out", "%r5") + WAIT + END
    assert verdict(body, policy) == [EARLY]


def test_no_wait_at_all() -> None:
    found = check(TID + ALLOC + USES["a store"] + BARRIER, how=HOW, out=64)
    (finding,) = (f for f in found if f.code == "tmem-load-not-waited")
    assert finding.kind == "isa"
    assert "never waited for before arrival (bar.sync)" in finding.message


def test_arithmetic_before_the_wait_is_the_compilers() -> None:
    """NVVM packs and converts the registers of a load at once, and waits behind that."""
    pure = "mov.b64 %rd2, {%r4, %r4};\nmov.b64 {%r5, %r6}, %rd2;\nadd.u32 %r6, %r6, 1;\n"
    assert verdict(pure + WAIT + store("out", "%r6") + END) == []
