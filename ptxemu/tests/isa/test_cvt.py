"""cvt: what no recording of an H200 in tests.silicon has."""

import math

import numpy as np
import pytest
from tests.isa.pure_run import apply, run
from tests.isa.test_pure_ops import value
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import same

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics import bf16, narrow
from ptxemu.numerics.minifloat import BF16, E2M1, E4M3, E5M2, F16

# cvt: what no recording of an H200 in `tests.silicon` has.

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_between_the_16_bit_types_the_rounding_mode_may_be_missing():
    lanes = np.arange(0x3C00, 0x4400, 64, dtype=np.uint16)
    for opcode in ("bf16.f16", "f16.bf16"):
        rounded = apply(f"cvt.rn.{opcode}", np.uint16, lanes)
        np.testing.assert_array_equal(apply(f"cvt.{opcode}", np.uint16, lanes), rounded)
    with pytest.raises(UnsupportedInstructionError, match="rounding mode"):
        apply("cvt.bf16.f32", np.uint16, np.zeros(32, np.float32))


def test_sat_clamps_integers_to_the_unit_interval():
    ints = np.array([-5, 0, 1, 9] * 8, np.int32)
    assert apply("cvt.rn.sat.f32.s32", np.float32, ints).tolist()[:4] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_relu_and_satfinite_of_halves(type_):
    a = np.array([-1.0, 1e39, -np.inf, np.nan] * 8, np.float32)
    largest = float({"f16": reference.F16, "bf16": reference.BF16}[type_].largest)
    relu = apply(f"cvt.rn.relu.{type_}.f32", np.uint16, a)
    assert value(type_, relu)[:3].tolist() == [0.0, math.inf, 0.0]
    assert relu[3] == 0x7FFF
    finite = apply(f"cvt.rn.satfinite.{type_}.f32", np.uint16, a)
    assert value(type_, finite)[:3].tolist() == [-1.0, largest, -largest]
    assert finite[3] == 0x7FFF
    both = apply(f"cvt.rz.relu.satfinite.{type_}x2.f32", np.uint32, a, a).view(np.uint16)
    assert value(type_, both)[:5].tolist() == [0.0, 0.0, largest, largest, 0.0]


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_pairs_of_small_codes_come_back_from_their_numbers(name):
    """Every code beside another; `numerics.test_small_formats` has the rounding."""
    values = narrow.values_of(name)
    low = np.arange(len(values), dtype=np.uint16).repeat(2)
    high = low[::-1].copy()
    codes = high << (4 if name == "e2m1" else 8) | low
    for at in range(0, len(codes), 32):
        some = slice(at, at + 32)
        a, b = values[high[some]], values[low[some]]
        body, back = f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;", f"cvt.rn.f16x2.{name}x2 %d, %a;"
        if name == "e2m1":
            body = ".reg .b8 %c; cvt.rn.satfinite.e2m1x2.f32 %c, %a, %b; cvt.u16.u8 %d, %c;"
            back = ".reg .b8 %c; cvt.u8.u16 %c, %a; cvt.rn.f16x2.e2m1x2 %d, %c;"
        assert run(body, {"d": np.uint16}, a=a, b=b).tolist() == codes[some].tolist()
        found = run(back, {"d": np.uint32}, a=codes[some]).view(np.float16)
        assert same(found, np.stack([b, a], axis=1).ravel().astype(np.float16)).all()
        positive = run(body.replace("satfinite", "satfinite.relu"), {"d": np.uint16}, a=a, b=b)
        kept = [code if code < len(values) // 2 else 0 for code in low[some].tolist()]
        assert (positive & (len(values) - 1)).tolist() == kept
        if name != "e2m1":
            pair = bf16.narrow(np.stack([b, a], axis=1).ravel()).view(np.uint32)
            body = f"cvt.rn.satfinite.{name}x2.bf16x2 %d, %a;"
            assert run(body, {"d": np.uint16}, a=pair).tolist() == codes[some].tolist()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_pairs_of_bf16_become_eight_bit_floats(name):
    wide = np.array([1.5, -2.0, 300.0, 0.01, 1e9, -0.0, 0.4, 7.0] * 8, np.float32)
    pair = bf16.narrow(wide).view(np.uint32)
    found = apply(f"cvt.rn.satfinite.{name}x2.bf16x2", np.uint16, pair)
    exact = bf16.widen(pair.view(np.uint16))
    expected = apply(f"cvt.rn.satfinite.{name}x2.f32", np.uint16, exact[1::2], exact[::2])
    assert (found == expected).all()


def test_scale_factors_of_powers_of_two():
    a = np.array([1.5, 2.0**-127, 3e38, np.nan] * 8, np.float32)
    b = np.ones(32, np.float32)
    assert apply("cvt.rz.ue8m0x2.f32", np.uint16, a, b)[:4].tolist() == [
        127 << 8 | 127,
        127,
        254 << 8 | 127,
        255 << 8 | 127,
    ]
    assert apply("cvt.rp.satfinite.ue8m0x2.f32", np.uint16, a, b)[0] == 128 << 8 | 127
    pairs = bf16.narrow(np.stack([b, a], axis=1).ravel()).view(np.uint32)
    assert apply("cvt.rp.ue8m0x2.bf16x2", np.uint16, pairs)[0] == 128 << 8 | 127
    codes = np.array([130 << 8 | 126] * 32, np.uint16)
    found = apply("cvt.rn.bf16x2.ue8m0x2", np.uint32, codes).view(np.uint16)
    assert bf16.widen(found)[:2].tolist() == [0.5, 8.0]


# cvt with stochastic rounding, and of narrow types to bf16 with scales.

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
