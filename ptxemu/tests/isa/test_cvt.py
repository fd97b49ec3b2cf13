"""cvt: what no recording of an H200 in `tests.silicon` has."""

import math

import numpy as np
import pytest
from tests.isa.pure_run import apply, run
from tests.isa.test_half_ops import value
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import same

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics import bf16, narrow

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
