"""Small PTX kernels with any tcgen05 instructions, legal or not, for ptxas and the emulator."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 40 * 1024


@dataclass(frozen=True)
class Issue:
    """One tcgen05.mma, and the instruction descriptor in its register.

    Attributes:
        line: PTX; %d2 and %d3 are shared memory descriptors, %r3 the instruction descriptor, %r2
            a TMEM address, %r4 that of A in TMEM.
    """

    line: str
    descriptor: int


def mma(cta_group: int, *, a_in_tmem: bool, ws: bool = False) -> str:
    """A tcgen05.mma of .kind::f16."""
    name = "tcgen05.mma.ws" if ws else "tcgen05.mma"
    a = "[%r4]" if a_in_tmem else "%d2"
    return f"@%p1 {name}.cta_group::{cta_group}.kind::f16 [%r2], {a}, %d3, %r3, %p2;"


def copy(cta_group: int) -> str:
    """A tcgen05.cp to all four groups of lanes."""
    return f"@%p1 tcgen05.cp.cta_group::{cta_group}.32x128b.warpx4 [%r4], %d2;"


def life(cta_group: int) -> tuple[str, str]:
    """Allocation, and what ends a kernel: commit, wait, load, store, deallocation."""
    group = f"cta_group::{cta_group}"
    arrive = "mbarrier::arrive::one.shared::cluster"
    commit = f"@%p1 tcgen05.commit.{group}.{arrive}.b64 [%r1];"
    if cta_group == 2:
        commit = f"@%p1 tcgen05.commit.{group}.{arrive}.multicast::cluster.b64 [%r1], %h1;"
    return (
        f"tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r0], 512;\n"
        "  ld.shared.b32 %r2, [%r0];\n  add.u32 %r4, %r2, 256;",
        f"{commit}\n"
        "WAIT{number}: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;\n"
        "  @!%p3 bra WAIT{number};\n"
        "  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r2];\n"
        "  tcgen05.wait::ld.sync.aligned;\n"
        "  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r9};\n"
        "  tcgen05.wait::st.sync.aligned;\n"
        f"  tcgen05.dealloc.{group}.sync.aligned.b32 %r2, 512;",
    )


def kernel(parts: dict[int, list[Issue]]) -> str:
    """A module whose kernel uses the instructions of each .cta_group."""
    body = []
    for cta_group, issues in parts.items():
        begin, end = life(cta_group)
        body.append(begin)
        for issue in issues:
            body.append(f"mov.u32 %r3, {issue.descriptor};\n  {issue.line}")
        body.append(end.replace("{number}", str(cta_group)))
    cluster = ".explicitcluster .reqnctapercluster 2, 1, 1" if 2 in parts else ""
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if 2 in parts else ""
    text = "\n  ".join(body)
    return f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry form() .reqntid 32, 1, 1 {cluster}
{{
  .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .pred %p<6>; .reg .b16 %h<4>;
  .shared .align 1024 .b8 tiles[{SMEM_BYTES}];
  .shared .align 8 .b64 bar; .shared .align 8 .b32 hold;
  mov.u32 %r0, hold; mov.u32 %r1, bar; mov.b16 %h1, 3;
  mov.u32 %r5, tiles; shr.u32 %r5, %r5, 4; cvt.u64.u32 %d1, %r5;
  add.u64 %d2, %d1, {0x4000404000010000}; mov.u64 %d3, %d2;
  mov.u32 %r6, %tid.x; setp.eq.u32 %p0, %r6, 0; setp.ne.u32 %p2, %r6, 0;
  mov.u32 %r7, %cluster_ctarank; or.b32 %r7, %r7, %r6; setp.eq.u32 %p1, %r7, 0;
  @%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  {sync}
  {text}
  {sync}
  ret;
}}
"""
