"""Loops with branches, loads and stores as machine code: the interpreter's results, bit for bit."""

import random

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from tests.kernel_run import source

from ptxemu import api
from ptxemu.compiled import stretch
from ptxemu.errors import ExecutionError
from ptxemu.machine import stretches
from ptxemu.memory.global_memory import GlobalMemory

WORDS = 256
"""Of the array; addresses are masked to stay inside."""
PROLOGUE = """
mov.u32 %r0, %tid.x; mov.u32 %r9, %ctaid.x; mad.lo.u32 %r1, %r9, 64, %r0;
mov.u32 %r2, %r1; mad.lo.u32 %r3, %r1, 40503, 17; mov.u32 %r4, 1; mov.u32 %r5, 0;
mov.u32 %r20, smem; mov.u64 %rd9, depot; and.b32 %r21, %r0, 63; shl.b32 %r21, %r21, 3;
cvta.shared.u64 %rd8, 0; cvt.u64.u32 %rd7, %r20; add.u64 %rd8, %rd8, %rd7;
cvt.rn.f32.u32 %f0, %r0; mov.f32 %f1, 0f3F800000;
"""
EPILOGUE = """
mul.wide.u32 %rd0, %r1, 32; add.u64 %rd0, %rd0, %rd_out;
st.global.v4.u32 [%rd0], {%r2, %r3, %r4, %r5}; mov.b32 %r6, %f1; st.global.u32 [%rd0+16], %r6;
"""
PURE = [
    "mad.lo.u32 %r{a}, %r{b}, 1664525, %r{c};",
    "xor.b32 %r{a}, %r{b}, %r{c};",
    "shr.u32 %r{a}, %r{b}, 3;",
    "@%p{p} add.u32 %r{a}, %r{b}, 77;",
    "setp.lt.u32 %p{p}, %r{a}, %r{b};",
    "setp.ne.s32 %p{p}, %r{a}, 5;",
    "fma.rn.f32 %f1, %f0, %f1, %f1;",
    "selp.b32 %r{a}, %r{b}, %r{c}, %p{p};",
]
INDEX = "and.b32 %r7, %r{a}, 31; mul.wide.u32 %rd1, %r7, 8; "
OWN = "add.u64 %rd1, %rd1, %rd_own; mul.wide.u32 %rd2, %r1, 256; add.u64 %rd1, %rd1, %rd2; "
ACCESSES = [
    INDEX + OWN + "ld.global.u32 %r{b}, [%rd1];",
    INDEX + OWN + "ld.global.v2.u32 {{%r{b}, %r{c}}}, [%rd1];",
    INDEX + OWN + "@%p{p} st.global.u32 [%rd1+4], %r{b};",
    INDEX + OWN + "st.global.v2.b32 [%rd1], {{%r{b}, %r{c}}};",
    INDEX + OWN + "st.u16 [%rd1+2], %r{b};",
    INDEX + OWN + "ld.s8 %r{b}, [%rd1+1];",
    INDEX + OWN + "ld.u8 %r{b}, [%rd1+3];",
    INDEX + "add.u64 %rd1, %rd1, %rd9; st.local.u32 [%rd1], %r{b};",
    INDEX + "add.u64 %rd1, %rd1, %rd9; @!%p{p} ld.local.u32 %r{b}, [%rd1];",
    "add.u32 %r7, %r20, %r21; st.shared.u32 [%r7], %r{b};",
    "add.u32 %r7, %r20, %r21; ld.shared.u32 %r{b}, [%r7+4];",
    "cvt.u64.u32 %rd1, %r21; add.u64 %rd1, %rd1, %rd8; ld.u32 %r{b}, [%rd1];",
]


class Author:
    """Writes random loops and branches."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._labels = 0

    def body(self, depth=3):
        return "\n".join(self._statement(depth) for _ in range(self._random.randint(2, 5)))

    def _statement(self, depth):
        kind = self._random.random()
        if depth and kind < 0.25:
            return self._loop(depth - 1)
        if depth and kind < 0.5:
            return self._branch(depth - 1)
        template = self._random.choice(ACCESSES if kind < 0.75 else PURE)
        a, b, c = (self._random.randint(2, 5) for _ in range(3))
        return template.format(a=a, b=b, c=c, p=self._random.randint(0, 1))

    def _loop(self, depth):
        self._labels += 1
        label, counter, again = f"L{self._labels}", f"%r{30 + depth}", f"%p{5 + depth}"
        rounds = self._random.choice(["3", "%r0", "%r2", "%r3"])
        return (
            f"and.b32 {counter}, {rounds}, 3;\n{label}:\n{self.body(depth)}\n"
            f"add.u32 {counter}, {counter}, 1; setp.lt.u32 {again}, {counter}, 5;\n"
            f"@{again} bra {label};"
        )

    def _branch(self, depth):
        self._labels += 1
        label = f"B{self._labels}"
        guard = self._random.choice(["%p0", "!%p1"])
        return f"@{guard} bra {label};\n{self.body(depth)}\n{label}:"


def text(body):
    before = ""
    local = ".local .align 8 .b8 depot[256];\n"
    return source(
        f"{local}{PROLOGUE}mov.u32 %r40, 0; LOOP:\n{body}\n"
        f"add.u32 %r40, %r40, 1; setp.lt.u32 %p9, %r40, 4; @%p9 bra LOOP;{EPILOGUE}",
        ["out", "own"],
        shared=1024,
        before=before,
    )


def outcome(ptx, core, monkeypatch, *, rounds=0, threads=48, ctas=2):
    monkeypatch.setenv("PTXEMU_CORE", core)
    monkeypatch.setattr(stretches, "ROUNDS", rounds)
    monkeypatch.setattr(stretch, "LEAST_SHARE", 0)
    monkeypatch.setattr(stretch, "LEAST_RUN", 0)
    monkeypatch.setattr(stretch, "LEAST_WORK", 0)
    module = api.load(ptx)
    out = np.zeros(64 * ctas * 8, np.uint32)
    own = np.arange(64 * ctas * 64, dtype=np.uint32) * np.uint32(2654435761)
    result = module.launch("k", ctas, threads, args=[out, own])
    return out, own, result.warp_instructions, module.program("k").stretches.at


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_same_bits_and_counts(seed, monkeypatch):
    ptx = text(Author(seed).body())
    *expected, none = outcome(ptx, "numpy", monkeypatch)
    *found, at = outcome(ptx, "llvm", monkeypatch)
    assert at and not none
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)
    assert expected[0].any()


LOOP = """
mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 4; add.u64 %rd0, %rd0, %rd_out; mov.u32 %r1, 0;
LOOP:
ld.global.u32 %r2, [%rd0]; add.u32 %r2, %r2, 1; st.global.u32 [%rd0], %r2;
{step} add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 400;
@%p0 bra LOOP;
"""


ONWARD = "add.u64 %rd0, %rd0, 128;"
CROOKED = "setp.eq.u32 %p1, %r1, 50; @%p1 add.u64 %rd0, %rd0, 2;"


@pytest.mark.parametrize("step", [ONWARD, CROOKED])
def test_wrong_addresses_are_named_as_the_interpreter_names_them(step, monkeypatch):
    messages, arrays = [], []
    for core in ("numpy", "llvm"):
        monkeypatch.setenv("PTXEMU_CORE", core)
        monkeypatch.setattr(stretches, "ROUNDS", 2)
        module = api.load(source(LOOP.format(step=step), ["out"]))
        out = np.zeros(32 * 100, np.uint32)
        with pytest.raises(ExecutionError, match=r"illegal global address|not aligned") as error:
            module.launch("k", 1, 32, args=[out])
        messages.append(str(error.value).replace(hex(out.ctypes.data), "base"))
        arrays.append(out)
    assert module.program("k").stretches.at
    strip = [message.split("0x")[0] + message.split(":")[-1] for message in messages]
    assert strip[0] == strip[1]
    np.testing.assert_array_equal(*arrays)


def test_read_only_memory_is_not_written(monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    monkeypatch.setattr(stretches, "ROUNDS", 2)
    out = np.zeros(32 * 500, np.uint32)
    out.flags.writeable = False
    with pytest.raises(ExecutionError, match="read-only"):
        api.load(source(LOOP.format(step=ONWARD), ["out"])).launch("k", 1, 32, args=[out])


def test_lanes_that_take_a_lock_in_turn_get_it(monkeypatch):
    body = """
mov.u32 %r0, 0; mov.u32 %r3, 0;
AGAIN:
atom.global.cas.b32 %r1, [%rd_lock], 0, 1;
setp.ne.u32 %p0, %r1, 0;
@%p0 bra AGAIN;
ld.volatile.global.u32 %r2, [%rd_out]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd_out], %r2;
atom.global.exch.b32 %r1, [%rd_lock], 0;
add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 3;
@%p1 bra AGAIN;
"""
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    monkeypatch.setattr(stretches, "ROUNDS", 0)
    out, lock = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    api.load(source(body, ["out", "lock"])).launch("k", 1, 32, args=[out, lock])
    assert out[0] == 3 * 32


def test_who_listens_hears_everything(monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    monkeypatch.setattr(stretches, "ROUNDS", 2)
    module = api.load(source(LOOP.format(step=""), ["out"]))
    for check in (False, True):
        result = module.launch("k", 2, 32, args=[np.zeros(32, np.uint32)], check=check)
    assert module.program("k").stretches.at
    assert {"race"} <= {finding.code for finding in result.findings}


def test_memory_without_bounds_is_left_to_the_interpreter(monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    monkeypatch.setattr(stretches, "ROUNDS", 2)
    out = np.zeros(32, np.uint32)
    module = api.load(source(LOOP.format(step=""), ["out"]))
    memory = GlobalMemory(allow_unregistered=True)
    address = int(out.ctypes.data).to_bytes(8, "little")
    module.launch("k", 1, 32, args=[address], memory=memory)
    assert module.program("k").stretches.at
    assert (out == 400).all()


def test_a_loop_that_leaves_at_every_step_is_left_out(monkeypatch):
    body = """
mov.u32 %r0, 0;
LOOP:
add.u32 %r0, %r0, 1; bar.sync 0; setp.lt.u32 %p0, %r0, 300;
@%p0 bra LOOP;
mul.wide.u32 %rd0, %r0, 1; add.u64 %rd0, %rd0, %rd_out; st.global.u8 [%rd0], %r0;
"""
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    monkeypatch.setattr(stretches, "ROUNDS", 2)
    module = api.load(source(body, ["out"]))
    module.launch("k", 1, 32, args=[np.zeros(400, np.uint8)])
    assert module.program("k").stretches.at == {}
