"""A block does what its instructions do one by one, with any mask and any guards."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from tests.isa.pure_run import parse
from tests.kernel_run import run

from ptxemu.api import load
from ptxemu.isa import registry
from ptxemu.machine.blocks import Block
from ptxemu.machine.lanes import FULL, STORAGE
from ptxemu.machine.program import Program

WORDS, FLOATS, LONGS, HALVES, FLAGS = (
    [f"%{name}{index}" for index in range(3)] for name in ("r", "f", "d", "h", "p")
)
DECLARED = (
    ".reg .b32 %r<3>; .reg .f32 %f<3>; .reg .b64 %d<3>; .reg .b16 %h<3>; .reg .pred %p<3>;"
    " .reg .b128 %q<2>;"
)
POOLS = {"r": WORDS, "f": FLOATS, "d": LONGS, "h": HALVES, "p": FLAGS, "q": ["%q0", "%q1"]}
SHAPES = [
    "add.s32 {r}, {r}, {r};", "mad.lo.s32 {r}, {r}, {r}, 7;", "shr.s32 {r}, {r}, 5;",
    "mov.b32 {r}, {r};", "mov.b32 {r}, {f};", "mov.f32 {f}, {r};", "mov.b32 {r}, 12;",
    "mov.f32 {f}, 0f3F000000;", "fma.rn.f32 {f}, {f}, {f}, {f};", "add.f32 {f}, {f}, 0f3F800000;",
    "max.f32 {f}, {f}, {f};", "cvt.rn.bf16x2.f32 {r}, {f}, {f};", "cvt.rn.f16.f32 {h}, {f};",
    "cvt.f32.f16 {f}, {h};", "cvt.u16.u32 {h}, {r};", "cvt.s32.s16 {r}, {h};",
    "cvt.s8.s32 {r}, {r};", "mul.wide.s32 {d}, {r}, {r};", "mov.b64 {d}, {{{r}, {f}}};",
    "mov.b64 {{{r}, _}}, {d};", "mov.b64 {{{f}, {r}}}, {d};", "add.f32x2 {d}, {d}, {d};",
    "mov.b128 {q}, {{{d}, {d}}};", "mov.b128 {q}, {q};", "mov.b128 {{{d}, {d}}}, {q};",
    "setp.lt.s32 {p}, {r}, {r};", "setp.lt.and.f32 {p}|{p}, {f}, {f}, !{p};",
    "selp.b32 {r}, {r}, {f}, {p};", "not.pred {p}, {p};", "mov.pred {p}, {p};",
]  # fmt: skip


def program(choose, length):
    """Random instructions, a third of them guarded."""
    lines = []
    for _ in range(length):
        shape = choose.choice(SHAPES)
        for kind, pool in POOLS.items():
            while f"{{{kind}}}" in shape:
                shape = shape.replace(f"{{{kind}}}", choose.choice(pool), 1)
        shape = shape.replace("{{", "{").replace("}}", "}")
        guard = (
            f"@{choose.choice(['', '!'])}{choose.choice(FLAGS)} " if choose.random() < 0.3 else ""
        )
        lines.append(guard + shape)
    return lines


def start(registers, seed):
    rng = np.random.default_rng(seed)
    values = []
    for register in registers:
        storage = STORAGE[register.type]
        if register.type == "pred":
            values.append(rng.integers(0, 2, 32).astype(np.bool_))
        elif register.type == "b128":
            values.append(rng.integers(0, 2**63, (32, 2)).astype(storage))
        else:
            high = 2 ** (8 * storage.itemsize)
            values.append(rng.integers(0, high, 32, dtype=storage))
    return values


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_block_equals_its_instructions_one_by_one(seed, is_masked):
    choose = random.Random(seed)
    lines = program(choose, 60)
    function = parse("\n".join(lines), DECLARED)
    code = [(i, registry.decode(i)) for i in function.instructions[:-1]]
    mask = np.random.default_rng(seed).integers(0, 2, 32).astype(np.bool_) if is_masked else FULL
    first = start(function.registers, seed)
    before = [lanes.copy() for lanes in first]
    together = SimpleNamespace(registers=list(first))
    apart = SimpleNamespace(registers=list(first))
    with np.errstate(all="ignore"):
        block = Block(code)
        block.run(together, mask)
        for pair in code:
            single = Block([pair])
            single.run(apart, mask)
    for register, a, b, old, kept in zip(
        function.registers, together.registers, apart.registers, before, first, strict=True
    ):
        assert a.dtype == STORAGE[register.type]
        assert a.tobytes() == b.tobytes(), register.name
        assert kept.tobytes() == old.tobytes(), f"{register.name} was changed in place"
        if is_masked:
            assert (a[~mask] == old[~mask]).all(), register.name


def test_special_registers_and_symbols_are_read_when_the_block_runs():
    function = parse("mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid;", DECLARED)
    code = [(i, registry.decode(i)) for i in function.instructions[:-1]]
    lanes = {
        "%tid.x": np.arange(32, dtype=np.uint32) + 64,
        "%laneid": np.arange(32, dtype=np.uint32),
    }
    warp = SimpleNamespace(registers=[np.zeros(32, np.uint32)] * 2, constants=lanes)
    Block(code).run(warp, FULL)
    assert warp.registers[0].tolist() == list(range(64, 96))
    assert warp.registers[1].tolist() == list(range(32))


def temporaries_of(body):
    """The names of each block's temporaries."""
    function = parse(body, DECLARED)
    program = Program(function, registry.decode)
    names = {register.slot: register.name for register in function.registers}
    blocks = [node for node in program.nodes if isinstance(node, Block)]
    return [{names[slot] for slot in block.temporaries} for block in blocks]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r0, %r1, 1; add.s32 %r2, %r0, 1; st.global.b32 [%d0], %r2;", [{"%r0"}]),
        ("add.s32 %r0, %r0, 1; mov.b32 %r2, %r0;", [set()]),
        ("@%p0 mov.b32 %r0, 1; mov.b32 %r1, %r0; st.global.b32 [%d0], %r1;", [set()]),
        ("mov.b32 %r0, 1; @%p0 mov.b32 %r0, 2; st.global.b32 [%d0], %r1;", [{"%r0"}]),
        (
            "setp.eq.s32 %p0, %r1, 0; @%p0 bra L; mov.b32 %r0, 1; mov.b32 %r1, %r0; L: ret;",
            [set(), {"%r0"}],
        ),
        ("mov.b32 %r0, 1; bra L; L: mov.b32 %r2, %r0;", [set(), set()]),
        ("ld.global.v2.b32 {%r0, %r1}, [%d0]; not.b32 %r2, %r1; not.b32 %r0, %r2;", [{"%r2"}]),
        (
            "setp.eq.s32 %p0|%p1, %r1, 0; selp.b32 %r0, 1, 2, %p1; st.global.b32 [%d0], %r0;",
            [{"%p1"}],
        ),
        (
            "mov.b64 {%r0, %r1}, %d0; add.s32 %r2, %r0, %r1; st.global.b32 [%d0], %r2;",
            [{"%r0", "%r1"}],
        ),
    ],
)
def test_temporaries_are_what_no_one_else_reads(body, expected):
    assert temporaries_of(body) == expected


def test_a_temporary_of_a_loop_still_gives_the_right_sum():
    text = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {
.reg .b32 %i, %s, %t, %u; .reg .pred %p; .reg .b64 %o, %x;
mov.u32 %u, %tid.x; mov.b32 %i, 0; mov.b32 %s, 0;
L: mul.lo.s32 %t, %i, 3; add.s32 %t, %t, 1; add.s32 %s, %s, %t; add.s32 %i, %i, 1;
setp.le.u32 %p, %i, %u; @%p bra L;
ld.param.u64 %o, [out]; mul.wide.u32 %x, %u, 4; add.s64 %o, %o, %x; st.global.u32 [%o], %s; ret;
}"""
    out = np.zeros(32, np.uint32)
    load(text).launch("k", 1, 32, args=[out])
    assert out.tolist() == [sum(3 * i + 1 for i in range(lane + 1)) for lane in range(32)]


def test_a_conversion_sees_the_canonical_nan_of_a_result_of_its_block():
    body = """mov.b32 %f0, 0f7F800000; sub.f32 %f1, %f0, %f0; cvt.f64.f32 %fd0, %f1;
mov.b64 %rd0, %fd0; st.global.b64 [%rd_y], %rd0;"""
    ran = run(body, y=np.zeros(1, np.uint64))
    assert ran.y.tolist() == [0x7FFFFFFFE0000000]
