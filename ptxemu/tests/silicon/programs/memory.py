"""Loads, stores and moves: vectors, sub-words, every state space, generic addresses, registers."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import elementwise, kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import below, random_bytes

TYPES = (
    "u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64", "f32", "f64",
)  # fmt: skip
CACHES = (
    "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.lu", "ld.global.cv", "ld.global.nc",
    "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.sys.global", "ld.weak.global",
    "ld.global.nc.L1::no_allocate.L2::128B", "ld.global.L1::evict_last", "ldu.global", "ld",
)  # fmt: skip
STORES = (
    "st.global.wb", "st.global.cg", "st.global.cs", "st.global.wt", "st.volatile.global",
    "st.relaxed.cta.global", "st.release.gpu.global", "st.weak.global", "st.global.L1::no_allocate",
    "st",
)  # fmt: skip


def _extensions() -> Iterator[Program]:
    """A load into a wider register extends by the type's sign."""
    for kind in TYPES:
        size = int(kind[1:]) // 8
        wide = size < 8 and kind[0] != "f"
        target = "x2" if wide or size == 8 else "r2"
        body = f"""mad.lo.u32 %r0, %t, {size}, 0; cvt.u64.u32 %x0, %r0;
            add.u64 %x1, %in, %x0; ld.global.{kind} %{target}, [%x1];"""
        if not wide and size < 8:
            body += "cvt.u64.u32 %x2, %r2;"
        body += """mad.wide.u32 %x3, %t, 8, %out;
            st.global.b64 [%x3], %x2;"""
        args = [("out", result(256)), ("in", Array(random_bytes(f"ext/{kind}", 32 * size)))]
        yield kernel(f"memory/ld.{kind}.wide", body, args)
        if size < 8 and kind[0] == "u":
            body = f"""mad.wide.u32 %x0, %t, 8, %in; ld.global.u64 %x2, [%x0];
                mad.wide.u32 %x1, %t, {size}, %out; st.global.{kind} [%x1], %x2;"""
            args = [("out", result(32 * size)), ("in", Array(random_bytes(f"trunc/{kind}", 256)))]
            yield kernel(f"memory/st.{kind}.narrow", body, args)


def _vectors() -> Iterator[Program]:
    for space in ("global", "shared", "local"):
        for n in (2, 4):
            for bits in (8, 16, 32, 64):
                size = n * bits // 8
                if size > 16:
                    continue
                letter = {8: "h", 16: "h", 32: "r", 64: "x"}[bits]
                first = 8 if letter != "x" else 20
                regs = [f"%{letter}{first + i}" for i in range(n)]
                forward, backward = ", ".join(regs), ", ".join(reversed(regs))
                body = f"""mul.lo.u32 %r0, %t, {size};
                    cvt.u64.u32 %x0, %r0; add.u64 %x1, %in, %x0; add.u64 %x2, %out, %x0;
                    ld.global.v{n}.b{bits} {{{forward}}}, [%x1];"""
                if space == "global":
                    body += f"st.global.v{n}.b{bits} [%x2], {{{backward}}};"
                else:
                    where = "%r1" if space == "shared" else "%r2"
                    body += f"""add.u32 %r1, %s, %r0; mov.u32 %r2, frame; add.u32 %r2, %r2, 16;
                        st.{space}.v{n}.b{bits} [{where}], {{{backward}}};
                        ld.{space}.v{n}.b{bits} {{{forward}}}, [{where}+0];
                        st.global.v{n}.b{bits} [%x2], {{{forward}}};"""
                name = f"memory/{space}.v{n}.b{bits}"
                args = [("out", result(32 * size)), ("in", Array(random_bytes(name, 32 * size)))]
                frame = ".local .align 16 .b8 frame[64];"
                yield kernel(name, body, args, declarations=frame, smem=1024)


def _modifiers() -> Iterator[Program]:
    for op in CACHES:
        body = f"""mad.wide.u32 %x0, %t, 4, %in; mad.wide.u32 %x1, %t, 4, %out;
            {op}.u32 %r1, [%x0]; st.global.u32 [%x1], %r1;"""
        args = [("out", result(128)), ("in", Array(random_bytes(op, 128)))]
        yield kernel(f"memory/{op}", body, args)
    for op in STORES:
        body = f"""mad.wide.u32 %x0, %t, 4, %in; mad.wide.u32 %x1, %t, 4, %out;
            ld.global.u32 %r1, [%x0]; {op}.u32 [%x1], %r1;"""
        args = [("out", result(128)), ("in", Array(random_bytes(op, 128)))]
        yield kernel(f"memory/{op}", body, args)
    body = """createpolicy.fractional.L2::evict_first.b64 %x5, 1.0;
        mad.wide.u32 %x0, %t, 16, %in; mad.wide.u32 %x1, %t, 16, %out;
        prefetch.global.L2 [%x0]; prefetchu.L1 [%in];
        ld.global.L2::cache_hint.v4.u32 {%r1, %r2, %r3, %r4}, [%x0], %x5;
        st.global.L2::cache_hint.v4.u32 [%x1], {%r4, %r1, %r3, %r2}, %x5;"""
    args = [("out", result(512)), ("in", Array(random_bytes("hint", 512)))]
    yield kernel("memory/cache_hint", body, args)
    body = """mad.wide.u32 %x0, %t, 16, %in; mad.wide.u32 %x1, %t, 16, %out;
        ld.global.b128 wide, [%x0]; mov.b128 {%x3, %x4}, wide; xor.b64 %x3, %x3, 1;
        mov.b128 wide, {%x4, %x3}; st.global.b128 [%x1], wide;"""
    args = [("out", result(512)), ("in", Array(random_bytes("b128", 512)))]
    yield kernel("memory/b128", body, args, declarations=".reg .b128 wide;")


GENERIC = """
mov.u32 %r1, box; mad.lo.u32 %r2, %t, 4, %r1;
mov.u32 %r3, frame; cvt.u64.u32 %x3, %r3; cvta.local.u64 %x3, %x3;
cvt.u64.u32 %x2, %r2; cvta.shared.u64 %x2, %x2;
mad.wide.u32 %x0, %t, 4, %in; cvta.global.u64 %x4, %x0;
ld.u32 %r10, [%x4]; xor.b32 %r11, %r10, 0x55; st.u32 [%x2], %r11;
add.u32 %r12, %r10, 3; st.u32 [%x3+8], %r12; bar.sync 0;
xor.b32 %r13, %t, 1; mad.lo.u32 %r13, %r13, 4, %r1; ld.shared.u32 %r14, [%r13];
ld.local.u32 %r15, [frame+8];
cvta.to.shared.u64 %x6, %x2; cvt.u32.u64 %r16, %x6; ld.shared.u32 %r17, [%r16];
cvta.to.local.u64 %x7, %x3; cvt.u32.u64 %r18, %x7; ld.local.u32 %r19, [%r18+8]; mov.u32 %r20, 0;
isspacep.shared %p0, %x2; @%p0 or.b32 %r20, %r20, 1;
isspacep.global %p0, %x2; @%p0 or.b32 %r20, %r20, 2;
isspacep.local %p0, %x3; @%p0 or.b32 %r20, %r20, 4;
isspacep.shared %p0, %x3; @%p0 or.b32 %r20, %r20, 8;
isspacep.global %p0, %x4; @%p0 or.b32 %r20, %r20, 16;
isspacep.local %p0, %x4; @%p0 or.b32 %r20, %r20, 32;
isspacep.shared::cta %p0, %x2; @%p0 or.b32 %r20, %r20, 64;
isspacep.shared::cluster %p0, %x2; @%p0 or.b32 %r20, %r20, 128; mad.wide.u32 %x1, %t, 20, %out;
st.u32 [%x1], %r14; st.u32 [%x1+4], %r15; st.u32 [%x1+8], %r17; st.u32 [%x1+12], %r19;
st.u32 [%x1+16], %r20;
"""

PACKS = """
mad.wide.u32 %x0, %t, 8, %in; ld.global.u64 %x2, [%x0];
mov.b64 {%r1, %r2}, %x2; mov.b64 %x3, {%r2, %r1};
mov.b64 {%h0, %h1, %h2, %h3}, %x2; mov.b64 %x4, {%h3, %h1, %h0, %h2};
mov.b32 {%h4, %h5}, %r1; mov.b32 %r3, {%h5, %h4};
mov.b32 {b0, b1, b2, b3}, %r1; mov.b32 %r4, {b3, b0, b2, b1};
mov.b16 {b0, b1}, %h0; mov.b16 %h6, {b1, b0}; cvt.u32.u16 %r5, %h6;
mov.b64 {%r6, _}, %x2; mov.b64 {_, %r7}, %x2; mad.wide.u32 %x1, %t, 36, %out;
st.global.u32 [%x1+32], %r5;
mov.b64 {%r8, %r9}, %x3; st.global.u32 [%x1], %r8; st.global.u32 [%x1+4], %r9;
mov.b64 {%r8, %r9}, %x4; st.global.u32 [%x1+8], %r8; st.global.u32 [%x1+12], %r9;
st.global.u32 [%x1+16], %r3; st.global.u32 [%x1+20], %r4;
st.global.u32 [%x1+24], %r6; st.global.u32 [%x1+28], %r7;
"""

SPECIAL = (
    "tid.x", "ntid.x", "ntid.y", "ctaid.x", "nctaid.x", "nctaid.z", "laneid", "lanemask_eq",
    "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge", "cluster_ctaid.x",
    "cluster_nctaid.x", "cluster_ctarank", "cluster_nctarank", "clusterid.x", "nclusterid.x",
    "dynamic_smem_size", "total_smem_size", "tid.z", "ctaid.y",
)  # fmt: skip
"""Without %warpid: the ISA lets it change between executions, and an H200 gave a slot of the SM."""


def _special() -> Iterator[Program]:
    for register in SPECIAL:
        body = f"""mov.u32 %r1, %{register}; mov.u32 %r2, %ctaid.x;
            mad.lo.u32 %r3, %r2, 64, %t; mad.wide.u32 %x1, %r3, 4, %out;
            st.global.u32 [%x1], %r1;"""
        args = [("out", result(4 * 64 * 4))]
        name = f"memory/%{register}"
        yield kernel(name, body, args, block=64, grid=4, cluster=2, smem=2048)
    body = "mov.pred %p0, %is_explicit_cluster; selp.u32 %r1, 1, 0, %p0; st.global.u32 [%out], %r1;"
    yield kernel("memory/%is_explicit_cluster", body, [("out", result(4))], block=1)


def _local_index() -> Iterator[Program]:
    body = """mov.u32 %r1, frame; mad.wide.u32 %x0, %t, 16, %in;
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%x0];
        st.local.u32 [frame], %r2; st.local.u32 [frame+4], %r3;
        st.local.u32 [%r1+8], %r4; st.local.u32 [%r1+12], %r5;
        and.b32 %r6, %r2, 3; mad.lo.u32 %r7, %r6, 4, %r1; ld.local.u32 %r8, [%r7];
        and.b32 %r6, %r3, 15; add.u32 %r7, %r6, %r1; ld.local.s8 %r9, [%r7];
        mov.u64 %x5, table; and.b32 %r6, %r4, 7; mad.wide.u32 %x5, %r6, 4, %x5;
        ld.const.u32 %r11, [%x5]; ld.global.u32 %r12, [words+4]; ld.const.f32 %r13, [floats+4];
        mad.wide.u32 %x1, %t, 20, %out;
        st.global.u32 [%x1], %r8; st.global.u32 [%x1+4], %r9; st.global.u32 [%x1+8], %r11;
        st.global.u32 [%x1+12], %r12; st.global.u32 [%x1+16], %r13;"""
    args = [("out", result(640)), ("in", Array(random_bytes("local_index", 512)))]
    program = kernel("memory/local_const_index", body, args, declarations=".local .b32 frame[4];")
    module = """.const .u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
.const .f32 floats[2] = {1.5, 0fC0490FDB};
.global .u32 words[2] = {7, 0xDEADBEEF};
"""
    ptx = program.ptx.replace(".extern .shared", module + ".extern .shared")
    yield Program(program.name, ptx, program.args)


def _shared_exchange() -> Iterator[Program]:
    """Sub-word stores of many threads into one array, read back in words."""
    order = np.argsort(below("exchange", 128, 1 << 30)).astype(np.uint32)
    body = """mad.wide.u32 %x0, %t, 4, %in; ld.global.u32 %r1, [%x0];
        add.u32 %r2, %s, %r1; mul.lo.u32 %r3, %t, 37; st.shared.u8 [%r2], %r3;
        add.u32 %r2, %r2, %r1; st.shared.u16 [%r2+128], %r3; bar.sync 0;
        mad.lo.u32 %r4, %t, 3, %s; ld.shared.u8 %r5, [%r4]; ld.shared.s8 %r6, [%r4+1];
        mad.lo.u32 %r4, %t, 2, %s; ld.shared.s16 %r7, [%r4+128];
        add.u32 %r5, %r5, %r6; mad.wide.u32 %x1, %t, 8, %out;
        st.global.u32 [%x1], %r5; st.global.u32 [%x1+4], %r7;"""
    args = [("out", result(1024)), ("in", Array(order.view(np.uint8)))]
    # bytes 384..: read by ld.shared.u8 but written by nobody, so stay within 128 + 256
    yield kernel("memory/shared_exchange", body, args, block=128, smem=512)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _extensions()
    yield from _vectors()
    yield from _modifiers()
    args = [("out", result(640)), ("in", Array(random_bytes("generic", 128)))]
    declarations = ".shared .align 16 .b8 box[256]; .local .align 16 .b8 frame[32];"
    yield kernel("memory/generic", GENERIC, args, declarations=declarations)
    args = [("out", result(36 * 32)), ("in", Array(random_bytes("packs", 256)))]
    yield kernel("memory/mov.packs", PACKS, args, declarations=".reg .b8 b0, b1, b2, b3;")
    yield from _special()
    yield from _local_index()
    yield from _shared_exchange()
    body = "mov.u32 d, a;\nmov.f32 e, 0f3FC00000;\nmov.b32 f, -2;"
    yield elementwise("memory/mov.constants", body, ["u32"], ["u32", "f32", "b32"], count=32)
