"""What is remembered of launches, and which of them are checked."""

import re

import numpy as np
import pytest
from tests.kernel_run import setup, source

from ptxemu.cuda.log import Log

RACE = "mov.u32 %r0, %ctaid.x; st.global.u32 [%rd_out], %r0;"


@pytest.mark.parametrize(("pattern", "is_checked"), [("^k$", False), ("other", True)])
def test_kernels_that_unchecked_names_run_without_the_check(pattern, is_checked):
    out = np.full(1, 7, np.uint32)
    launch = setup(source(RACE, ["out"]), [out], grid=(2, 1, 1), block=(1, 1, 1))
    log = Log(unchecked=re.compile(pattern))
    log.run(launch)
    log.run(launch)
    assert out[0] in (0, 1) and len(log.launches) == 2
    assert bool(log.findings) == is_checked
    assert log.notes == ([] if is_checked else ["kernel k was not checked, as --unchecked says"])
