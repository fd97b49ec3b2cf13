"""Machine code gives the bits that the definitions of the instructions give, in random programs."""

import random

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from ptxemu import api, machine_code
from ptxemu.isa import registry
from ptxemu.machine.blocks import Block
from ptxemu.machine.program import Program
from ptxemu.sched.policy import Policy

WORDS = [0, 1, 2, 31, 32, 33, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFE0]
FLOATS = [0x3F800000, 0xBF800000, 0x00000001, 0x80000000, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000]
FLOATS += [0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x33800000, 0x3F7FFFFF, 0x42280000]
NUM_REGISTERS = 6


class Author:
    """Writes random instructions on %r, %d (64 bits), %h (16), %f and %p."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def program(self, length):
        return "\n".join(self._line() for _ in range(length))

    def _register(self, kind):
        return f"%{kind}{self._random.randrange(NUM_REGISTERS)}"

    def _value(self, kind):
        if kind in "DF":  # no integer may stand there
            return self._register(kind.lower())
        if kind in "R":
            return ""
        if kind in "rdh" and self._random.random() < 0.2:
            return str(self._random.choice(WORDS) & (0xFFFF if kind == "h" else 0xFFFFFFFF))
        if kind == "f" and self._random.random() < 0.2:
            return f"0f{self._random.choice(FLOATS):08X}"
        return self._register(kind)

    def _line(self):
        template = self._random.choice(TEMPLATES)
        opcode, kinds = template
        operands = [self._register(kinds[0].lower()), *(self._value(kind) for kind in kinds[1:])]
        if kinds == "dRR":
            operands = [operands[0], f"{{{self._register('r')}, {self._register('r')}}}"]
        if kinds == "Rrd":
            operands = [f"{{%r0, %r{self._random.randrange(1, NUM_REGISTERS)}}}", operands[2]]
        guard = ""
        if self._random.random() < 0.15:
            guard = f"@{self._random.choice(['', '!'])}{self._register('p')} "
        return f"{guard}{opcode} {', '.join(operands)};"


def _templates():
    found = []
    for type_, kind, wide in (("32", "r", "d"), ("64", "d", None), ("16", "h", "r")):
        for sign in "us":
            t = sign + type_
            found += [(f"{name}.{t}", kind * 3) for name in ("add", "sub", "min", "max", "mul.lo")]
            found += [(f"mad.lo.{t}", kind * 4), (f"shr.{t}", kind * 2 + "r")]
            found += [(f"setp.{c}.{t}", "p" + kind * 2) for c in ("lt", "le", "gt", "ge", "eq")]
            if wide:
                found += [(f"mul.wide.{t}", wide + kind * 2), (f"mul.hi.{t}", kind * 3)]
                found += [(f"mad.wide.{t}", wide + kind * 2 + wide)]
                found += [(f"cvt.{sign}{2 * int(type_)}.{t}", wide + kind)]
        found += [(f"neg.s{type_}", kind * 2), (f"setp.hi.u{type_}", "p" + kind * 2)]
        bits = f"b{type_}"
        found += [(f"{name}.{bits}", kind * 3) for name in ("and", "or", "xor")]
        found += [(f"not.{bits}", kind * 2), (f"shl.{bits}", kind * 2 + "r")]
        found += [(f"selp.{bits}", kind * 3 + "p"), (f"mov.{bits}", kind * 2)]
        found += [(f"setp.ne.and.{bits}", "p" + kind * 2 + "p")]
        found += [(f"setp.eq.xor.{bits}", "p" + kind * 2 + "p")]
    found += [("cvt.u32.u64", "rd"), ("cvt.u16.u32", "hr"), ("popc.b32", "rr"), ("popc.b64", "rd")]
    found += [(f"{name}.pred", "ppp") for name in ("and", "or", "xor")] + [("not.pred", "pp")]
    floats = [("add.f32", "fff"), ("sub.rn.f32", "fff"), ("mul.f32", "fff"), ("fma.rn.f32", "ffff")]
    floats += [("neg.f32", "ff"), ("abs.f32", "ff"), ("mov.b32", "rf"), ("mov.b32", "fr")]
    floats += [(f"setp.{c}.f32", "pff") for c in ("lt", "le", "gt", "ge", "eq", "ne")]
    floats += [(f"setp.{c}.f32", "pff") for c in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num")]
    floats += [("setp.nan.f32", "pff"), ("max.f32", "fff"), ("min.f32", "fff")]
    floats += [("max.f32", "ffff"), ("cvt.rn.bf16x2.f32", "rff"), ("cvt.rn.bf16.f32", "hf")]
    floats += [("cvt.f32.bf16", "fh")]
    floats += [("selp.f32", "fffp"), ("selp.b32", "fffp")]
    doubles = [(f"{name}.f64", "dDD") for name in ("add", "sub.rn", "mul")]
    doubles += [("fma.rn.f64", "dDDD"), ("setp.lt.f64", "pDD"), ("setp.ne.f64", "pDD")]
    doubles += [("cvt.f64.f32", "dF"), ("cvt.rn.f32.f64", "fD"), ("cvt.rn.f32.s32", "fr")]
    doubles += [("cvt.rn.f32.u64", "fd"), ("cvt.rn.f64.s64", "dd"), ("cvt.rn.f64.u32", "dr")]
    doubles += [("mov.b64", "dRR"), ("mov.b64", "Rrd"), ("cvta.to.global.u64", "dD")]
    return found + 2 * floats + 2 * doubles


TEMPLATES = _templates()


def source(body):
    """A kernel that loads all registers from `data`, runs `body` three times, stores them."""
    kinds = {"r": ("b32", 4), "d": ("b64", 8), "h": ("b16", 2), "f": ("f32", 4)}
    declare = " ".join(f".reg .{t} %{k}<{NUM_REGISTERS}>;" for k, (t, _) in kinds.items())
    load, store = [], []
    for group, (kind, (_, size)) in enumerate(kinds.items()):
        for number in range(NUM_REGISTERS):
            place = f"[%a+{(group * NUM_REGISTERS + number) * 8 * 32 * 8}]"
            bits = f"b{8 * size}"
            load.append(f"ld.global.{bits} %{kind}{number}, {place};")
            store.append(f"st.global.{bits} {place}, %{kind}{number};")
    test = [f"setp.lt.s32 %p{n}, %r{n}, 7;" for n in range(NUM_REGISTERS)]
    keep = [
        f"selp.b32 %t, 1, 0, %p{n}; st.global.b32 [%a+{n * 4096 + 4}], %t;"
        for n in range(NUM_REGISTERS)
    ]
    return f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 data)
{{
{declare} .reg .pred %p<{NUM_REGISTERS}>; .reg .pred %q; .reg .b32 %i; .reg .b32 %t; .reg .b64 %a;
ld.param.u64 %a, [data]; mov.u32 %t, %tid.x; mul.wide.u32 %a, %t, 8; mov.b32 %i, 0;
.reg .b64 %base; ld.param.u64 %base, [data]; add.u64 %a, %a, %base;
{" ".join(load)} {" ".join(test)}
LOOP:
{body}
add.u32 %i, %i, 1; setp.lt.u32 %q, %i, 3; @%q bra LOOP;
{" ".join(store)} {" ".join(keep)}
ret;
}}
"""


def data(seed):
    """Words for every register of every thread: special ones and random ones."""
    generator = np.random.default_rng(seed)
    size = 4 * NUM_REGISTERS * 8 * 32 * 2
    low = generator.choice(np.array(WORDS + FLOATS, np.uint64), size)
    high = generator.choice(np.array(WORDS, np.uint64), size)
    noise = generator.integers(0, 1 << 63, size, dtype=np.uint64)
    return np.where(generator.random(size) < 0.5, low | high << np.uint64(32), noise)


def result(text, memory, threads, make_threaded=None):
    module = api.load(text)
    function = module._function("k")
    program = Program(function, registry.decode, make_threaded)
    module.program = lambda kernel: program
    out = memory.copy()
    with np.errstate(all="ignore"):
        ran = module.launch("k", 1, threads, args=[out], policy=Policy(seed=1))
    return out, ran.warp_instructions, program


def is_threaded(program):
    """Whether all blocks ran as threaded code, by themselves or with accesses in a chain."""
    chains = [chain for chain in program._chains[False].values() if chain is not None]
    return all(
        node._threaded is not None or any(c.first <= node.first < c.end for c in chains)
        for node in program.nodes
        if isinstance(node, Block)
    )


@pytest.mark.parametrize("threads", [32, 20])
@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_the_same_bits_as_threaded_code(seed, threads, monkeypatch):
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 1)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 1)
    author = Author(seed)
    lines = [author.program(1) for _ in range(60)]
    for k in range(3):  # what no routine does, some of it depending on each other
        lines += [f"ex2.approx.ftz.f32 %f{k}, %f{k + 1};", f"lg2.approx.f32 %f{k + 2}, %f{k};"]
        lines += [f"@%p{k} ex2.approx.f32 %f{k}, %f{k + 3};", f"bfe.u32 %r{k}, %r{k + 2}, 3, 9;"]
    author._random.shuffle(lines)
    text = source("\n".join(lines))
    expected, count, _ = result(text, data(seed), threads)
    got, same_count, program = result(text, data(seed), threads, machine_code.make_threaded)
    np.testing.assert_array_equal(got, expected)
    assert same_count == count
    assert is_threaded(program)


@pytest.mark.parametrize("opcode", ["mov.f32", "cvt.f32.f32"])
def test_a_nan_that_is_moved_keeps_its_payload(opcode, monkeypatch):
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 1)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 1)
    text = source(f"{opcode} %f0, %f1;")
    memory = np.full_like(data(0), 0xFFA0_0001_FFA0_0001)
    expected, _, _ = result(text, memory, 32)
    got, _, _ = result(text, memory, 32, machine_code.make_threaded)
    np.testing.assert_array_equal(got, expected)


def test_what_is_wider_than_routines_know_stays_with_numpy(monkeypatch):
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 1)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 1)
    body = ".reg .b128 %w; mov.b128 %w, {%d0, %d1}; add.u32 %r0, %r1, 5; mov.b128 {%d2, %d3}, %w;"
    text = source(body)
    expected, _, _ = result(text, data(1), 32)
    got, _, program = result(text, data(1), 32, machine_code.make_threaded)
    np.testing.assert_array_equal(got, expected)
    assert is_threaded(program)


def test_a_loop_ends_where_lanes_part(monkeypatch):
    """Lane n goes round n + 1 times; from the first parting on lanes go by themselves."""
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 1)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 1)
    body = "setp.lt.u32 %q, %i, %t; add.u32 %i, %i, 1; add.u32 %r1, %r1, %i;"
    text = (
        source("").split("LOOP:")[0]
        + f"""mov.u32 %t, %tid.x; mov.u32 %i, 0; mov.u32 %r1, 0;
LOOP: {body}
@%q bra LOOP;
st.global.u32 [%a], %r1; ret; }}"""
    )
    lanes = np.arange(32)
    for make_threaded in (None, machine_code.make_threaded):
        out, _, _ = result(text, data(0), 32, make_threaded)
        np.testing.assert_array_equal(out[:32] & 0xFFFFFFFF, (lanes + 1) * (lanes + 2) // 2)


def test_the_core_is_chosen_by_the_environment(monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "numpy")
    assert machine_code.threaded_maker() is None
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    assert machine_code.threaded_maker() is not None
    monkeypatch.setenv("PTXEMU_CORE", "c")
    with pytest.raises(ValueError, match="PTXEMU_CORE"):
        machine_code.threaded_maker()
