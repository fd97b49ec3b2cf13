"""The litmus table: the verdict is that of the table on every schedule."""

import pytest
from tests.check.checked_run import POLICIES, check
from tests.check.litmus import TABLE, Litmus, program


@pytest.mark.parametrize("test", TABLE, ids=lambda test: test.name)
def test_the_verdict_is_the_same_on_every_schedule(test: Litmus) -> None:
    threads = len(test.threads)
    verdicts = {
        frozenset(
            f.code
            for f in check(
                program(test), grid=1 if test.warps else threads,
                block=32 * threads if test.warps else test.block, policy=policy,
                how={"shared": 1024}, x=256, y=32, f=2, g=1,
            )
            if f.level != "note" or f.code in ("stale-read", "unordered-float-additions")
        )
        for policy in POLICIES
    }  # fmt: skip
    assert verdicts == {test.codes}
