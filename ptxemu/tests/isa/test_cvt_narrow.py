"""cvt with stochastic rounding, and of narrow types to bf16 with scales."""

import numpy as np
import pytest
from tests.isa.pure_run import apply, run

from ptxemu.numerics import narrow
from ptxemu.numerics.minifloat import BF16, E2M1, E4M3, E5M2, F16

RNG = np.random.default_rng(5)
FORMS = {"f16": F16, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}


def f32(count):
    return (RNG.standard_normal(count) * 2.0 ** RNG.integers(-3, 3, count)).astype(np.float32)


def neighbours(values, form):
    """The codes that truncation and rounding away from zero give."""
    wide = values.astype(np.float64)
    low = form.encode(wide, "rz", satfinite=True)
    away = form.encode(np.where(wide < 0, -1, 1) * np.abs(wide), "rz", satfinite=True)
    up = form.encode(np.abs(wide), "rp", satfinite=True) | np.where(wide < 0, form.sign_bit, 0)
    assert (low == away).all()
    return low, up


@pytest.mark.parametrize(("type_", "width", "cut"), [("bf16", 16, 16), ("f16", 13, 13)])
def test_the_carry_of_random_bits_and_what_is_cut_off_rounds_away(type_, width, cut):
    """ISA, "cvt": .rs; the upper half of the random bits is the first operand's."""
    a, b = np.abs(f32(64)) + np.float32(0.25), f32(64)
    a = np.where(a < 0.25, np.float32(1), a).astype(np.float32)
    random = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    found = apply(f"cvt.rs.{type_}x2.f32", np.uint32, a, b, random)
    bits = a.view(np.uint32)
    carry = ((bits & ((1 << cut) - 1)) + ((random >> 16) & ((1 << width) - 1))) >> cut
    low, up = neighbours(a, FORMS[type_])
    np.testing.assert_array_equal(found >> 16, np.where(carry, up, low))
    low, up = neighbours(b, FORMS[type_])
    assert ((found & 0xFFFF == low) | (found & 0xFFFF == up)).all()


@pytest.mark.parametrize("type_", ["e4m3", "e5m2"])
def test_four_bytes_share_two_halves_of_random_bits(type_):
    same = np.full(32, 1.0 + 1 / 32, np.float32)
    random = np.zeros(32, np.uint32)
    random[1], random[2] = 0xFFFF0000, 0x0000FFFF
    found = apply_four(f"cvt.rs.satfinite.{type_}x4.f32", [same] * 4, random)
    one = int(FORMS[type_].encode(np.ones(1), "rn")[0])
    low, up = one * 0x01010101, (one + 1) * 0x01010101
    assert found[0] == low
    assert found[1] == (up & 0xFFFF0000) | (low & 0xFFFF)
    assert found[2] == (low & 0xFFFF0000) | (up & 0xFFFF)


def apply_four(opcode, operands, random, result=np.uint32):
    names = dict(zip("abef", operands, strict=True))
    return run(f"{opcode} %d, {{%a, %b, %e, %f}}, %g;", {"d": result}, **names, g=random)


def test_nibbles_have_eight_random_bits_each():
    same = np.full(32, 1.25, np.float32)  # half way between 1 and 1.5
    random = np.zeros(32, np.uint32)
    random[1], random[2] = 0x80_00_00_00, 0x7F_00_80_00
    found = apply_four("cvt.rs.satfinite.e2m1x4.f32", [same] * 4, random, np.uint16)
    assert [hex(x) for x in found[:3]] == ["0x2222", "0x3222", "0x2232"]


def test_clamps_and_relu():
    a = np.array([1e9, -1e9, -1.0, np.nan] * 8, np.float32)
    random = np.zeros(32, np.uint32)
    found = apply_four("cvt.rs.relu.satfinite.e4m3x4.f32", [a] * 4, random)[:4] & 0xFF
    assert found.tolist() == [0x7E, 0, 0, 0x7F]


@pytest.mark.parametrize("type_", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_narrow_pairs_become_bf16_times_their_scales(type_):
    codes = RNG.integers(0, 2**16, 64, dtype=np.uint16)
    scales = RNG.integers(120, 134, (64, 2)).astype(np.uint8)
    found = apply(
        f"cvt.rn.scaled::n2::ue8m0.bf16x2.{type_}x2", np.uint32, codes, scales.view(np.uint16)[:, 0]
    )
    table = narrow.values_of(type_).astype(np.float64)
    for place in range(2):
        values = table[(codes >> (8 * place)) & (len(table) - 1)]
        values = values * 2.0 ** (scales[:, place].astype(int) - 127)
        expected = BF16.encode(values, "rn")
        np.testing.assert_array_equal(found >> (16 * place) & 0xFFFF, expected)


def test_a_scale_that_is_no_number_gives_none():
    codes = np.full(32, 0x3838, np.uint16)  # 1 and 1
    scales = np.full(32, 0x7FFF, np.uint16)
    found = apply("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", np.uint32, codes, scales)
    assert (found == 0x3F807FFF).all()


def test_s2f6_is_a_signed_byte_in_sixty_fourths():
    codes = RNG.integers(0, 2**16, 64, dtype=np.uint16)
    found = apply("cvt.rn.bf16x2.s2f6x2", np.uint32, codes)
    for place in range(2):
        values = (codes >> (8 * place)).astype(np.uint8).view(np.int8) / 64.0
        expected = BF16.encode(values, "rn")
        np.testing.assert_array_equal(found >> (16 * place) & 0xFFFF, expected)
