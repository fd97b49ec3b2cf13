"""f16 and bf16 arithmetic, scalar and packed, and mixed precision."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode
from tests.isa.test_float_ops import extreme
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import BF16, F16, F32, f32_lanes, same

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics import bf16

few = settings(max_examples=8, deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GRIDS = {"f16": F16, "bf16": BF16}
SPECIAL = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]
SPECIAL += [0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x3C01]
half_bits = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))


def halves(size=32):
    return st.lists(half_bits, min_size=size, max_size=size).map(
        lambda bits: np.array(bits, np.uint16)
    )


def value(type_, codes):
    """Codes as float64."""
    if type_ == "f16":
        return codes.view(np.float16).astype(np.float64)
    return bf16.widen(codes).astype(np.float64)


def check(type_, found, expected):
    assert same(value(type_, found), np.array(expected, np.float64)).all()


def rows(type_, *operands):
    return list(zip(*(value(type_, operand).tolist() for operand in operands), strict=True))


REFERENCE = {
    "add": lambda grid, a, b: reference.fma(grid, a, 1.0, b, "rn"),
    "sub": lambda grid, a, b: reference.fma(grid, a, 1.0, -b, "rn"),
    "mul": lambda grid, a, b: reference.fma(
        grid, a, b, math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b)), "rn"
    ),
}


@pytest.mark.parametrize("type_", GRIDS)
@given(data=st.data())
@few
def test_arithmetic_rounds_once(type_, data):
    a, b, c = (data.draw(halves(64)) for _ in range(3))
    packed = [x.view(np.uint32) for x in (a, b, c)]
    grid = GRIDS[type_]
    for name, operation in REFERENCE.items():
        expected = [operation(grid, *row) for row in rows(type_, a, b)]
        check(type_, apply(f"{name}.{type_}", np.uint16, a, b), expected)
        check(
            type_, apply(f"{name}.rn.{type_}x2", np.uint32, *packed[:2]).view(np.uint16), expected
        )
    expected = [reference.fma(grid, *row, "rn") for row in rows(type_, a, b, c)]
    check(type_, apply(f"fma.rn.{type_}", np.uint16, a, b, c), expected)
    check(type_, apply(f"fma.rn.{type_}x2", np.uint32, *packed).view(np.uint16), expected)


@given(data=st.data())
@few
def test_bf16_fma_also_rounds_towards_zero(data):
    a, b, c = (data.draw(halves()) for _ in range(3))
    expected = [reference.fma(BF16, *row, "rz") for row in rows("bf16", a, b, c)]
    check("bf16", apply("fma.rz.bf16", np.uint16, a, b, c), expected)


@pytest.mark.parametrize("type_", GRIDS)
@given(data=st.data())
@few
def test_fma_with_relu_is_not_negative_and_with_oob_ignores_outside_operands(type_, data):
    a, b, c = (data.draw(halves()) for _ in range(3))
    fused = [reference.fma(GRIDS[type_], *row, "rn") for row in rows(type_, a, b, c)]
    positive = [x if x != x or x > 0 else 0.0 for x in fused]
    check(type_, apply(f"fma.rn.relu.{type_}", np.uint16, a, b, c), positive)
    outside = ((a == 0xFFFF) | (b == 0xFFFF) | (c == 0xFFFF)).tolist()
    expected = [0.0 if out else x for out, x in zip(outside, fused, strict=True)]
    check(type_, apply(f"fma.rn.oob.{type_}", np.uint16, a, b, c), expected)


@given(data=st.data())
@few
def test_f16_flushes_and_saturates_on_demand(data):
    a, b = data.draw(halves()), data.draw(halves())
    flush = lambda x: math.copysign(0.0, x) if 0 < abs(x) < 2.0**-14 else x
    clamp = lambda x: min(x, 1.0) if x > 0 else 0.0
    expected = [flush(REFERENCE["mul"](F16, flush(x), flush(y))) for x, y in rows("f16", a, b)]
    check("f16", apply("mul.ftz.f16", np.uint16, a, b), expected)
    expected = [clamp(REFERENCE["add"](F16, *row)) for row in rows("f16", a, b)]
    check("f16", apply("add.sat.f16", np.uint16, a, b), expected)


@pytest.mark.parametrize("type_", GRIDS)
@given(data=st.data())
@few
def test_min_max_and_signs(type_, data):
    a, b = data.draw(halves(64)), data.draw(halves(64))
    packed = [x.view(np.uint32) for x in (a, b)]
    for name in ("min", "max"):
        expected = [extreme(name, *row) for row in rows(type_, a, b)]
        check(type_, apply(f"{name}.{type_}", np.uint16, a, b), expected)
        check(type_, apply(f"{name}.{type_}x2", np.uint32, *packed).view(np.uint16), expected)
        nan = [math.nan if x != x or y != y else extreme(name, x, y) for x, y in rows(type_, a, b)]
        found = apply(f"{name}.NaN.{type_}", np.uint16, a, b)
        check(type_, found, nan)
        assert (found[np.isnan(nan)] == 0x7FFF).all()
        signs = [math.copysign(1, x) * math.copysign(1, y) for x, y in rows(type_, a, b)]
        magnitudes = [extreme(name, abs(x), abs(y)) for x, y in rows(type_, a, b)]
        expected = [math.copysign(m, s) for m, s in zip(magnitudes, signs, strict=True)]
        check(type_, apply(f"{name}.xorsign.abs.{type_}", np.uint16, a, b), expected)
    nan = np.isnan(value(type_, a))
    for name, bits in (("neg", a ^ 0x8000), ("abs", a & 0x7FFF)):
        expected = np.where(nan, 0x7FFF, bits)
        assert (apply(f"{name}.{type_}", np.uint16, a) == expected).all()
        found = apply(f"{name}.{type_}x2", np.uint32, packed[0])
        assert (found.view(np.uint16) == expected).all()


@pytest.mark.parametrize("type_", [*GRIDS, "f16x2", "bf16x2"])
def test_every_nan_result_is_the_canonical_one(type_):
    codes = np.array([0x7FC1, 0xFFC2, 0x7F81, 0xFFFE] * 16, np.uint16)
    if type_.startswith("f16"):
        codes = np.array([0x7E00, 0xFE12, 0x7C01, 0xFC01] * 16, np.uint16)
    a = codes.view(np.uint32) if type_.endswith("x2") else codes
    codes_of = lambda opcode, *operands: set(
        apply(f"{opcode}.{type_}", a.dtype, *operands).view(np.uint16).tolist()
    )
    for opcode in ("add", "sub", "mul", "min", "max"):
        assert codes_of(opcode, a, a) == {0x7FFF}
    assert codes_of("fma.rn", a, a, a) == {0x7FFF}


@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_half_approximations_are_rounded_values(name):
    function = np.exp2 if name == "ex2" else np.tanh
    a = np.arange(0, 1 << 16, 7, dtype=np.uint16)[:4096]
    with np.errstate(all="ignore"):
        expected = function(a.view(np.float16).astype(np.float64)).astype(np.float16)
    found = apply(f"{name}.approx.f16", np.uint16, a).view(np.float16)
    assert same(found, expected).all()
    packed = apply(f"{name}.approx.f16x2", np.uint32, a.view(np.uint32))
    assert same(packed.view(np.float16), expected).all()
    flush = ".ftz" if name == "ex2" else ""
    with np.errstate(all="ignore"):
        wide = function(value("bf16", a))
    if name == "ex2":
        wide = np.where(wide < 2.0**-126, 0.0, wide)
    found = value("bf16", apply(f"{name}.approx{flush}.bf16", np.uint16, a))
    both = np.isfinite(wide) & (np.abs(wide) < 3e38)
    assert (np.abs(found - wide)[both] <= np.abs(wide[both]) * 2.0**-8).all()
    assert (np.isnan(found) == np.isnan(wide)).all()


@pytest.mark.parametrize("type_", GRIDS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@given(data=st.data())
@few
def test_mixed_precision_widens_exactly_and_rounds_once(type_, mode, data):
    a, b, c = data.draw(halves()), data.draw(halves()), data.draw(f32_lanes())
    wide_a, wide_b = value(type_, a).tolist(), value(type_, b).tolist()
    sums = [reference.fma(F32, x, 1.0, y, mode) for x, y in zip(wide_a, c.tolist(), strict=True)]
    found = apply(f"add.{mode}.f32.{type_}", np.float32, a, c)
    assert same(found, np.array(sums, np.float32)).all()
    lanes = zip(wide_a, wide_b, c.tolist(), strict=True)
    fused = [reference.fma(F32, *lane, mode) for lane in lanes]
    found = apply(f"fma.{mode}.f32.{type_}", np.float32, a, b, c)
    assert same(found, np.array(fused, np.float32)).all()
    differences = [
        reference.fma(F32, x, 1.0, -y, mode) for x, y in zip(wide_a, c.tolist(), strict=True)
    ]
    found = apply(f"sub.{mode}.f32.{type_}", np.float32, a, c)
    assert same(found, np.array(differences, np.float32)).all()
    clamped = [min(x, 1.0) if x > 0 else 0.0 for x in sums]
    found = apply(f"add.{mode}.sat.f32.{type_}", np.float32, a, c)
    assert same(found, np.array(clamped, np.float32)).all()


@pytest.mark.parametrize(
    "text",
    [
        "add.ftz.bf16 %h, %h, %h;",
        "add.rz.f16 %h, %h, %h;",
        "add.sat.bf16x2 %r, %r, %r;",
        "fma.f16 %h, %h, %h, %h;",
        "fma.rz.f16 %h, %h, %h, %h;",
        "add.f16x2 %h, %h, %h;",
        "ex2.approx.bf16 %h, %h;",
        "ex2.approx.ftz.f16 %h, %h;",
        "add.ftz.f32.f16 %r, %h, %r;",
        "mul.rn.f32.f16 %r, %h, %r;",
        "min.ftz.bf16 %h, %h, %h;",
        "max.abs.f16 %h, %h, %h;",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused_at_load(text):
    with pytest.raises(UnsupportedInstructionError):
        decode(text, ".reg .b16 %h; .reg .b32 %r;")
