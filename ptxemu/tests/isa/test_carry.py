"""The carry flag is of each lane; sums, differences and products with it are in `tests.silicon`."""

import numpy as np
from tests.kernel_run import TID, load, run, store


def test_lanes_that_do_not_execute_keep_their_carry():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 20; {load("%r1", "a")} add.cc.u32 %r2, %r1, %r1;
@%p1 add.cc.u32 %r2, 0, 0; addc.u32 %r3, 0, 0; {store("y", "%r3")}"""
    a = np.where(np.arange(32) % 3, 1 << 31, 1).astype(np.uint32)
    expected = np.where(np.arange(32) < 20, 0, np.arange(32) % 3 > 0)
    np.testing.assert_array_equal(run(body, a=a, y=32).y, expected)
