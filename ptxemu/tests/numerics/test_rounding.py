"""float32 and float64 operations round once, in every mode."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import F32, F64, f32_lanes, f64_lanes, same

from ptxemu.numerics import exact, rounding

MODES = ["rn", "rz", "rm", "rp"]
few = settings(max_examples=15, deadline=None)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(found, expected):
    assert same(found, np.array(expected, found.dtype)).all()


def rows(*arrays):
    return zip(*(array.tolist() for array in arrays), strict=True)


def close_calls():
    """Products a little beside a tie of float32, and sums that float64 cannot hold."""
    rng = np.random.default_rng(1)
    a = rng.integers(2**22, 2**24, 400).astype(np.float32)
    b = rng.integers(1, 2**12, 400).astype(np.float32)
    product = a.astype(np.float64) * b
    near = product.astype(np.float32)
    half_ulp = (np.nextafter(near, np.float32(np.inf)) - near) / 2
    tie = (near + half_ulp.astype(np.float64)) - product
    addend = tie.astype(np.float32)
    tiny = np.float32(2.0) ** rng.integers(-149, -20, 400).astype(np.float32)
    ones = np.ones(400, np.float32)
    return [
        (a, b, addend),
        (near, ones, half_ulp),
        (tiny, tiny, near),
        ((near * 2).astype(np.float32) + 1, ones * np.float32(0.5), tiny),
        (ones * np.float32(1 + 2**-12), ones * np.float32(1 + 2**-12), tiny),
        (ones * np.float32(1 + 2**-12), ones * np.float32(1 + 2**-12), -tiny),
        (tiny, ones * np.float32(0.5), tiny),
        (ones * np.float32(2**-75), ones * np.float32(2**-75 * (1 + 2**-23)), tiny * 2),
    ]


@given(f32_lanes(), f32_lanes(), f32_lanes())
@few
def test_fma_of_any_bits_rounds_once_to_nearest(a, b, c):
    expected = [reference.fma(F32, *x, "rn") for x in rows(a, b, c)]
    check(rounding.fma_f32(a, b, c), expected)


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("mode", MODES)
def test_fma_beside_ties_rounds_once(case, mode):
    a, b, c = close_calls()[case]
    expected = [reference.fma(F32, *x, mode) for x in rows(a, b, c)]
    if mode == "rn":
        check(rounding.fma_f32(a, b, c), expected)
    check(rounding.fma_f32_in(a, b, c, mode), expected)


def test_some_of_the_close_calls_go_wrong_when_float64_rounds_first():
    wrong = 0
    for a, b, c in close_calls():
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
        wrong += int((~same(twice, rounding.fma_f32(a, b, c))).sum())
    assert wrong > 100


@pytest.mark.parametrize("mode", MODES)
@given(a=f32_lanes(), b=f32_lanes(), c=f32_lanes())
@few
def test_directed_f32_operations_round_once(mode, a, b, c):
    check(rounding.fma_f32_in(a, b, c, mode), [reference.fma(F32, *x, mode) for x in rows(a, b, c)])
    check(
        rounding.add_f32_in(a, b, mode), [reference.fma(F32, x, 1, y, mode) for x, y in rows(a, b)]
    )
    products = [reference.fma(F32, x, y, math.copysign(0.0, x * y), mode) for x, y in rows(a, b)]
    check(rounding.mul_f32_in(a, b, mode), products)
    check(
        rounding.div_f32_in(a, b, mode), [reference.divide(F32, x, y, mode) for x, y in rows(a, b)]
    )


def root(grid, value, mode):
    """The square root rounded once, from an integer square root with 60 bits to spare."""
    if not value > 0 or math.isinf(value):
        return math.nan if value < 0 else value
    fraction = Fraction(value) * 4**1200
    whole = math.isqrt(int(fraction))
    sticky = Fraction(1, 2) if whole * whole != fraction else 0
    return float(grid.round((whole + sticky) / Fraction(2) ** 1200, mode))


@pytest.mark.parametrize("mode", MODES)
@given(a=f32_lanes())
@few
def test_square_roots_of_f32_round_once(mode, a):
    check(rounding.sqrt_f32_in(a, mode), [root(F32, x, mode) for x in a.tolist()])


@pytest.mark.parametrize("mode", MODES)
@given(a=f64_lanes(8), b=f64_lanes(8), c=f64_lanes(8))
@settings(max_examples=8, deadline=None)
def test_f64_operations_round_once(mode, a, b, c):
    check(exact.fma_f64(a, b, c, mode), [reference.fma(F64, *x, mode) for x in rows(a, b, c)])
    check(exact.add_f64_in(a, b, mode), [reference.fma(F64, x, 1, y, mode) for x, y in rows(a, b)])
    products = [
        reference.fma(F64, x, y, math.copysign(0, math.copysign(1, x) * math.copysign(1, y)), mode)
        for x, y in rows(a, b)
    ]
    check(exact.mul_f64_in(a, b, mode), products)
    check(exact.div_f64_in(a, b, mode), [reference.divide(F64, x, y, mode) for x, y in rows(a, b)])
    check(exact.sqrt_f64_in(a, mode), [root(F64, x, mode) for x in a.tolist()])


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_long_integers_keep_what_rounding_needs(dtype):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**64, 300, np.uint64) >> rng.integers(0, 64, 300).astype(np.uint64)
    ties = (np.uint64(1) << np.arange(24, 64, dtype=np.uint64)) | np.uint64(1)
    values = np.concatenate([values, ties, ties - np.uint64(1)]).view(dtype)
    odd = rounding.integer_to_odd_f64(values)
    for mode in MODES:
        expected = [reference.rounded_float(F32, Fraction(x), mode) for x in values.tolist()]
        check(rounding.narrow_f32(odd, mode), expected)


def test_flushing_keeps_signs_and_everything_that_is_not_subnormal():
    values = np.array(reference.SPECIAL_F32, np.uint32).view(np.float32)
    flushed = rounding.flush_f32(values)
    subnormal = (np.abs(values) < 2.0**-126) & (values != 0)
    assert subnormal.any()
    assert (flushed[subnormal] == 0).all()
    assert (np.signbit(flushed) == np.signbit(values)).all()
    assert same(flushed[~subnormal], values[~subnormal]).all()


def test_saturation_clamps_to_the_unit_interval_and_nan_to_plus_zero():
    values = np.array([-1, -0.0, 0.25, 1, 2, np.inf, -np.inf, np.nan], np.float32)
    expected = np.array([0, 0, 0.25, 1, 1, 1, 0, 0], np.float32)
    assert (rounding.saturate(values).view(np.uint32) == expected.view(np.uint32)).all()
