"""cvt: what no recording of an H200 in `tests.silicon` has, and forms that are not there."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.isa.pure_run import apply, decode, run
from tests.isa.test_half_ops import halves, value
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import f32_lanes, f64_lanes, same

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics import bf16, narrow

few = settings(max_examples=5, deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTEGERS = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
FLOATS = ["f16", "bf16", "f32", "f64"]
GRIDS = {
    "f16": reference.F16,
    "bf16": reference.BF16,
    "f32": reference.F32,
    "f64": reference.F64,
}
ROUNDINGS = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def limits(type_):
    bits = int(type_[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def dtype(type_):
    return np.dtype(f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}")


def integers(type_):
    low, high = limits(type_)
    special = [low, low + 1, high, high - 1, 0, 1, high // 2, high // 2 + 1, 3]
    special += [-1, -2, -3] if low else []
    return st.one_of(st.sampled_from(special), st.integers(low, high))


def register(type_):
    """NumPy type of the register that holds a value of the type: 16 bits at least."""
    if type_[1:] == "8":
        return np.dtype(type_[0].replace("s", "i") + "2")
    return dtype(type_)


def integer_lanes(type_):
    return st.lists(integers(type_), min_size=32, max_size=32).map(
        lambda values: np.array(values, register(type_))
    )


def float_lanes(type_):
    return {"f32": f32_lanes(), "f64": f64_lanes()}.get(type_, halves())


def numbers(type_, lanes):
    """Lanes of a float type as Python floats."""
    return (value(type_, lanes) if type_ in ("f16", "bf16") else lanes).tolist()


def float_dtype(type_):
    return {"f32": np.float32, "f64": np.float64}.get(type_, np.uint16)


def to_integer(x, rounding, result, source):
    if x != x:
        is_long = source == "f64" or result in ("u64", "s64")
        low, _ = limits(result)
        return (low or 1 << (int(result[1:]) - 1)) if is_long else 0
    low, high = limits(result)
    if math.isinf(x):
        return high if x > 0 else low
    return min(max(ROUNDINGS[rounding](Fraction(x)), low), high)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(data=st.data())
@few
def test_floats_are_rounded_to_integers_and_clamped(source, rounding, data):
    a = data.draw(float_lanes(source))
    near = np.array([0.5, 1.5, -0.5, -2.5, 254.5, 65535.9, -129.0, 2.0**31, -(2.0**63)] * 4)[:32]
    if source in ("f32", "f64"):
        a = np.where(np.arange(32) % 3 == 0, near.astype(a.dtype), a)
    for result in [t for t in INTEGERS if not (source == "bf16" and t[1:] == "8")]:
        found = apply(f"cvt.{rounding}.{result}.{source}", register(result), a).tolist()
        assert found == [to_integer(x, rounding, result, source) for x in numbers(source, a)], (
            result
        )


@pytest.mark.parametrize("result", FLOATS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@given(data=st.data())
@few
def test_integers_are_rounded_once_to_floats(result, mode, data):
    for source in [t for t in INTEGERS if not (result == "bf16" and t[1:] == "8")]:
        a = data.draw(integer_lanes(source))
        found = apply(f"cvt.{mode}.{result}.{source}", float_dtype(result), a)
        expected = [reference.rounded_float(GRIDS[result], Fraction(x), mode) for x in a.tolist()]
        assert numbers(result, found) == expected, source


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@given(data=st.data())
@few
def test_floats_are_rounded_once_to_smaller_ones(source, mode, data):
    smaller = {
        "f64": ["f32", "f16", "bf16"],
        "f32": ["f16", "bf16"],
        "f16": ["bf16"],
        "bf16": ["f16"],
    }
    a = data.draw(float_lanes(source))
    for result in smaller[source]:
        found = apply(f"cvt.{mode}.{result}.{source}", float_dtype(result), a)
        expected = [
            reference.rounded_float(GRIDS[result], Fraction(x), mode, x) if math.isfinite(x) else x
            for x in numbers(source, a)
        ]
        found = np.array(numbers(result, found), np.float64)
        assert same(found, np.array(expected, np.float64)).all(), result


def test_between_the_16_bit_types_the_rounding_mode_may_be_missing():
    for source, result in (("f16", "bf16"), ("bf16", "f16")):
        lanes = np.arange(0x3C00, 0x4400, 64, dtype=np.uint16)
        rounded = apply(f"cvt.rn.{result}.{source}", float_dtype(result), lanes)
        np.testing.assert_array_equal(
            apply(f"cvt.{result}.{source}", float_dtype(result), lanes), rounded
        )
    with pytest.raises(UnsupportedInstructionError, match="rounding mode"):
        apply("cvt.bf16.f32", float_dtype("bf16"), np.zeros(32, np.float32))


def test_sat_clamps_floats_to_the_unit_interval():
    a = np.array([-1.0, 0.5, 2.0, np.nan] * 8, np.float32)
    assert apply("cvt.sat.f32.f32", np.float32, a).tolist()[:4] == [0.0, 0.5, 1.0, 0.0]
    found = apply("cvt.rn.sat.f16.f32", np.uint16, a).view(np.float16)
    assert found.tolist()[:4] == [0.0, 0.5, 1.0, 0.0]
    ints = np.array([-5, 0, 1, 9] * 8, np.int32)
    assert apply("cvt.rn.sat.f32.s32", np.float32, ints).tolist()[:4] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_relu_and_satfinite_of_halves(type_):
    a = np.array([-1.0, 1e39, -np.inf, np.nan] * 8, np.float32)
    largest = float(GRIDS[type_].largest)
    relu = apply(f"cvt.rn.relu.{type_}.f32", np.uint16, a)
    assert numbers(type_, relu)[:3] == [0.0, math.inf, 0.0]
    assert relu[3] == 0x7FFF
    finite = apply(f"cvt.rn.satfinite.{type_}.f32", np.uint16, a)
    assert numbers(type_, finite)[:3] == [-1.0, largest, -largest]
    assert finite[3] == 0x7FFF
    both = apply(f"cvt.rz.relu.satfinite.{type_}x2.f32", np.uint32, a, a).view(np.uint16)
    assert numbers(type_, both)[:5] == [0.0, 0.0, largest, largest, 0.0]


TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}


def small_codes(name, values, relu=False):
    """The codes that a conversion must give, by brute force over all codes of the format."""
    table = narrow.values_of(name)
    half = len(table) // 2
    positive = table[:half][np.isfinite(table[:half])].astype(np.float64)
    codes = []
    for x in values.astype(np.float64).tolist():
        if x != x:
            codes.append(0x7F if name in TORCH else half - 1)
            continue
        magnitude = min(abs(x), LARGEST[name])
        distance = np.abs(positive - magnitude)
        nearest = np.nonzero(distance == distance.min())[0]
        code = int(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0])
        negative = math.copysign(1, x) < 0
        codes.append(0 if relu and negative else code + half * negative)
    return codes


@pytest.mark.parametrize("name", LARGEST)
@given(data=st.data())
@few
def test_two_floats_become_two_small_codes(name, data):
    scale = st.integers(-16, 16).map(lambda e: 2.0**e)
    near = st.builds(lambda m, s: np.float32(m / 8 * s), st.integers(-40, 40), scale)
    some = st.one_of(near, st.floats(width=32))
    a, b = (
        np.array(data.draw(st.lists(some, min_size=32, max_size=32)), np.float32) for _ in range(2)
    )
    for relu in (False, True):
        modifiers = "rn.satfinite" + (".relu" if relu else "")
        body = f"cvt.{modifiers}.{name}x2.f32 %d, %a, %b;"
        if name == "e2m1":
            body = f".reg .b8 %c; cvt.{modifiers}.e2m1x2.f32 %c, %a, %b; cvt.u16.u8 %d, %c;"
        found = run(body, {"d": np.uint16}, a=a, b=b)
        width = 4 if name == "e2m1" else 8
        high, low = small_codes(name, a, relu), small_codes(name, b, relu)
        assert found.tolist() == [h << width | l for h, l in zip(high, low, strict=True)]
    if name in TORCH:
        pair = np.stack([b, a], axis=1).astype(np.float16)
        found = apply(f"cvt.rn.satfinite.{name}x2.f16x2", np.uint16, pair.view(np.uint32)[:, 0])
        assert found.view(np.uint8).tolist() == small_codes(name, pair.ravel())
    pair = bf16.narrow(np.stack([b, a], axis=1).ravel())
    body = f"cvt.rn.satfinite.{name}x2.bf16x2 %d, %a;"
    if name != "e2m1":
        found = run(body, {"d": np.uint16}, a=pair.view(np.uint32))
        assert found.view(np.uint8).tolist() == small_codes(name, bf16.widen(pair))


@pytest.mark.parametrize("name", LARGEST)
def test_two_small_codes_become_two_f16(name):
    bits = 4 if name == "e2m1" else 8
    codes = np.arange(1 << (2 * bits), dtype=np.uint16)[:: 1 if bits == 4 else 37]
    body = f"cvt.rn.f16x2.{name}x2 %d, %a;"
    if name == "e2m1":
        body = ".reg .b8 %c; cvt.u8.u16 %c, %a; cvt.rn.f16x2.e2m1x2 %d, %c;"
    mask = len(narrow.values_of(name)) - 1
    for at in range(0, len(codes) - 31, 32):
        lanes = codes[at : at + 32]
        found = run(body, {"d": np.uint32}, a=lanes).view(np.float16)
        low = narrow.values_of(name)[lanes & mask].astype(np.float16)
        high = narrow.values_of(name)[(lanes >> bits) & mask].astype(np.float16)
        assert same(found[0::2], low).all()
        assert same(found[1::2], high).all()


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


@pytest.mark.parametrize(
    "text",
    [
        "cvt.rs.e4m3x4.f32 %d, {%f, %f, %f, %f}, %d;",
        "cvt.rn.e4m3x2.f32 %h, %f, %f;",
        "cvt.rz.satfinite.e4m3x2.f32 %h, %f, %f;",
        "cvt.f16.f32 %h, %f;",
        "cvt.s32.f32 %d, %f;",
        "cvt.f32.s32 %f, %d;",
        "cvt.rn.f64.f32 %q, %f;",
        "cvt.rni.f16.f32 %h, %f;",
        "cvt.rn.u32.u16 %d, %h;",
        "cvt.sat.u32.u16 %d, %h;",
        "cvt.rn.ue8m0x2.f32 %h, %f, %f;",
        "cvt.rn.tf32.f16 %d, %h;",
        "cvt.rn.relu.satfinite.ftz.f16.f32 %h, %f;",
        "cvt.rn.bf16.f32 %d, %f;",
        "cvt.u32.u64 %d, %d;",
        "cvt.pack.u8.s32.b32 %d, %d, %d, %d;",
    ],
)
def test_forms_that_are_not_there_are_refused_at_load(text):
    with pytest.raises(UnsupportedInstructionError):
        decode(text, ".reg .b16 %h; .reg .b32 %d; .reg .b64 %q; .reg .f32 %f;")
