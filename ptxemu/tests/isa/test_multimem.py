"""multimem on one GPU: a multicast object is plain memory, its reduction the one value."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import UnsupportedInstructionError

PLACE = f"{TID} mul.wide.u32 %rd1, %r0, 16; add.s64 %rd2, %rd_x, %rd1; add.s64 %rd3, %rd_y, %rd1;"


def test_load_reduce_gives_the_value_and_store_replaces_it():
    x = np.arange(128, dtype=np.float32)
    ran = run(
        f"""{PLACE}
        multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd2];
        multimem.st.relaxed.sys.global.v4.f32 [%rd3], {{%f3, %f2, %f1, %f0}};""",
        x=x,
        y=np.zeros(128, np.float32),
    )
    np.testing.assert_array_equal(ran.y.reshape(32, 4), x.reshape(32, 4)[:, ::-1])


def test_halves_are_loaded_with_a_wider_sum():
    x = np.arange(256, dtype=np.float16)
    ran = run(
        f"""{PLACE}
        multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 {{%r1, %r2, %r3, %r4}}, [%rd2];
        st.global.v4.b32 [%rd3], {{%r1, %r2, %r3, %r4}};""",
        x=x,
        y=np.zeros(256, np.float16),
    )
    np.testing.assert_array_equal(ran.y, x)


def test_a_reduction_adds():
    ran = run(
        f"{TID} and.b32 %r1, %r0, 1; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd_y, %rd1;"
        "multimem.red.release.gpu.global.add.u32 [%rd1], %r0;",
        y=np.array([5, 7], np.uint32),
    )
    np.testing.assert_array_equal(ran.y, [5 + sum(range(0, 32, 2)), 7 + sum(range(1, 32, 2))])


@pytest.mark.parametrize(
    "text",
    [
        "multimem.ld_reduce.global.add.acc::f32.f32 %f0, [%rd_y];",
        "multimem.ld_reduce.global.and.u32 %r0, [%rd_y];",
        "multimem.red.shared.add.u32 [%rd_y], %r0;",
        "multimem.red.global.add.b32 [%rd_y], %r0;",
    ],
)
def test_what_the_manual_does_not_have_is_refused(text):
    with pytest.raises(UnsupportedInstructionError):
        run(text, y=4)


def test_bulk_copies_go_to_the_one_replica():
    ran = run(
        f"""{TID} mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
        st.shared.u32 [%r2], %r0; fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p0, %r0, 0;
        @%p0 bra DONE; multimem.cp.async.bulk.global.shared::cta.bulk_group [%rd_x], [%r1], 128;
        multimem.cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd_y], [%r1], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        DONE:""",
        shared=128,
        x=np.zeros(32, np.uint32),
        y=np.full(32, 10, np.uint32),
    )
    np.testing.assert_array_equal(ran.x, np.arange(32))
    np.testing.assert_array_equal(ran.y, 10 + np.arange(32))
