"""Chains of add.cc, addc, sub.cc, subc, mad.cc and madc compute on long integers."""

import numpy as np
import pytest
from tests.isa.pure_run import decode

from ptxemu.api import load
from ptxemu.errors import UnsupportedInstructionError

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 out) {{
.reg .b32 %t; .reg .b64 %p, %off; .reg .pred %q;
.reg .b{bits} %a0, %a1, %b0, %b1, %d0, %d1, %d2, %d3, %c;
mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, {pair};
ld.param.u64 %p, [a]; add.s64 %p, %p, %off;
ld.global.u{bits} %a0, [%p]; ld.global.u{bits} %a1, [%p+{size}];
ld.param.u64 %p, [b]; add.s64 %p, %p, %off;
ld.global.u{bits} %b0, [%p]; ld.global.u{bits} %b1, [%p+{size}];
mov.b{bits} %d2, 0; mov.b{bits} %d3, 0; setp.lt.u32 %q, %t, 20;
{body}
ld.param.u64 %p, [out]; mul.wide.u32 %off, %t, {four}; add.s64 %p, %p, %off;
st.global.u{bits} [%p], %d0; st.global.u{bits} [%p+{size}], %d1;
st.global.u{bits} [%p+{pair}], %d2; st.global.u{bits} [%p+{triple}], %d3;
ret;
}}"""


def compute(bits, body):
    """Run `body` on random pairs of words; gives the operands and 4-word results as integers."""
    size = bits // 8
    text = TEXT.format(
        bits=bits, size=size, pair=2 * size, triple=3 * size, four=4 * size, body=body
    )
    rng = np.random.default_rng(10)
    a, b = (rng.integers(0, 2**bits, (32, 2), dtype=f"u{size}") for _ in range(2))
    a[:4], b[2:6] = 2**bits - 1, 2**bits - 1
    out = np.zeros((32, 4), f"u{size}")
    load(text).launch("k", 1, 32, args=[a, b, out])
    whole = lambda words: [
        sum(w << (bits * i) for i, w in enumerate(row)) for row in words.tolist()
    ]
    return whole(a), whole(b), whole(out)


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_carry_from_word_to_word(bits):
    a, b, out = compute(
        bits,
        f"add.cc.u{bits} %d0, %a0, %b0; addc.cc.u{bits} %d1, %a1, %b1; addc.u{bits} %d2, 0, 0;",
    )
    assert out == [x + y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("bits", [32, 64])
def test_differences_borrow_from_word_to_word(bits):
    a, b, out = compute(
        bits,
        f"sub.cc.s{bits} %d0, %a0, %b0; subc.cc.s{bits} %d1, %a1, %b1; subc.s{bits} %d2, 0, 0;",
    )
    expected = [(x - y) & ((1 << 3 * bits) - 1) for x, y in zip(a, b, strict=True)]
    assert out == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_products_of_two_words_by_two_words(bits):
    u = f"u{bits}"
    a, b, out = compute(
        bits,
        f"""
mul.lo.{u} %d0, %a0, %b0; mul.hi.{u} %d1, %a0, %b0;
mad.lo.cc.{u} %d1, %a1, %b0, %d1; madc.hi.{u} %d2, %a1, %b0, 0;
mad.lo.cc.{u} %d1, %a0, %b1, %d1; madc.hi.cc.{u} %d2, %a0, %b1, %d2; addc.{u} %d3, 0, 0;
mad.lo.cc.{u} %d2, %a1, %b1, %d2; madc.hi.{u} %d3, %a1, %b1, %d3;""",
    )
    assert out == [x * y for x, y in zip(a, b, strict=True)]


def test_a_carry_after_a_subtraction_says_that_it_did_not_borrow():
    a, b, out = compute(32, "sub.cc.u32 %d0, %a0, %b0; addc.u32 %d1, 0, 0; mov.b32 %d0, 0;")
    low = [(x & 0xFFFFFFFF, y & 0xFFFFFFFF) for x, y in zip(a, b, strict=True)]
    assert [value >> 32 for value in out] == [int(x >= y) for x, y in low]
    assert 0 < sum(x >= y for x, y in low) < 32


def test_lanes_that_do_not_execute_keep_their_carry():
    a, b, out = compute(
        32,
        "add.cc.u32 %d0, %a0, %b0; @%q add.cc.u32 %c, 0, 0; addc.u32 %d1, 0, 0; mov.b32 %d0, 0;",
    )
    carries = [(x & 0xFFFFFFFF) + (y & 0xFFFFFFFF) >> 32 for x, y in zip(a, b, strict=True)]
    assert any(carries[20:])
    assert any(carries[:20])
    assert [value >> 32 for value in out] == [0] * 20 + carries[20:]


@pytest.mark.parametrize(
    "text",
    ["add.cc.u16 %d, %d, %d;", "addc.sat.s32 %d, %d, %d;", "madc.u32 %d, %d, %d, %d;"],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    with pytest.raises(UnsupportedInstructionError):
        decode(text, ".reg .b32 %d;")
