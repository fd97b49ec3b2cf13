"""What a mutant computes is not held against sums whose order the schedule decides."""

import numpy as np
from tests.kernel_run import TID, setup, source

from ptxemu.mutate import Replay, measure
from ptxemu.mutate.runner import POLICIES

BODY = """
mul.wide.u32 %rd3, %r0, 4;
add.u64 %rd3, %rd_sums, %rd3;
red.global.add.f32 [%rd3], 0f3F800000;
red.global.add.f32 [%rd_sums+256], 0f3F800000;
red.global.add.u32 [%rd_sums+260], 1;
st.global.u32 [%rd_other], 7;
"""


def test_sums_of_any_order_and_scratch_are_no_results_and_ignored_codes_no_faults() -> None:
    arrays = np.zeros(66, np.float32), np.zeros(1, np.uint32)
    text = source(TID + BODY, ("sums", "other"))

    def replay(*scratch: str, ignored: tuple[str, ...] = ()) -> Replay:
        return Replay(setup(text, arrays), scratch, ignored)

    baseline = measure(replay(), POLICIES[:1])
    same = "same-value-race"
    assert same in {fault.code for fault in baseline.faults}
    others = measure(replay(ignored=(same,)), POLICIES[:1]).faults
    assert others == {fault for fault in baseline.faults if fault.code != same}
    by_address = [stable.view(np.uint32) != 0 for stable in baseline.is_stable]
    stored, sums = sorted(by_address, key=len)
    assert sums.tolist() == [True] * 64 + [False, True]
    assert stored.tolist() == [True]
    (only,) = measure(replay("argument 1"), POLICIES[:1]).is_stable
    assert len(only) == arrays[0].nbytes
