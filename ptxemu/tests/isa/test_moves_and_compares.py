"""mov, setp, set, selp and slct."""

import operator

import numpy as np
import pytest
from tests.isa.pure_run import apply, decode, run

from ptxemu.api import load
from ptxemu.errors import UnsupportedInstructionError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LANES = np.arange(32, dtype=np.uint32)
ORDERED = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integer_comparisons_are_signed_or_not_as_the_type_says(bits):
    rng = np.random.default_rng(6)
    a = rng.integers(0, 2**bits, 32, dtype=f"u{bits // 8}")
    b = np.where(LANES % 4 == 0, a, rng.integers(0, 2**bits, 32, dtype=f"u{bits // 8}"))
    for op, reference in {**ORDERED, "ne": operator.ne}.items():
        found = apply(f"setp.{op}.u{bits}", np.bool_, a, b)
        assert (found == reference(a, b)).all()
        found = apply(f"setp.{op}.s{bits}", np.bool_, a, b)
        assert (found == reference(a.view(f"i{bits // 8}"), b.view(f"i{bits // 8}"))).all()
    for op, reference in UNSIGNED.items():
        assert (apply(f"setp.{op}.u{bits}", np.bool_, a, b) == reference(a, b)).all()
    assert (apply(f"setp.eq.b{bits}", np.bool_, a, b) == (a == b)).all()


def test_set_writes_all_ones_or_one():
    a, b = LANES, np.full(32, 16, np.uint32)
    less = (a < b).tolist()
    assert apply("set.lt.u32.u32", np.uint32, a, b).tolist() == [0xFFFFFFFF * x for x in less]
    assert apply("set.lt.f32.u32", np.float32, a, b).tolist() == [float(x) for x in less]
    c = LANES % 2 == 0
    found = apply("set.lt.and.s32.u32", np.uint32, a, b, c).tolist()
    assert found == [0xFFFFFFFF * (x and y) for x, y in zip(less, c.tolist(), strict=True)]
    low_high = np.array([1, 5], np.float16).view(np.uint32).repeat(32)
    other = np.array([2, 4], np.float16).view(np.uint32).repeat(32)
    found = apply("set.lt.f16x2.f16x2", np.uint32, low_high, other)
    assert found.view(np.float16).tolist()[:2] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("type_", "dtype"), [("b16", "u2"), ("b32", "u4"), ("f32", "f4"), ("u64", "u8")]
)
def test_selp_picks_by_predicate(type_, dtype):
    a, b = np.arange(32).astype(dtype), np.arange(100, 132).astype(dtype)
    c = LANES % 3 == 0
    assert (apply(f"selp.{type_}", np.dtype(dtype), a, b, c) == np.where(c, a, b)).all()


def test_slct_picks_by_sign():
    a, b = LANES, LANES + 100
    signs = np.array([0, 1, -1, -(2**31)] * 8, np.int32)
    assert (apply("slct.u32.s32", np.uint32, a, b, signs) == np.where(signs >= 0, a, b)).all()
    floats = np.array([-0.0, np.nan, -1e-45, 3.0] * 8, np.float32)
    found = apply("slct.b32.f32", np.uint32, a, b, floats)
    assert (found == np.where([True, False, False, True] * 8, a, b)).all()
    found = apply("slct.ftz.b32.f32", np.uint32, a, b, floats)
    assert (found == np.where([True, False, True, True] * 8, a, b)).all()


def test_128_bits_go_through_a_register_and_back():
    low, high = LANES.astype(np.uint64) << np.uint64(33), LANES.astype(np.uint64) + np.uint64(9)
    body = ".reg .b128 %q, %s; mov.b128 %q, {%a, %b}; mov.b128 %s, %q; mov.b128 {%x, %y}, %s;"
    mask = LANES < 7
    # b128 registers need their own storage, which `run` does not make: a whole kernel does.
    text = f"""
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b64 %a, %b, %x, %y, %o; .reg .b32 %t; .reg .pred %p; {body.split(";")[0]};
mov.u32 %t, %tid.x; cvt.u64.u32 %a, %t; shl.b64 %a, %a, 33; cvt.u64.u32 %b, %t; add.s64 %b, %b, 9;
mov.b128 %s, {{%b, %a}}; mov.b128 %q, {{%a, %b}}; setp.lt.u32 %p, %t, 7;
@%p mov.b128 %s, %q; mov.b128 {{%x, %y}}, %s;
ld.param.u64 %o, [out]; mul.wide.u32 %a, %t, 16; add.s64 %o, %o, %a;
st.global.u64 [%o], %x; st.global.u64 [%o+8], %y; ret;
}}"""
    out = np.zeros((32, 2), np.uint64)
    load(text).launch("k", 1, 32, args=[out])
    assert (out[:, 0] == np.where(mask, low, high)).all()
    assert (out[:, 1] == np.where(mask, high, low)).all()


def test_constants_special_registers_and_predicates_move():
    assert run("mov.b32 %d, -2;", {"d": np.int32}).tolist() == [-2] * 32
    assert run("mov.f32 %d, 0f3F800000;", {"d": np.float32}).tolist() == [1.0] * 32
    assert run("mov.f64 %d, 0d3FF0000000000000;", {"d": np.float64}).tolist() == [1.0] * 32
    assert run("mov.pred %p, 1;", {"p": np.bool_}).all()
    p = LANES % 2 == 0
    assert (run("mov.pred %q, %p;", {"q": np.bool_}, p=p) == p).all()


def test_a_move_copies_the_value_and_not_the_register():
    first, second = run(
        "mov.b32 %x, %a; add.u32 %a, %a, 1; mov.b32 %y, %a; mov.b32 %a, %x; add.u32 %x, %x, 5;",
        {"a": np.uint32, "y": np.uint32},
        a=LANES,
        x=LANES,
    )
    assert (first == LANES).all()
    assert (second == LANES + 1).all()


@pytest.mark.parametrize(
    "text",
    [
        "mov.b64 %q, {%a, %b, %b};",
        "mov.u64 %q, {%a, %b};",
        "mov.b32 %d, %q;",
        "mov.b32 %d, %h;",
        "mov.f32 %d, 1;",
        "setp.lt.f16 %p|%p, %h, %h;",
        "mov.b32 %d, %p;",
        "setp.lt.b32 %p, %a, %b;",
        "setp.lo.s32 %p, %a, %b;",
        "setp.ltu.s32 %p, %a, %b;",
        "setp.ftz.lt.f64 %p, %q, %q;",
        "setp.lt.f16x2 %p, %a, %b;",
        "selp.b32 %d, %a, %b, %a;",
        "slct.b32.u32 %d, %a, %b, %a;",
        "set.lt.f64.s32 %q, %a, %b;",
        "set.lt.u16.s32 %h, %a, %b;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    registers = ".reg .b32 %d, %a, %b; .reg .pred %p; .reg .b64 %q; .reg .b16 %h;"
    with pytest.raises(UnsupportedInstructionError):
        decode(text, registers)
