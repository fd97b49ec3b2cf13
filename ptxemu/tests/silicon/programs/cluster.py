"""Clusters of two and four: mapa, distributed shared memory, remote mbarriers, cluster barriers."""

from collections.abc import Iterator

from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import random_bytes

BEGIN = """mov.u32 %r30, %cluster_ctarank; mov.u32 %r31, %cluster_nctarank;
mad.lo.u32 %r0, %r30, 32, %t; mad.wide.u32 %x0, %r0, 4, %in; ld.global.u32 %r1, [%x0];
mad.wide.u32 %x1, %r0, 16, %out; mad.lo.u32 %r2, %t, 4, %s; st.shared.u32 [%r2], %r1;
st.shared.u32 [%r2+128], %r0; mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r13, 0;
setp.ne.u32 %p9, %t, 0; @%p9 bra READY;
mbarrier.init.shared::cta.b64 [%s+512], {count}; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r32, %r30, 1; rem.u32 %r32, %r32, %r31;      // the next rank
mapa.shared::cluster.u32 %r3, %r2, %r32;              // my slot over there
mapa.shared::cluster.u32 %r4, %s, %r32;
"""
END = """
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
st.global.v4.u32 [%x1], {%r10, %r11, %r12, %r13};
"""
SPIN = """mov.u32 %r20, 0;
SPIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%s+512], 0; @%p2 bra THROUGH;
add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 20000; @%p3 bra SPIN;
THROUGH: selp.u32 %r13, 1, 0, %p2;
"""

LOADS = """
ld.shared::cluster.u32 %r10, [%r3]; ld.shared::cluster.u32 %r11, [%r3+128];
mapa.u64 %x5, %x4, %r32; ld.u32 %r12, [%x5]; getctarank.shared::cluster.u32 %r13, %r3;
"""
ADDRESSES = """
mapa.shared::cluster.u32 %r5, %s, 0; mapa.shared::cluster.u32 %r6, %s, 1;
sub.u32 %r10, %r6, %r5; sub.u32 %r11, %r3, %r2; getctarank.shared::cluster.u32 %r12, %r2;
cvta.shared.u64 %x4, %x3; getctarank.u64 %r13, %x4;
"""
STORES = """
st.shared::cluster.u32 [%r3+128], %r1; xor.b32 %r5, %r1, 0xFF;
st.shared::cluster.u16 [%r3+256], %r5;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
ld.shared.u32 %r10, [%r2+128]; ld.shared.u16 %r11, [%r2+256];
"""
ATOMICS = """
atom.shared::cluster.add.u32 %r10, [%r3], 1000;
atom.relaxed.cluster.shared::cluster.exch.b32 %r12, [%r3+128], %r30;
red.release.cluster.shared::cluster.max.s32 [%r3], 77;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
ld.shared.u32 %r11, [%r2]; ld.shared.u32 %r13, [%r2+128];
"""
REMOTE_ARRIVE = (
    """
add.u32 %r5, %r4, 512; st.shared::cluster.u32 [%r3+128], %r1;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
"""
    + SPIN
    + "ld.shared.u32 %r10, [%r2+128];"
)
REMOTE_COUNT = (
    """
add.u32 %r5, %r4, 512; setp.ne.u32 %p4, %t, 5; @%p4 bra GO;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5], 32;
GO:
"""
    + SPIN
)
REMOTE_EXPECT = (
    """
add.u32 %r5, %r4, 512; add.u32 %r6, %r3, 128; setp.ne.u32 %p4, %t, 0; @%p4 bra GO;
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r5], {bytes};
GO: {send}
"""
    + SPIN
    + "ld.shared.u32 %r10, [%r2+128]; ld.shared.u32 %r11, [%r2+256];"
)
PHASES = """
mov.u32 %r5, 0;
LOOP: st.shared::cluster.u32 [%r3+128], %r1;
barrier.cluster.arrive.aligned; add.u32 %r10, %r10, 7; barrier.cluster.wait.aligned;
ld.shared.u32 %r1, [%r2+128]; mad.lo.u32 %r11, %r11, 3, %r1;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra LOOP;
"""
RELAXED = """
fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
ld.shared::cluster.u32 %r10, [%r3];
"""
ASYNC = "mbarrier::complete_tx::bytes"
SENDS = {
    "st.async.b32": (128, f"st.async.weak.shared::cluster.{ASYNC}.b32 [%r6], %r1, [%r5];"),
    "st.async.v2.b32": (
        128,
        f"""and.b32 %r7, %t, 1; setp.eq.u32 %p5, %r7, 0; xor.b32 %r8, %r1, -1;
        @%p5 st.async.weak.shared::cluster.{ASYNC}.v2.b32 [%r6], {{%r1, %r8}}, [%r5];""",
    ),
    "st.async.b64": (
        128,
        f"""and.b32 %r7, %t, 1; setp.eq.u32 %p5, %r7, 0; mov.b64 %x7, {{%r1, %r0}};
        @%p5 st.async.weak.shared::cluster.{ASYNC}.b64 [%r6], %x7, [%r5];""",
    ),
    "st.async.v4.b32": (
        128,
        f"""and.b32 %r7, %t, 3; setp.eq.u32 %p5, %r7, 0; xor.b32 %r8, %r1, -1;
        @%p5 st.async.weak.shared::cluster.{ASYNC}.v4.b32 [%r6], {{%r1, %r8, %r0, %t}}, [%r5];""",
    ),
    "st.async.v2.b64": (
        128,
        f"""and.b32 %r7, %t, 3; setp.eq.u32 %p5, %r7, 0; mov.b64 %x7, {{%r1, %r0}};
        mov.b64 %x8, {{%t, %r1}};
        @%p5 st.async.weak.shared::cluster.{ASYNC}.v2.b64 [%r6], {{%x7, %x8}}, [%r5];""",
    ),
    **{
        f"red.async.{op}.{t}": (
            128, f"red.async.relaxed.cluster.shared::cluster.{ASYNC}.{op}.{t} [%r6], %r1, [%r5];"
        )
        for op, t in (("add", "u32"), ("add", "s32"), ("min", "s32"), ("max", "u32"), 
                      ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"))
    },
    "red.async.add.u64": (
        128,
        f"""and.b32 %r7, %t, 1; setp.eq.u32 %p5, %r7, 0; mov.b64 %x7, {{%r1, %r0}};
        @%p5 red.async.relaxed.cluster.shared::cluster.{ASYNC}.add.u64 [%r6], %x7, [%r5];""",
    ),
}  # fmt: skip


def _program(name: str, body: str, count: int = 32, cluster: int = 2) -> Program:
    args = [
        ("out", result(512 * cluster)),
        ("in", Array(random_bytes(f"cluster/{name}", 128 * cluster))),
    ]
    addresses = "cvt.u64.u32 %x3, %r2; cvta.shared.u64 %x4, %x3;"
    text = BEGIN.format(count=count) + addresses + body + END
    # what the reads of [%r2+256] find where nobody wrote
    text = text.replace("mov.u32 %r10, 0;", "st.shared.u32 [%r2+256], %r0; mov.u32 %r10, 0;", 1)
    return kernel(f"cluster/{name}", text, args, grid=cluster, cluster=cluster, smem=1024)


def programs() -> Iterator[Program]:
    """All of the family."""
    for size in (2, 4):
        yield _program(f"loads.{size}", LOADS, cluster=size)
        yield _program(f"stores.{size}", STORES, cluster=size)
        yield _program(f"atomics.{size}", ATOMICS, cluster=size)
        yield _program(f"remote_arrive.{size}", REMOTE_ARRIVE, cluster=size)
        yield _program(f"phases.{size}", PHASES, cluster=size)
    yield _program("addresses", ADDRESSES)
    yield _program("remote_count", REMOTE_COUNT)
    yield _program("relaxed", RELAXED)
    for label, (size, send) in SENDS.items():
        yield _program(label, REMOTE_EXPECT.format(bytes=size, send=send), count=1)
