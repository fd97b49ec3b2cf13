"""mma.sync: saturation, and combinations that are not there; values are in `tests.silicon`."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import UnsupportedInstructionError


@pytest.mark.parametrize("suffix", ["", ".satfinite"])
def test_integers_wrap_around_or_saturate(suffix):
    """All elements of A and B are 127, all of C are 2^31 - 10."""
    body = f"""{TID} mov.u32 %r1, 0x7f7f7f7f; mov.u32 %r2, 0x7ffffff6;
mma.sync.aligned.m16n8k32.row.col{suffix}.s32.s8.s8.s32
{{%r4, %r5, %r6, %r7}}, {{%r1, %r1, %r1, %r1}}, {{%r1, %r1}}, {{%r2, %r2, %r2, %r2}};
mul.wide.u32 %rd1, %r0, 16; add.s64 %rd2, %rd_y, %rd1;
st.global.v4.u32 [%rd2], {{%r4, %r5, %r6, %r7}};"""
    ran = run(body, y=np.zeros((32, 4), np.uint32))
    expected = 2**31 - 1 if suffix else 32 * 127 * 127 - 10 - 2**31
    assert (ran.y.view(np.int32) == expected).all()


@pytest.mark.parametrize(
    "types",
    ["m16n8k32.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f16.bf16.bf16.f16", "m8n8k4.f64"],
)
def test_combinations_that_are_not_there_are_refused(types):
    with pytest.raises(UnsupportedInstructionError):
        run(f"mma.sync.aligned.{types} {{%r1}}, {{%r1}}, {{%r1}}, {{%r1}};")
