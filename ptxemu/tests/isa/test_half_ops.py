"""f16 and bf16: what no recording of an H200 in `tests.silicon` has."""

import numpy as np
import pytest
from tests.isa.pure_run import apply
from tests.isa.test_float_ops import numbers
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import BF16, same

from ptxemu.numerics import bf16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
A, B, C = (numbers(seed, 32).view(np.uint16) for seed in (40, 50, 60))


def value(type_, codes):
    """Codes as float32."""
    return codes.view(np.float16).astype(np.float32) if type_ == "f16" else bf16.widen(codes)


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_without_a_mode_sums_and_products_round_to_nearest(name, type_):
    plain = apply(f"{name}.{type_}", np.uint16, A, B)
    assert (plain == apply(f"{name}.rn.{type_}", np.uint16, A, B)).all()


def test_bf16_fma_also_rounds_towards_zero():
    rows = zip(*(value("bf16", x).tolist() for x in (A, B, C)), strict=True)
    expected = [reference.fma(BF16, *row, "rz") for row in rows]
    found = value("bf16", apply("fma.rz.bf16", np.uint16, A, B, C))
    assert same(found, np.array(expected, np.float32)).all()


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp", "rn.sat"])
def test_mixed_precision_is_that_of_the_widened_operands(type_, mode):
    c, wide_a, wide_b = numbers(70), value(type_, A), value(type_, B)
    for name, halves, wide in (
        ("add", (A,), (wide_a,)),
        ("sub", (A,), (wide_a,)),
        ("fma", (A, B), (wide_a, wide_b)),
    ):
        found = apply(f"{name}.{mode}.f32.{type_}", np.float32, *halves, c)
        assert same(found, apply(f"{name}.{mode}.f32", np.float32, *wide, c)).all()
