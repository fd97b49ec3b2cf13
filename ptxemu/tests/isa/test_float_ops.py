"""f32, f32x2 and f64 instructions: rounding, .ftz, .sat, special values, approximations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode, run
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import F32, F64, f32_lanes, f64_lanes, same

from ptxemu.errors import UnsupportedInstructionError

few = settings(max_examples=8, deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODES = ["rn", "rz", "rm", "rp"]
BINARY = {
    "add": lambda grid, a, b, mode: reference.fma(grid, a, 1.0, b, mode),
    "sub": lambda grid, a, b, mode: reference.fma(grid, a, 1.0, -b, mode),
    "mul": lambda grid, a, b, mode: reference.fma(grid, a, b, negative_zero_like(a, b), mode),
    "div": reference.divide,
}


def negative_zero_like(a, b):
    """The zero that changes no product's sign."""
    return math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))


def check(found, expected):
    assert same(found, np.array(expected, found.dtype)).all()


def rows(*operands):
    return zip(*(operand.tolist() for operand in operands), strict=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*BINARY, "fma"])
@given(data=st.data())
@few
def test_f32_arithmetic_rounds_once(name, mode, data):
    a, b, c = (data.draw(f32_lanes()) for _ in range(3))
    if name == "fma":
        expected = [reference.fma(F32, *row, mode) for row in rows(a, b, c)]
        check(apply(f"fma.{mode}.f32", np.float32, a, b, c), expected)
        check(apply(f"mad.{mode}.f32", np.float32, a, b, c), expected)
    else:
        expected = [BINARY[name](F32, *row, mode) for row in rows(a, b)]
        check(apply(f"{name}.{mode}.f32", np.float32, a, b), expected)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_f64_arithmetic_rounds_once(mode, data):
    a, b, c = (data.draw(f64_lanes()) for _ in range(3))
    expected = [reference.fma(F64, *row, mode) for row in rows(a, b, c)]
    check(apply(f"fma.{mode}.f64", np.float64, a, b, c), expected)
    for name, operation in BINARY.items():
        expected = [operation(F64, *row, mode) for row in rows(a, b)]
        check(apply(f"{name}.{mode}.f64", np.float64, a, b), expected)
    reciprocals = [reference.divide(F64, 1.0, x, mode) for x in a.tolist()]
    check(apply(f"rcp.{mode}.f64", np.float64, a), reciprocals)


def test_without_a_mode_sums_and_products_round_to_nearest():
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    for name in ("add", "sub", "mul"):
        plain = apply(f"{name}.f32", np.float32, a, b)
        assert same(plain, apply(f"{name}.rn.f32", np.float32, a, b)).all()


@given(data=st.data())
@few
def test_pairs_of_f32_are_two_operations(data):
    a, b, c = (data.draw(f32_lanes(64)) for _ in range(3))
    packed = [x.view(np.uint64) for x in (a, b, c)]
    for mode in ("rn", "rz"):
        found = apply(f"fma.{mode}.f32x2", np.uint64, *packed).view(np.float32)
        check(found, [reference.fma(F32, *row, mode) for row in rows(a, b, c)])
        for name in ("add", "sub", "mul"):
            found = apply(f"{name}.{mode}.f32x2", np.uint64, *packed[:2]).view(np.float32)
            check(found, [BINARY[name](F32, *row, mode) for row in rows(a, b)])
    found = apply("mul.ftz.f32x2", np.uint64, *packed[:2]).view(np.float32)
    assert same(found, apply("mul.ftz.f32", np.float32, a, b)).all()


@given(data=st.data())
@few
def test_ftz_flushes_operands_and_results(data):
    a, b, c = (data.draw(f32_lanes()) for _ in range(3))
    flush = lambda x: math.copysign(0.0, x) if 0 < abs(x) < 2.0**-126 else x
    for name, operation in BINARY.items():
        expected = [flush(operation(F32, flush(x), flush(y), "rn")) for x, y in rows(a, b)]
        rounding = ".rn" if name == "div" else ""
        check(apply(f"{name}{rounding}.ftz.f32", np.float32, a, b), expected)
    expected = [flush(reference.fma(F32, *map(flush, row), "rn")) for row in rows(a, b, c)]
    check(apply("fma.rn.ftz.f32", np.float32, a, b, c), expected)
    check(apply("abs.ftz.f32", np.float32, a), [abs(flush(x)) for x in a.tolist()])
    check(apply("neg.ftz.f32", np.float32, a), [-flush(x) for x in a.tolist()])


@given(data=st.data())
@few
def test_sat_clamps_to_the_unit_interval(data):
    a, b, c = (data.draw(f32_lanes()) for _ in range(3))
    clamp = lambda x: min(x, 1.0) if x > 0 else 0.0
    expected = [clamp(reference.fma(F32, *row, "rz")) for row in rows(a, b, c)]
    check(apply("fma.rz.sat.f32", np.float32, a, b, c), expected)
    expected = [clamp(BINARY["add"](F32, *row, "rn")) for row in rows(a, b)]
    check(apply("add.sat.f32", np.float32, a, b), expected)


NANS = np.array([0x7FC00000, 0xFFC12345, 0x7F812345, 0xFF800001], np.uint32).view(np.float32)


def test_packed_f32_give_the_canonical_nan():
    pairs = np.stack([NANS, np.ones(4, np.float32)], axis=1).ravel().view(np.uint64)
    found = apply("mul.f32x2", np.uint64, pairs, pairs).view(np.uint32)
    assert found.tolist() == [0x7FFFFFFF, 0x3F800000] * 4


def test_moves_selections_and_inactive_lanes_keep_a_nans_payload():
    raw = np.resize(NANS, 32)
    selected = np.arange(32) % 2 == 0
    body = "mov.f32 %d, %a; selp.f32 %e, %a, %a, %p; @%p add.f32 %a, %b, %b;"
    found = run(
        body,
        {"d": np.uint32, "e": np.uint32, "a": np.uint32},
        a=raw,
        b=np.sqrt(-raw * 0 - 1),
        p=selected,
    )
    assert (found[0] == raw.view(np.uint32)).all()
    assert (found[1] == raw.view(np.uint32)).all()
    assert (found[2] == np.where(selected, 0x7FFFFFFF, raw.view(np.uint32))).all()


def extreme(name, a, b):
    """min or max of Python floats: a number wins over NaN, and -0 is below +0."""
    if a != a or b != b:
        return b if a != a else a
    low, high = (a, b) if (a, math.copysign(1, a)) <= (b, math.copysign(1, b)) else (b, a)
    return low if name == "min" else high


@pytest.mark.parametrize("name", ["min", "max"])
@given(data=st.data())
@few
def test_min_and_max(name, data):
    a, b, c = (data.draw(f32_lanes()) for _ in range(3))
    zeros = np.resize(np.array([0.0, -0.0, -0.0, 0.0], np.float32), 32)
    for x, y in ((a, b), (zeros, zeros[::-1].copy())):
        check(apply(f"{name}.f32", np.float32, x, y), [extreme(name, *row) for row in rows(x, y)])
    three = [extreme(name, extreme(name, x, y), z) for x, y, z in rows(a, b, c)]
    check(apply(f"{name}.f32", np.float32, a, b, c), three)
    nan = [math.nan if x != x or y != y else extreme(name, x, y) for x, y in rows(a, b)]
    found = apply(f"{name}.NaN.f32", np.float32, a, b)
    check(found, nan)
    assert (found[found != found].view(np.uint32) == 0x7FFFFFFF).all()
    signs = [math.copysign(1, x) * math.copysign(1, y) for x, y in rows(a, b)]
    magnitudes = [extreme(name, abs(x), abs(y)) for x, y in rows(a, b)]
    expected = [math.copysign(m, s) for m, s in zip(magnitudes, signs, strict=True)]
    check(apply(f"{name}.xorsign.abs.f32", np.float32, a, b), expected)
    three = [extreme(name, extreme(name, abs(x), abs(y)), abs(z)) for x, y, z in rows(a, b, c)]
    check(apply(f"{name}.abs.f32", np.float32, a, b, c), three)
    wide_a, wide_b = data.draw(f64_lanes()), data.draw(f64_lanes())
    expected = [extreme(name, *row) for row in rows(wide_a, wide_b)]
    check(apply(f"{name}.f64", np.float64, wide_a, wide_b), expected)


INF, NAN = math.inf, math.nan


def test_approximations_of_f64_use_and_give_the_upper_half():
    a = np.array([3.0, -0.0, INF, 1e-310, 7.0000001], np.float64)
    found = apply("rcp.approx.ftz.f64", np.float64, a)
    assert (found.view(np.uint64) & np.uint64(0xFFFFFFFF) == 0).all()
    check(found[1:4], [-INF, 0.0, INF])
    assert np.abs(found[[0, 4]] * a[[0, 4]] - 1).max() < 2.0**-20
    assert apply("rsqrt.approx.ftz.f64", np.float64, np.array([4.0])).tolist() == [0.5]
    assert apply("rsqrt.approx.f64", np.float64, np.array([4.0])).tolist() == [0.5]


@pytest.mark.parametrize(
    "text",
    [
        "fma.f32 %a, %a, %a, %a;",
        "div.f32 %a, %a, %a;",
        "add.rna.f32 %a, %a, %a;",
        "add.ftz.f64 %e, %e, %e;",
        "add.sat.f32x2 %d, %d, %d;",
        "max.NaN.f64 %e, %e, %e;",
        "max.abs.f32 %a, %a, %a;",
        "max.xorsign.f32 %a, %a, %a;",
        "max.xorsign.abs.f32 %a, %a, %a, %a;",
        "ex2.f32 %a, %a;",
        "ex2.approx.f64 %e, %e;",
        "tanh.approx.ftz.f32 %a, %a;",
        "sqrt.rn.f32x2 %d, %d;",
        "rcp.approx.f64 %e, %e;",
        "add.f32 %a, %a, 1;",
        "add.f32 %a, %a, %e;",
        "mul.wide.f32 %e, %a, %a;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    with pytest.raises(UnsupportedInstructionError):
        decode(text, ".reg .f32 %a; .reg .f64 %e; .reg .b64 %d;")
