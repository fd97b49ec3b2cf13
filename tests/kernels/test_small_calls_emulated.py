"""The small calls of every kernel on ptxemu: right, and nothing is found.

`workbench/small_calls/table.py` has them; sanitizers, mutants and traces take the same ones.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.verify.compare import failures
from workbench.small_calls.call import IGNORED, Small, emulator_of
from workbench.small_calls.table import TABLE

ACROSS_CLUSTERS = "stale-read"
"""A bound that only rises may be old."""
CALLS = [
    pytest.param(call, id=f"{name}: {call.name}")
    for name, row in TABLE.items()
    for call in row.calls
    if call.sms  # others are large
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", CALLS)
def test_calls_are_right_and_nothing_is_found(call: Small) -> None:
    emulator = emulator_of(call)
    assert failures(call.judge(emulator)) == []
    found = [one for one in emulator.findings if one.code not in (*IGNORED, ACROSS_CLUSTERS)]
    assert [str(one) for one in found] == []
