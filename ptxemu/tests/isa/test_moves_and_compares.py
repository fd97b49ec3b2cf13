"""mov, setp, set, selp and slct."""

import numpy as np
from tests.isa.pure_run import run

from ptxemu.api import load

LANES = np.arange(32, dtype=np.uint32)


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
