"""f16 and bf16 arithmetic, scalar and packed, and mixed precision."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode
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
