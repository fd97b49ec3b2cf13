"""f16, bf16, tf32 and the 4, 6 and 8 bit formats: values of codes, and rounding to codes."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import Grid, f32_lanes, same

from ptxemu.numerics import bf16, f16, narrow, tf32
from ptxemu.numerics.minifloat import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
few = settings(max_examples=20, deadline=None)

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TINY = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e2m3": [x / 8 for x in range(16)]
    + [x / 4 for x in range(8, 16)]
    + [x / 2 for x in range(8, 16)],
    "e3m2": [x / 16 for x in range(4)] + [x * 2.0**e / 16 for e in range(7) for x in range(4, 8)],
}
GRIDS = {
    "e4m3": Grid(4, -6, 448),
    "e5m2": Grid(3, -14, 57344),
    "e2m1": Grid(2, 0, 6),
    "e2m3": Grid(4, 0, Fraction(15, 2)),
    "e3m2": Grid(3, -2, 28),
}


def every_f32_of_interest():
    """float32 with any upper half, each with a lower half that is zero, a tie, or beside one."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).ravel().view(np.float32)


def as_torch(values):
    return torch.from_numpy(np.ascontiguousarray(values))


@pytest.mark.parametrize("name", TORCH)
def test_every_fp8_code_has_torchs_value(name):
    expected = torch.arange(256, dtype=torch.uint8).view(TORCH[name]).float().numpy()
    assert same(narrow.values_of(name), expected).all()


@pytest.mark.parametrize("name", TINY)
def test_every_code_of_4_and_6_bits_has_its_value(name):
    positive = np.array(TINY[name], np.float32)
    assert same(narrow.values_of(name), np.concatenate([positive, -positive])).all()


def test_ue8m0_codes_are_powers_of_two():
    expected = [2.0 ** (code - 127) for code in range(255)]
    assert narrow.values_of("ue8m0")[:255].tolist() == expected
    assert np.isnan(narrow.values_of("ue8m0")[255])


@pytest.mark.parametrize("name", TORCH)
def test_f32_to_fp8_rounds_as_torch_does_where_nothing_overflows(name):
    values = every_f32_of_interest()
    largest = 464 if name == "e4m3" else 57344
    values = values[np.abs(values) <= largest]
    found = narrow.codes_of_bf16(name, "rn", True, False)[narrow.odd_bf16(values)]
    assert (found == as_torch(values).to(TORCH[name]).view(torch.uint8).numpy()).all()


@pytest.mark.parametrize("name", [*TORCH, *TINY])
def test_every_code_comes_back_from_its_value(name):
    values = narrow.values_of(name)
    codes = np.arange(len(values))
    finite = np.isfinite(values)
    f32_codes = narrow.codes_of_bf16(name, "rn", True, False)[narrow.odd_bf16(values)]
    f16_codes = narrow.codes_of_f16(name, "rn", True, False)[
        values.astype(np.float16).view(np.uint16)
    ]
    assert (f32_codes[finite] == codes[finite]).all()
    assert (f16_codes[finite] == codes[finite]).all()


@pytest.mark.parametrize("name", [*TORCH, *TINY])
def test_satfinite_clamps_overflow_and_infinity(name):
    largest = float(GRIDS[name].largest)
    values = np.array([largest * 1.5, -largest * 8, np.inf, -np.inf, 3e38], np.float32)
    codes = narrow.codes_of_bf16(name, "rn", True, False)[narrow.odd_bf16(values)]
    assert narrow.values_of(name)[codes].tolist() == [largest, -largest, largest, -largest, largest]


@pytest.mark.parametrize("name", [*TORCH, *TINY])
def test_nan_becomes_the_canonical_nan_or_the_largest_number(name):
    values = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    codes = narrow.codes_of_bf16(name, "rn", True, False)[narrow.odd_bf16(values)]
    if name in TORCH:
        assert codes.tolist() == [0x7F] * 3
    else:
        assert narrow.values_of(name)[codes].tolist() == [float(GRIDS[name].largest)] * 3


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp", "rna"])
def test_encoding_agrees_with_rationals_in_every_mode(name, mode):
    rng = np.random.default_rng(4)
    exponents = rng.integers(-20, 17, 300).astype(np.float64)
    values = rng.integers(-64, 64, 300) * 2.0**exponents
    grid = GRIDS[name]
    form = FORMATS[name]
    expected = [float(grid.round(Fraction(x), mode)) for x in values.tolist()]
    finite = np.isfinite(expected)
    found = form.decode(form.encode(values, mode, satfinite=True))
    assert found[finite].tolist() == np.array(expected)[finite].tolist()
    assert np.abs(found[~finite]).tolist() == [float(grid.largest)] * int((~finite).sum())


@pytest.mark.parametrize(
    ("value", "rz", "rp"),
    [
        (1.0, 127, 127),
        (1.5, 127, 128),
        (-1.5, 127, 128),
        (2.0**-127, 0, 0),
        (2.0**-127 * 1.5, 0, 1),
        (2.0**-130, 0, 0),
        (0.0, 0, 0),
        (3.0e38, 254, 254),
        (np.inf, 254, 254),
        (np.nan, 255, 255),
    ],
)
def test_ue8m0_takes_the_exponent_of_the_magnitude(value, rz, rp):
    index = narrow.odd_bf16(np.full(2, value, np.float32))
    assert narrow.codes_of_bf16("ue8m0", "rz", True, False)[index].tolist() == [rz] * 2
    assert narrow.codes_of_bf16("ue8m0", "rp", True, False)[index].tolist() == [rp] * 2


def test_ue8m0_without_satfinite_keeps_infinity_apart():
    index = narrow.odd_bf16(np.array([np.inf, 3.4e38], np.float32))
    assert narrow.codes_of_bf16("ue8m0", "rp", False, False)[index].tolist() == [255, 255]
    assert narrow.codes_of_bf16("ue8m0", "rz", False, False)[index].tolist() == [255, 254]


def test_f32_to_bf16_rounds_as_torch_does():
    values = every_f32_of_interest()
    expected = as_torch(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = values == values
    assert (bf16.narrow(values)[number] == expected[number]).all()
    assert (bf16.narrow(values)[~number] == bf16.NAN).all()


def test_bf16_widens_exactly():
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = as_torch(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert same(bf16.widen(codes), expected).all()


def test_f32_to_f16_rounds_as_torch_does():
    values = every_f32_of_interest()
    expected = as_torch(values).half().numpy()
    number = values == values
    found = f16.narrow(values).view(np.uint16)
    assert (found[number] == expected.view(np.uint16)[number]).all()
    assert (found[~number] == f16.NAN).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("form", ["f16", "bf16"])
@given(values=f32_lanes())
@few
def test_halves_round_once_in_every_mode(form, mode, values):
    grid = reference.F16 if form == "f16" else reference.BF16
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    zero = np.zeros(1)
    expected = [reference.rounded_float(grid, Fraction(x), mode, x) for x in wide[finite].tolist()]
    if form == "f16":
        found = f16.narrow_exact(np.append(wide[finite], zero), mode)[:-1].astype(np.float64)
    else:
        found = bf16.widen(bf16.narrow_exact(np.append(wide[finite], zero), mode))[:-1]
    assert same(found.astype(np.float64), np.array(expected, np.float64)).all()


def test_satfinite_halves_stop_at_the_largest_number():
    values = np.array([1e30, -1e30, np.inf, np.nan], np.float64)
    assert f16.narrow_exact(values, "rn", satfinite=True).tolist()[:3] == [65504, -65504, 65504]
    found = bf16.narrow_exact(np.array([3.4e38, -np.inf, np.nan]), "rn", satfinite=True)
    assert found.tolist() == [0x7F7F, 0xFF7F, 0x7FFF]


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
@given(values=f32_lanes())
@few
def test_tf32_keeps_ten_bits_of_mantissa(mode, values):
    finite = np.isfinite(values)
    found = tf32.narrow(values, mode)
    expected = [
        reference.rounded_float(reference.TF32, Fraction(x), mode, x)
        for x in values[finite].tolist()
    ]
    assert same(found[finite], np.array(expected, np.float32)).all()
    assert same(found[~finite], values[~finite]).all()
    assert (found.view(np.uint32) & 0x1FFF == 0).all()


def test_tf32_clamps_and_cuts_on_demand():
    values = np.array([0x7F800000, 0xFF7FFFFF, 0xBF800000, 0xFFC12345], np.uint32).view(np.float32)
    largest = float(reference.TF32.largest)
    found = tf32.narrow(values, "rna", satfinite=True)
    assert found.tolist()[:3] == [largest, -largest, -1.0]
    assert found.view(np.uint32)[3] == 0xFFC10000  # as recorded: silicon's nans/cvt.rna.satfinite
    assert tf32.narrow(values, "rn").view(np.uint32)[3] == 0x7FFFE000
    assert tf32.narrow(values, "rn", relu=True).tolist()[1:3] == [0.0, 0.0]


def test_bf16_fma_sees_an_addend_far_below_a_tie():
    one_and_a_bit = np.array([0x3F81, 0x3F81, 0xBF81], np.uint16)  # 1 + 2^-7
    half = np.array([0x3F00 + 1] * 3, np.uint16)
    tiny = np.array([0x0080, 0x8080, 0x0080], np.uint16)
    found = bf16.widen(bf16.fma(one_and_a_bit, half, tiny))
    wide = [bf16.widen(x).tolist() for x in (one_and_a_bit, half, tiny)]
    expected = [reference.fma(reference.BF16, *x, "rn") for x in zip(*wide, strict=True)]
    assert found.tolist() == expected
