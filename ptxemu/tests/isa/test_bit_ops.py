"""Bit counting, finding, fields, shifts, logic, and permutes follow the manual's pseudocode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode, run

from ptxemu.errors import UnsupportedInstructionError

few = settings(max_examples=12, deadline=None)
ONES_32 = 0xFFFFFFFF


def words(bits):
    special = [0, 1, 1 << (bits - 1), (1 << bits) - 1, (1 << (bits - 1)) - 1, 0x55]
    return st.one_of(st.sampled_from(special), st.integers(0, (1 << bits) - 1))


def lanes(bits, values=None):
    dtype = np.dtype(f"u{bits // 8}")
    chosen = words(bits) if values is None else values
    return st.lists(chosen, min_size=32, max_size=32).map(lambda v: np.array(v, dtype))


small = lanes(32, st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 300, 2**31, 2**32 - 1])))


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
@few
def test_counting_and_reversing_bits(bits, data):
    a = data.draw(lanes(bits))
    values = a.tolist()
    assert apply(f"popc.b{bits}", np.uint32, a).tolist() == [v.bit_count() for v in values]
    assert apply(f"clz.b{bits}", np.uint32, a).tolist() == [bits - v.bit_length() for v in values]
    reverse = [int(f"{v:0{bits}b}"[::-1], 2) for v in values]
    assert apply(f"brev.b{bits}", a.dtype, a).tolist() == reverse


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@given(data=st.data())
@few
def test_bfind_finds_the_highest_bit_that_is_no_sign(type_, data):
    bits = int(type_[1:])
    a = data.draw(lanes(bits))

    def place(value):
        if type_[0] == "s" and value >> (bits - 1):
            value ^= (1 << bits) - 1
        return value.bit_length() - 1

    places = [place(v) for v in a.tolist()]
    expected = [p & ONES_32 for p in places]
    assert apply(f"bfind.{type_}", np.uint32, a).tolist() == expected
    shifts = [bits - 1 - p if p >= 0 else ONES_32 for p in places]
    assert apply(f"bfind.shiftamt.{type_}", np.uint32, a).tolist() == shifts


def bfe(a, position, length, type_):
    bits = int(type_[1:])
    if bits == 32:  # the 64-bit forms use all bits, as an H200 does
        position, length = position & 255, length & 255
    position, length = min(position, 64), min(length, 64)
    sign = a >> min(position + length - 1, bits - 1) & 1 if type_[0] == "s" and length else 0
    result = 0
    for i in range(bits):
        inside = i < length and position + i < bits
        result |= (a >> (position + i) & 1 if inside else sign) << i
    return result


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@given(data=st.data())
@few
def test_bit_fields_are_extracted(type_, data):
    a, position, length = data.draw(lanes(int(type_[1:]))), data.draw(small), data.draw(small)
    found = apply(f"bfe.{type_}", a.dtype, a, position, length).tolist()
    rows = zip(a.tolist(), position.tolist(), length.tolist(), strict=True)
    assert found == [bfe(*row, type_) for row in rows]


def bfi(a, b, position, length, bits):
    if bits == 32:
        position, length = position & 255, length & 255
    for i in range(min(length, 64)):
        if position + i < bits:
            at = position + i
            b = b & ~(1 << at) | (a >> i & 1) << at if i < bits else b
    return b


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
@few
def test_bit_fields_are_inserted(bits, data):
    a, b = data.draw(lanes(bits)), data.draw(lanes(bits))
    position, length = data.draw(small), data.draw(small)
    found = apply(f"bfi.b{bits}", a.dtype, a, b, position, length).tolist()
    rows = zip(*(x.tolist() for x in (a, b, position, length)), strict=True)
    assert found == [bfi(*row, bits) for row in rows]


def szext(a, count, mode, is_signed):
    bits = count & 31
    too_large = count >= 32 and mode == "clamp"
    mask = 0 if too_large else ONES_32 << bits & ONES_32
    sign = 0 if bits == 0 or too_large or not is_signed else a >> ((bits - 1) & 31) & 1
    return a & ~mask & ONES_32 | (mask if sign else 0)


def bmsk(a, b, mode):
    start, width = a & 31, b & 31
    mask0, mask1 = ONES_32 << start & ONES_32, ONES_32 << (start + width) & ONES_32
    clears = start + width >= 32
    if mode == "clamp":
        mask0 = 0 if a >= 32 else mask0
        clears = clears or a >= 32 or b >= 32
    return mask0 & ~(0 if clears else mask1)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@given(data=st.data())
@few
def test_extensions_and_masks_clamp_or_wrap(mode, data):
    a, b, position = data.draw(lanes(32)), data.draw(small), data.draw(small)
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    for type_ in ("u32", "s32"):
        found = apply(f"szext.{mode}.{type_}", np.uint32, a, b).tolist()
        assert found == [szext(*row, mode, type_ == "s32") for row in rows]
    found = apply(f"bmsk.{mode}.b32", np.uint32, position, b).tolist()
    rows = zip(position.tolist(), b.tolist(), strict=True)
    assert found == [bmsk(*row, mode) & ONES_32 for row in rows]


@pytest.mark.parametrize(
    ("mask", "base", "offset", "expected"),
    [
        (0xAAAAAAAA, 3, 1, 3),
        (0xAAAAAAAA, 3, -1, 3),
        (0xAAAAAAAA, 2, 1, 3),
        (0xAAAAAAAA, 2, -1, 1),
        (0xAAAAAAAA, 2, 0, ONES_32),
        (0xAAAAAAAA, 3, 0, 3),
        (0xAAAAAAAA, 0, 4, 7),
        (0x1, 1, 1, ONES_32),
    ],
)
def test_fns_finds_the_nth_set_bit(mask, base, offset, expected):
    full = lambda value: np.full(32, value & ONES_32, np.uint32)
    found = apply("fns.b32", np.uint32, full(mask), full(base), full(offset))
    assert set(found.tolist()) == {expected}


@pytest.mark.parametrize("bits", [16, 32, 64])
@given(data=st.data())
@few
def test_shifts_beyond_the_width_give_zero_or_the_sign(bits, data):
    a, count = data.draw(lanes(bits)), data.draw(small)
    ones = (1 << bits) - 1
    rows = list(zip(a.tolist(), count.tolist(), strict=True))
    assert apply(f"shl.b{bits}", a.dtype, a, count).tolist() == [
        v << min(c, 64) & ones for v, c in rows
    ]
    assert apply(f"shr.u{bits}", a.dtype, a, count).tolist() == [v >> min(c, 64) for v, c in rows]
    assert apply(f"shr.b{bits}", a.dtype, a, count).tolist() == [v >> min(c, 64) for v, c in rows]
    arithmetic = [signed(v, bits) >> min(c, 64) & ones for v, c in rows]
    assert apply(f"shr.s{bits}", a.dtype, a, count).tolist() == arithmetic
    for amount in (0, 3, bits - 1, bits, bits + 1):
        found = apply(f"shl.b{bits}", a.dtype, a, constants=(amount,)).tolist()
        assert found == [v << amount & ones for v, _ in rows]
        found = apply(f"shr.s{bits}", a.dtype, a, constants=(amount,)).tolist()
        assert found == [signed(v, bits) >> amount & ones for v, _ in rows]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@given(data=st.data())
@few
def test_funnel_shifts(mode, data):
    a, b, count = data.draw(lanes(32)), data.draw(lanes(32)), data.draw(small)
    left = apply(f"shf.l.{mode}.b32", np.uint32, a, b, count).tolist()
    right = apply(f"shf.r.{mode}.b32", np.uint32, a, b, count).tolist()
    for lane, (low, high, c) in enumerate(zip(a.tolist(), b.tolist(), count.tolist(), strict=True)):
        n = min(c, 32) if mode == "clamp" else c & 31
        both = high << 32 | low
        assert left[lane] == both << n >> 32 & ONES_32
        assert right[lane] == both >> n & ONES_32


@pytest.mark.parametrize("bits", [16, 32, 64])
@given(data=st.data())
@few
def test_bitwise_logic(bits, data):
    a, b = data.draw(lanes(bits)), data.draw(lanes(bits))
    assert (apply(f"and.b{bits}", a.dtype, a, b) == a & b).all()
    assert (apply(f"or.b{bits}", a.dtype, a, b) == a | b).all()
    assert (apply(f"xor.b{bits}", a.dtype, a, b) == a ^ b).all()
    assert (apply(f"not.b{bits}", a.dtype, a) == ~a).all()
    assert apply(f"cnot.b{bits}", a.dtype, a).tolist() == [int(v == 0) for v in a.tolist()]


def test_logic_of_predicates():
    p, q = np.arange(32) % 2 == 0, np.arange(32) % 3 == 0
    assert (apply("and.pred", np.bool_, p, q) == (p & q)).all()
    assert (apply("or.pred", np.bool_, p, q) == (p | q)).all()
    assert (apply("xor.pred", np.bool_, p, q) == (p ^ q)).all()
    assert (apply("not.pred", np.bool_, p) == ~p).all()


def test_lop3_computes_every_truth_table():
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(3))
    index = [
        [(x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1 for i in range(32)]
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    for table in range(256):
        found = apply("lop3.b32", np.uint32, a, b, c, constants=(table,)).tolist()
        expected = [sum((table >> k & 1) << i for i, k in enumerate(row)) for row in index]
        assert found == expected, table


def test_lop3_combines_whether_the_result_is_not_zero():
    a = np.arange(32, dtype=np.uint32)
    q = np.arange(32) % 2 == 0
    one = np.ones(32, np.uint32)
    both = {"d": np.uint32, "p": np.bool_}
    d, p = run("lop3.or.b32 %d|%p, %a, %b, %b, 0xC0, %q;", both, a=a, b=one, q=q)
    assert d.tolist() == [v & 1 for v in range(32)]
    assert p.all()
    p = run("lop3.and.b32 _|%p, %a, %b, %b, 0xC0, %q;", {"p": np.bool_}, a=a, b=one, q=q)
    assert not p.any()


def permuted(a, b, selector):
    source = (b << 32 | a).to_bytes(8, "little")
    result = []
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = source[nibble & 7]
        result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


@given(data=st.data())
@few
def test_prmt_picks_bytes_or_spreads_their_sign(data):
    a, b, c = (data.draw(lanes(32)) for _ in range(3))
    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert apply("prmt.b32", np.uint32, a, b, c).tolist() == [permuted(*row) for row in rows]
    selector = data.draw(st.integers(0, 0xFFFF))
    found = apply("prmt.b32", np.uint32, a, b, constants=(selector,)).tolist()
    assert found == [permuted(x, y, selector) for x, y, _ in rows]


PRMT_TABLES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_TABLES)
def test_prmt_modes_use_the_low_two_bits_of_c(mode):
    a = np.full(32, 0x03020100, np.uint32)
    b = np.full(32, 0x07060504, np.uint32)
    c = np.arange(32, dtype=np.uint32)
    found = apply(f"prmt.b32.{mode}", np.uint32, a, b, c).tolist()
    for lane, word in enumerate(found):
        digits = "".join(str(byte) for byte in word.to_bytes(4, "big"))
        assert digits == PRMT_TABLES[mode][lane % 4]


@pytest.mark.parametrize(
    "text",
    [
        "lop3.b32 %d, %a, %b, %b, %a;",
        "lop3.b32 %d, %a, %b, %b, 256;",
        "lop3.or.b32 %d, %a, %b, %b, 1, %p;",
        "shl.u32 %d, %a, 1;",
        "prmt.b32.f5e %d, %a, %b, %b;",
        "shf.l.b32 %d, %a, %b, 1;",
        "and.u32 %d, %a, %b;",
        "not.b32 %p, %a;",
        "and.pred %p, %p, %a;",
        "popc.u32 %d, %a;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    registers = ".reg .b32 %d, %a, %b; .reg .pred %p;"
    with pytest.raises(UnsupportedInstructionError):
        decode(text, registers)
