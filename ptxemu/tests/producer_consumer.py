"""A kernel with a bulk copy in, a change by all threads, and a bulk copy out; no sync too many."""

import numpy as np

from ptxemu import api

THREADS = 128
BYTES = 4 * THREADS
BUFFER = 0x480
"""Offset of the buffer: 128 bytes behind the first shared variable, the mbarrier at 0x400."""

TEXT = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<4>;
    .shared .align 128 .b8 smem[1024];
    ld.param.u64 %rd0, [in];
    ld.param.u64 %rd1, [out];
    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    mov.u32 %r4, smem;
    add.u32 %r3, %r4, 128;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r4], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p0 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 512, [%r4];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0;
    @!%p1 bra WAIT;
    shl.b32 %r5, %r0, 2;
    add.u32 %r6, %r3, %r5;
    ld.shared.u32 %r7, [%r6];
    add.u32 %r7, %r7, 1;
    bar.sync 0;
    sub.u32 %r8, 508, %r5;
    add.u32 %r8, %r3, %r8;
    st.shared.u32 [%r8], %r7;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
    ret;
}
"""


def line_of(part: str, number: int = 0) -> int:
    """The PTX line of the occurrence `number` of a text."""
    lines = [k for k, line in enumerate(TEXT.splitlines(), start=1) if part in line]
    return lines[number]


def arrays():
    """Input and output."""
    return [np.arange(THREADS, dtype=np.uint32), np.zeros(THREADS, dtype=np.uint32)]


def launch(**options):
    """Run it; returns the arrays and the result."""
    own = arrays()
    result = api.load(TEXT).launch("k", 1, THREADS, args=own, **options)
    return own, result
