"""Integer arithmetic equals Python's integers, wrapped as PTX says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode, run

from ptxemu.errors import UnsupportedInstructionError

few = settings(max_examples=10, deadline=None)
TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def limits(type_):
    bits = int(type_[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def dtype(type_):
    return np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")


def wrap(value, type_):
    bits = int(type_[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if type_[0] == "s" and value >> (bits - 1) else value


def integers(type_):
    low, high = limits(type_)
    special = [low, low + 1, high, high - 1, 0, 1, high // 2, high // 2 + 1, 3]
    special += [-1, -2, -3] if low else []
    return st.one_of(st.sampled_from(special), st.integers(low, high))


def lanes(type_, size=32):
    return st.lists(integers(type_), min_size=size, max_size=size).map(
        lambda values: np.array(values, dtype(type_))
    )


def check(opcode, type_, reference, data, arity, result_type=None, third_type=None):
    """Apply the opcode on random lanes and compare with `reference` on Python integers."""
    result_type = result_type or type_
    types = [type_, type_, third_type or type_][:arity]
    operands = [data.draw(lanes(t)) for t in types]
    found = apply(f"{opcode}.{type_}", dtype(result_type), *operands).tolist()
    rows = zip(*(operand.tolist() for operand in operands), strict=True)
    assert found == [wrap(reference(*row), result_type) for row in rows]


@pytest.mark.parametrize("type_", TYPES)
@given(data=st.data())
@few
def test_sums_products_and_distances_wrap(type_, data):
    check("add", type_, lambda a, b: a + b, data, 2)
    check("sub", type_, lambda a, b: a - b, data, 2)
    check("mul.lo", type_, lambda a, b: a * b, data, 2)
    check("mad.lo", type_, lambda a, b, c: a * b + c, data, 3)
    check("sad", type_, lambda a, b, c: c + abs(a - b), data, 3)
    check("min", type_, min, data, 2)
    check("max", type_, max, data, 2)


@pytest.mark.parametrize("type_", TYPES)
@given(data=st.data())
@few
def test_upper_halves_of_products_are_exact(type_, data):
    bits = int(type_[1:])
    check("mul.hi", type_, lambda a, b: a * b >> bits, data, 2)
    check("mad.hi", type_, lambda a, b, c: (a * b >> bits) + c, data, 3)


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32"])
@given(data=st.data())
@few
def test_wide_products_keep_all_bits(type_, data):
    wide = f"{type_[0]}{2 * int(type_[1:])}"
    check("mul.wide", type_, lambda a, b: a * b, data, 2, wide)
    check("mad.wide", type_, lambda a, b, c: a * b + c, data, 3, wide, third_type=wide)


def towards_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("type_", TYPES)
@given(data=st.data())
@few
def test_division_truncates_and_by_zero_gives_all_ones(type_, data):
    check("div", type_, lambda a, b: towards_zero(a, b) if b else -1, data, 2)
    check("rem", type_, lambda a, b: a - b * towards_zero(a, b) if b else -1, data, 2)


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
@given(data=st.data())
@few
def test_negation_and_magnitude_wrap_at_the_smallest_number(type_, data):
    check("neg", type_, lambda a: -a, data, 1)
    check("abs", type_, abs, data, 1)


def clamp_s32(value):
    return max(-(1 << 31), min((1 << 31) - 1, value))


@given(st.data())
@few
def test_saturation_clamps_to_s32(data):
    check("add.sat", "s32", lambda a, b: clamp_s32(a + b), data, 2)
    check("sub.sat", "s32", lambda a, b: clamp_s32(a - b), data, 2)
    check("mad.hi.sat", "s32", lambda a, b, c: clamp_s32((a * b >> 32) + c), data, 3)
    check(
        "mad24.hi.sat",
        "s32",
        lambda a, b, c: clamp_s32((low24(a, 1) * low24(b, 1) >> 16) + c),
        data,
        3,
    )


def low24(value, signed):
    value &= 0xFFFFFF
    return value - (1 << 24) if signed and value >> 23 else value


@pytest.mark.parametrize("type_", ["u32", "s32"])
@given(data=st.data())
@few
def test_24_bit_products(type_, data):
    signed = type_ == "s32"
    product = lambda a, b: low24(a, signed) * low24(b, signed)
    check("mul24.lo", type_, product, data, 2)
    check("mul24.hi", type_, lambda a, b: product(a, b) >> 16, data, 2)
    check("mad24.lo", type_, lambda a, b, c: product(a, b) + c, data, 3)
    check("mad24.hi", type_, lambda a, b, c: (product(a, b) >> 16) + c, data, 3)


@given(st.data())
@few
def test_relu_keeps_the_result_at_least_zero(data):
    check("min.relu", "s32", lambda a, b: max(min(a, b), 0), data, 2)
    check("max.relu", "s32", lambda a, b: max(a, b, 0), data, 2)


@pytest.mark.parametrize("type_", ["u16", "s16"])
@given(data=st.data())
@few
def test_pairs_of_16_bits_work_on_each_half(type_, data):
    a, b = data.draw(lanes(type_, 64)), data.draw(lanes(type_, 64))
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    cases = {"add": lambda x, y: x + y, "min": min, "max": max}
    if type_ == "s16":
        cases["min.relu"] = lambda x, y: max(min(x, y), 0)
    for opcode, reference in cases.items():
        found = apply(f"{opcode}.{type_}x2", np.uint32, a.view(np.uint32), b.view(np.uint32))
        expected = [wrap(reference(*row), type_) for row in rows]
        assert found.view(dtype(type_)).tolist() == expected, opcode


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
@given(data=st.data())
@few
def test_dot_products_of_bytes_accumulate(a_type, b_type, data):
    a, b, c = (data.draw(lanes("u32")) for _ in range(3))
    parts = lambda x, type_, bits: x.view(f"{'i' if type_ == 's32' else 'u'}{bits // 8}").tolist()
    bytes_a, bytes_b = parts(a, a_type, 8), parts(b, b_type, 8)
    words_a = parts(a, a_type, 16)
    types = f"{a_type}.{b_type}"
    dp4a = apply(f"dp4a.{types}", np.uint32, a, b, c).tolist()
    low = apply(f"dp2a.lo.{types}", np.uint32, a, b, c).tolist()
    high = apply(f"dp2a.hi.{types}", np.uint32, a, b, c).tolist()
    for lane, addend in enumerate(c.tolist()):
        four = range(4 * lane, 4 * lane + 4)
        expected = addend + sum(bytes_a[i] * bytes_b[i] for i in four)
        assert dp4a[lane] == expected & 0xFFFFFFFF
        for first, found in ((0, low), (2, high)):
            expected = addend + sum(
                words_a[2 * lane + i] * bytes_b[4 * lane + first + i] for i in (0, 1)
            )
            assert found[lane] == expected & 0xFFFFFFFF


def test_constants_and_negative_constants_are_operands():
    a = np.arange(32, dtype=np.uint32)
    assert apply("add.s32", np.int32, a, constants=(-5,)).tolist() == list(range(-5, 27))
    assert apply("mul.wide.s32", np.int64, a, constants=(-3,)).tolist() == [
        -3 * x for x in range(32)
    ]
    assert apply("max.u32", np.uint32, a, constants=(20,)).tolist() == [
        max(x, 20) for x in range(32)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "add.sat.u32 %d, %a, %b;",
        "mul.s32 %d, %a, %b;",
        "mul.wide.s64 %q, %q, %q;",
        "min.relu.u32 %d, %a, %b;",
        "mad.lo.sat.s32 %d, %a, %b, %b;",
        "add.s32 %d, %a;",
        "add.s64 %q, %a, %q;",
        "add.s32 %p, %a, %b;",
        "dp4a.u32.u64 %d, %a, %b, %b;",
        "neg.u32 %d, %a;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    registers = ".reg .b32 %d, %a, %b; .reg .b64 %q; .reg .pred %p;"
    with pytest.raises(UnsupportedInstructionError, match="PTX line 7"):
        decode(text, registers)


def test_only_lanes_of_the_mask_are_written_and_guards_hold_within_it():
    a = np.arange(32, dtype=np.uint32)
    old = np.full(32, 1000, np.uint32)
    mask = a < 20
    body = "add.u32 %d, %a, 1; @%p add.u32 %d, %d, 100; @!%p add.u32 %e, %d, 5;"
    found, guarded = run(
        body, {"d": np.uint32, "e": np.uint32}, mask=mask, a=a, d=old, e=old, p=a % 2 == 0
    )
    for lane in range(32):
        new = lane + 1 + (100 if lane % 2 == 0 else 0)
        assert found[lane] == (new if lane < 20 else 1000)
        assert guarded[lane] == (new + 5 if lane < 20 and lane % 2 else 1000)
