"""f32, f32x2 and f64: what no recording of an H200 in `tests.silicon` has."""

import numpy as np
import pytest
from tests.isa.pure_run import apply, run
from tests.numerics.exact_reference import SPECIAL_F32, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def numbers(seed, count=64):
    """f32 of any bits, the special ones among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    bits[: len(SPECIAL_F32)] = SPECIAL_F32
    return np.random.default_rng(seed + 1).permutation(bits).view(np.float32)


A, B, C = (numbers(seed) for seed in (10, 20, 30))


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_without_a_mode_sums_and_products_round_to_nearest(name):
    plain = apply(f"{name}.f32", np.float32, A, B)
    assert same(plain, apply(f"{name}.rn.f32", np.float32, A, B)).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rn.ftz"])
def test_pairs_of_f32_are_two_operations(mode):
    pairs = [x.view(np.uint64) for x in (A, B, C)]
    for name, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        found = apply(f"{name}.{mode}.f32x2", np.uint64, *pairs[:count]).view(np.float32)
        assert same(found, apply(f"{name}.{mode}.f32", np.float32, *(A, B, C)[:count])).all()


NANS = np.array([0x7FC00000, 0xFFC12345, 0x7F812345, 0xFF800001], np.uint32).view(np.float32)


def test_packed_f32_give_the_canonical_nan():
    pairs = np.stack([NANS, np.ones(4, np.float32)], axis=1).ravel().view(np.uint64)
    found = apply("mul.f32x2", np.uint64, pairs, pairs).view(np.uint32)
    assert found.tolist() == [0x7FFFFFFF, 0x3F800000] * 4


def test_moves_selections_and_inactive_lanes_keep_a_nans_payload():
    raw = np.resize(NANS, 32)
    selected = np.arange(32) % 2 == 0
    body = "mov.f32 %d, %a; selp.f32 %e, %a, %a, %p; @%p add.f32 %a, %b, %b;"
    results = {"d": np.uint32, "e": np.uint32, "a": np.uint32}
    found = run(body, results, a=raw, b=np.sqrt(-raw * 0 - 1), p=selected)
    assert (found[0] == raw.view(np.uint32)).all()
    assert (found[1] == raw.view(np.uint32)).all()
    assert (found[2] == np.where(selected, 0x7FFFFFFF, raw.view(np.uint32))).all()


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_of_three_are_extremes_of_two(name):
    two = lambda a, b: apply(f"{name}.f32", np.float32, a, b)
    assert same(apply(f"{name}.f32", np.float32, A, B, C), two(two(A, B), C)).all()
    absolute = [np.abs(x) for x in (A, B, C)]
    expected = two(two(*absolute[:2]), absolute[2])
    assert same(apply(f"{name}.abs.f32", np.float32, A, B, C), expected).all()


def test_the_root_of_f64_without_ftz():
    assert apply("rsqrt.approx.f64", np.float64, np.array([4.0])).tolist() == [0.5]
