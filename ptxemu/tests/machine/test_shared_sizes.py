"""Shared memory of any size, as `.shared .b8 flag;` declares it."""

import numpy as np
import pytest
from tests.kernel_run import TID, run, store


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 1023])
def test_a_size_that_is_no_multiple_of_four(size):
    last = size - 1
    body = (
        f"mov.u32 %r1, smem;\nmov.u16 %h0, 77;\nst.shared.u8 [%r1+{last}], %h0;\n"
        f"ld.shared.u8 %h1, [%r1+{last}];\ncvt.u32.u16 %r2, %h1;\n" + TID + store("out", "%r2")
    )
    assert (run(body, shared=size, out=32).out == np.uint32(77)).all()
