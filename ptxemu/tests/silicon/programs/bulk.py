"""cp.async.bulk and cp.reduce.async.bulk: all directions, sizes, operations, multicast."""

from collections.abc import Iterator

import numpy as np
from tests.silicon.programs.build import kernel, result
from tests.silicon.programs.case import Array, Program
from tests.silicon.programs.values import random_bytes, typed

DONE = "mbarrier::complete_tx::bytes"
SPIN = """mov.u32 %r20, 0;
SPIN: mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p2, [%s], 0; @%p2 bra THROUGH;
add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, {limit}; @%p3 bra SPIN;
THROUGH: selp.u32 %r21, 1, 0, %p2;
"""
"""Ends in any case; %r21 says whether the phase completed."""
FILL = """mad.lo.u32 %r0, %t, 4, %s; add.u32 %r0, %r0, 1024; mov.u32 %r1, 0;
FILL: st.shared.u32 [%r0], {value}; add.u32 %r0, %r0, 128; add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, {rows}; @%p1 bra FILL;
"""
DUMP = """bar.sync 0; mad.lo.u32 %r0, %t, 4, %s; add.u32 %r0, %r0, 1024; mov.u32 %r1, 0;
mad.wide.u32 %x30, %t, 4, {to};
DUMP: ld.shared.u32 %r2, [%r0]; st.global.u32 [%x30], %r2; add.u64 %x30, %x30, 128;
add.u32 %r0, %r0, 128; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, {rows}; @%p1 bra DUMP;
@%p0 st.global.u32 [%x30], %r21;
"""
"""Rows of 128 bytes of the shared memory behind the first KiB, then thread 0's %r21."""
SOURCE = """mad.lo.u32 %r0, %t, 4, %s; add.u32 %r0, %r0, 1024; mov.u32 %r1, 0;
mad.wide.u32 %x30, %t, 4, {source};
READ: ld.global.u32 %r2, [%x30]; st.shared.u32 [%r0], %r2; add.u64 %x30, %x30, 128;
add.u32 %r0, %r0, 128; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, {rows}; @%p1 bra READ;
fence.proxy.async.shared::cta; bar.sync 0;
"""
BEGIN = """setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared::cta.b64 [%s], 1;
mov.u32 %r21, 0; fence.proxy.async.shared::cta; bar.sync 0;
"""
LIMIT = 4000

REDUCTIONS = (
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
)
SHARED_REDUCTIONS = (
    *(("add", t) for t in ("u32", "s32", "u64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32")),
    ("inc", "u32"),
    ("dec", "u32"),
    *((op, "b32") for op in ("and", "or", "xor")),
)


def load_program(name: str, issue: str, tx: int, args: list, rows: int) -> Program:
    """One thread issues a copy into the second KiB; all wait; `rows` rows are the result."""
    body = BEGIN + FILL.format(value="0xEEEEEEEE", rows=rows)
    body += "fence.proxy.async.shared::cta; bar.sync 0; add.u32 %r5, %s, 1024; @!%p0 bra WAIT;\n"
    body += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], {tx};\n{issue}\nWAIT:\n"
    body += SPIN.format(limit=LIMIT) + DUMP.format(to="%out", rows=rows)
    output = ("out", result(128 * rows + 4))
    return kernel(name, body, [output, *args], smem=1024 + 128 * rows)


def store_program(name: str, issue: str, args: list, rows: int, read: str = "") -> Program:
    """`src` goes to the second KiB of shared memory, from where one thread issues a store."""
    body = "setp.eq.u32 %p0, %t, 0;\n" + SOURCE.format(source="%src", rows=rows)
    body += f"add.u32 %r5, %s, 1024; @!%p0 bra DONE;\n{issue}\ncp.async.bulk.commit_group;\n"
    body += f"cp.async.bulk.wait_group{read} 0;\nDONE:\n"
    return kernel(name, body, args, smem=1024 + 128 * rows)


def _copies() -> Iterator[Program]:
    for size in (16, 48, 256, 1024):
        rows = max(size // 128, 1)
        data = ("src", Array(random_bytes(f"bulk/{size}", 1152)))
        for space in ("cluster", "cta"):
            issue = f"cp.async.bulk.shared::{space}.global.{DONE} [%r5], [%src], {size}, [%s];"
            program = load_program(f"bulk/load.{space}.{size}", issue, size, [data], rows)
            if space == "cta":
                program = _with_version(program, "8.6")
            yield program
        issue = f"cp.async.bulk.global.shared::cta.bulk_group [%out], [%r5], {size};"
        args = [("out", result(1152)), data]
        for read in ("", ".read"):
            yield store_program(f"bulk/store{read}.{size}", issue, args, 9, read)
    issue = f"""add.u64 %x5, %src, 512; add.u32 %r6, %r5, 256;
        cp.async.bulk.shared::cluster.global.{DONE} [%r5], [%src], 256, [%s];
        cp.async.bulk.shared::cluster.global.{DONE} [%r6], [%x5], 256, [%s];"""
    yield load_program("bulk/load.two", issue, 512, [data], 4)
    policy = f"""createpolicy.fractional.L2::evict_last.b64 %x6, 0.5;
        cp.async.bulk.shared::cluster.global.{DONE}.L2::cache_hint [%r5], [%src], 512, [%s], %x6;
        cp.async.bulk.prefetch.L2.global [%src], 1024;"""
    yield load_program("bulk/load.hint", policy, 512, [data], 4)


def _with_version(program: Program, version: str) -> Program:
    ptx = program.ptx.replace(".version 8.3", f".version {version}")
    return Program(program.name, ptx, program.args, smem=program.smem)


def _reductions() -> Iterator[Program]:
    for op, kind in REDUCTIONS:
        full = f"{op}.{kind}"
        base = kind.rpartition(".")[2]
        size = 2 if base == "bf16" else int(base[1:]) // 8
        name = f"bulk/reduce.global.{full}"
        count = 512 // size
        issue = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{full} [%mem], [%r5], 512;"
        args = [
            ("mem", Array(typed(f"{name}/mem", base, count), recorded=True)),
            ("src", Array(typed(f"{name}/src", base, count))),
        ]
        yield store_program(name, issue, args, 4)


PAIR = """mov.u32 %r30, %cluster_ctarank; setp.eq.u32 %p4, %r30, 0;
{begin}
mul.lo.u32 %r31, %r30, {bytes}; cvt.u64.u32 %x31, %r31; add.u64 %x10, %src, %x31;
{source}
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], {tx};
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r5, %s, 1024; mapa.shared::cluster.u32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %s, 1;
not.pred %p5, %p0; @%p5 bra WAIT; {who}
{issue}
WAIT:
setp.ne.u32 %p6, %r30, 0; {waits}
{spin}
bar.sync 0; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u64 %x11, %out, %x31;
{dump}
"""


def pair_program(name: str, issue: str, tx: str, args: list, rows: int, *, both: bool) -> Program:
    """Two CTAs; rank 0 (or both) issues; the receivers (rank 1, or both) wait."""
    size = 128 * rows
    body = PAIR.format(
        begin=BEGIN,
        bytes=size,
        source=SOURCE.format(source="%x10", rows=rows),
        tx=tx,
        who="",
        issue=f"@!%p4 bra WAIT;\n{issue}",
        waits="" if both else "@!%p6 bra AFTER;",
        spin=SPIN.format(limit=LIMIT) + "AFTER:",
        dump=DUMP.format(to="%x11", rows=rows).replace("@%p0 st.global.u32 [%x30], %r21;", ""),
    )
    arrays = [("out", result(2 * size)), *args]
    return kernel(name, body, arrays, grid=2, cluster=2, smem=1024 + size)


def _pairs() -> Iterator[Program]:
    src = ("src", Array(random_bytes("bulk/pair", 1024)))
    issue = f"cp.async.bulk.shared::cluster.shared::cta.{DONE} [%r6], [%r5], 256, [%r7];"
    yield pair_program("bulk/pair.copy", issue, "256", [src], 4, both=False)
    issue = f"cp.async.bulk.shared::cluster.global.{DONE} [%r6], [%src], 128, [%r7];"
    yield pair_program("bulk/pair.load", issue, "128", [src], 4, both=False)
    issue = f"""mov.b16 %h1, 3; add.u32 %r8, %r5, 128;
        cp.async.bulk.shared::cluster.global.{DONE}.multicast::cluster
        [%r8], [%src], 256, [%s], %h1;"""
    yield pair_program("bulk/pair.multicast", issue, "256", [src], 4, both=True)
    for op, kind in SHARED_REDUCTIONS:
        size = int(kind[1:]) // 8
        name = f"bulk/reduce.shared.{op}.{kind}"
        data = np.concatenate([typed(f"{name}/{i}", kind, 256 // size) for i in range(2)])
        issue = f"""cp.reduce.async.bulk.shared::cluster.shared::cta.{DONE}.{op}.{kind}
            [%r6], [%r5], 256, [%r7];"""
        yield pair_program(name, issue, "256", [("src", Array(data))], 2, both=False)


def programs() -> Iterator[Program]:
    """All of the family."""
    yield from _copies()
    yield from _reductions()
    yield from _pairs()
