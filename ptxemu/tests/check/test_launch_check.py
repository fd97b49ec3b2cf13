"""`check=True`: findings in the result, other observers still hear, errors carry what was found."""

import numpy as np
import pytest
from tests.kernel_run import TID, source

from ptxemu import api
from ptxemu.check import Finding
from ptxemu.errors import DeadlockError
from ptxemu.events import Access, Observer

RACE = TID + "mov.u32 %r1, smem;\nst.shared.b32 [%r1], %r0;\n"
DEADLOCK = RACE + "setp.lt.u32 %p0, %r0, 32;\n@%p0 bra END;\nbar.sync 1, 64;\nEND:\n"
REVERSE = (
    TID
    + """shl.b32 %r1, %r0, 2;
mov.u32 %r2, smem; add.u32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0; bar.sync 0;
xor.b32 %r4, %r1, 252; add.u32 %r4, %r2, %r4; ld.shared.b32 %r5, [%r4];
mul.wide.u32 %rd0, %r0, 4; add.s64 %rd1, %rd_out, %rd0; st.global.b32 [%rd1], %r5;
"""
)


class Counter(Observer):
    """Counts accesses."""

    def __init__(self) -> None:
        self.accesses = 0

    def accessed(self, access: Access) -> None:
        self.accesses += 1


def test_without_check_there_are_no_findings() -> None:
    assert api.load(source(RACE, shared=64)).launch("k", 1, 64).findings == []


def test_findings_are_in_the_result_and_the_observer_hears_too() -> None:
    counter = Counter()
    result = api.load(source(RACE, shared=64)).launch("k", 1, 64, check=True, observer=counter)
    (finding,) = result.findings
    assert isinstance(finding, Finding)
    assert (finding.code, finding.level) == ("race", "error")
    assert counter.accesses == 2


def test_a_deadlock_carries_what_was_found_until_then() -> None:
    with pytest.raises(DeadlockError) as caught:
        api.load(source(DEADLOCK, shared=64)).launch("k", 1, 64, check=True)
    assert [finding.code for finding in caught.value.findings] == ["race"]


def test_checking_changes_no_result() -> None:
    module = api.load(source(REVERSE, ["out"], shared=256))
    for check in (False, True):
        out = np.zeros(64, np.uint32)
        assert module.launch("k", 1, 64, args=[out], check=check).findings == []
        assert (out == np.arange(64)[::-1]).all()


def test_clusters_that_are_gone_leave_nothing_behind_but_their_findings() -> None:
    own = "mov.u32 %r6, %ctaid.x;\nmul.wide.u32 %rd2, %r6, 256;\nadd.s64 %rd_out, %rd_out, %rd2;\n"
    module = api.load(source(own + REVERSE, ["out"], shared=256))
    out = np.zeros(400 * 64, np.uint32)
    assert module.launch("k", 400, 64, args=[out], check=True).findings == []
    assert (out.reshape(400, 64) == np.arange(64)[::-1]).all()
