"""Pure instructions and the carry flag: what no recording of an H200 in tests.silicon has."""

import numpy as np
import pytest
from tests.isa.pure_run import apply, run
from tests.numerics import exact_reference as reference
from tests.numerics.exact_reference import BF16, SPECIAL_F32, same

from ptxemu.api import load
from ptxemu.numerics import bf16
from tests import kernel_run

# Operands, masks and guards of integer arithmetic; values are in `tests.silicon`.


def test_constants_and_negative_constants_are_operands():
    a = np.arange(32, dtype=np.uint32)
    assert apply("add.s32", np.int32, a, constants=(-5,)).tolist() == list(range(-5, 27))
    assert apply("mul.wide.s32", np.int64, a, constants=(-3,)).tolist() == [
        -3 * x for x in range(32)
    ]
    assert apply("max.u32", np.uint32, a, constants=(20,)).tolist() == [
        max(x, 20) for x in range(32)
    ]


def test_only_lanes_of_the_mask_are_written_and_guards_hold_within_it():
    a = np.arange(32, dtype=np.uint32)
    old = np.full(32, 1000, np.uint32)
    mask = a < 20
    body = "add.u32 %d, %a, 1; @%p add.u32 %d, %d, 100; @!%p add.u32 %e, %d, 5;"
    found, guarded = run(
        body, {"d": np.uint32, "e": np.uint32}, mask=mask, a=a, d=old, e=old, p=a % 2 == 0
    )
    for lane in range(32):
        new = lane + 1 + (100 if lane % 2 == 0 else 0)
        assert found[lane] == (new if lane < 20 else 1000)
        assert guarded[lane] == (new + 5 if lane < 20 and lane % 2 else 1000)


# f32, f32x2 and f64.

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def numbers(seed, count=64):
    """f32 of any bits, the special ones among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    bits[: len(SPECIAL_F32)] = SPECIAL_F32
    return np.random.default_rng(seed + 1).permutation(bits).view(np.float32)


A, B, C = (numbers(seed) for seed in (10, 20, 30))
HALF_A, HALF_B, HALF_C = (numbers(seed, 32).view(np.uint16) for seed in (40, 50, 60))


@pytest.mark.parametrize("type_", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_without_a_mode_sums_and_products_round_to_nearest(name, type_):
    a, b, raw = (A, B, np.uint32) if type_ == "f32" else (HALF_A, HALF_B, np.uint16)
    plain = apply(f"{name}.{type_}", raw, a, b)
    assert (plain == apply(f"{name}.rn.{type_}", raw, a, b)).all()


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


# f16 and bf16.


def value(type_, codes):
    """Codes as float32."""
    return codes.view(np.float16).astype(np.float32) if type_ == "f16" else bf16.widen(codes)


def test_bf16_fma_also_rounds_towards_zero():
    rows = zip(*(value("bf16", x).tolist() for x in (HALF_A, HALF_B, HALF_C)), strict=True)
    expected = [reference.fma(BF16, *row, "rz") for row in rows]
    found = value("bf16", apply("fma.rz.bf16", np.uint16, HALF_A, HALF_B, HALF_C))
    assert same(found, np.array(expected, np.float32)).all()


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp", "rn.sat"])
def test_mixed_precision_is_that_of_the_widened_operands(type_, mode):
    c, wide_a, wide_b = numbers(70), value(type_, HALF_A), value(type_, HALF_B)
    for name, halves, wide in (
        ("add", (HALF_A,), (wide_a,)),
        ("sub", (HALF_A,), (wide_a,)),
        ("fma", (HALF_A, HALF_B), (wide_a, wide_b)),
    ):
        found = apply(f"{name}.{mode}.f32.{type_}", np.float32, *halves, c)
        assert same(found, apply(f"{name}.{mode}.f32", np.float32, *wide, c)).all()


# mov, setp, set, selp and slct.

LANES = np.arange(32, dtype=np.uint32)


def test_128_bits_go_through_a_register_and_back():
    low, high = LANES.astype(np.uint64) << np.uint64(33), LANES.astype(np.uint64) + np.uint64(9)
    body = ".reg .b128 %q, %s; mov.b128 %q, {%a, %b}; mov.b128 %s, %q; mov.b128 {%x, %y}, %s;"
    mask = LANES < 7
    # b128 registers need their own storage, which `run` does not make: a whole kernel does.
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {{
.reg .b64 %a, %b, %x, %y, %o; .reg .b32 %t; .reg .pred %p; {body.split(";")[0]};
mov.u32 %t, %tid.x; cvt.u64.u32 %a, %t; shl.b64 %a, %a, 33; cvt.u64.u32 %b, %t; add.s64 %b, %b, 9;
mov.b128 %s, {{%b, %a}}; mov.b128 %q, {{%a, %b}}; setp.lt.u32 %p, %t, 7;
@%p mov.b128 %s, %q; mov.b128 {{%x, %y}}, %s;
ld.param.u64 %o, [out]; mul.wide.u32 %a, %t, 16; add.s64 %o, %o, %a;
st.global.u64 [%o], %x; st.global.u64 [%o+8], %y; ret;
}}"""
    out = np.zeros((32, 2), np.uint64)
    load(text).launch("k", 1, 32, args=[out])
    assert (out[:, 0] == np.where(mask, low, high)).all()
    assert (out[:, 1] == np.where(mask, high, low)).all()


def test_constants_special_registers_and_predicates_move():
    assert run("mov.b32 %d, -2;", {"d": np.int32}).tolist() == [-2] * 32
    assert run("mov.f32 %d, 0f3F800000;", {"d": np.float32}).tolist() == [1.0] * 32
    assert run("mov.f64 %d, 0d3FF0000000000000;", {"d": np.float64}).tolist() == [1.0] * 32
    assert run("mov.pred %p, 1;", {"p": np.bool_}).all()
    p = LANES % 2 == 0
    assert (run("mov.pred %q, %p;", {"q": np.bool_}, p=p) == p).all()


def test_a_move_copies_the_value_and_not_the_register():
    first, second = run(
        "mov.b32 %x, %a; add.u32 %a, %a, 1; mov.b32 %y, %a; mov.b32 %a, %x; add.u32 %x, %x, 5;",
        {"a": np.uint32, "y": np.uint32},
        a=LANES,
        x=LANES,
    )
    assert (first == LANES).all()
    assert (second == LANES + 1).all()


# Video instructions: the manual's pseudocode on a few chosen numbers.


def one(opcode, *operands):
    lanes = [np.full(32, operand & 0xFFFFFFFF, np.uint32) for operand in operands]
    found = set(apply(opcode, np.uint32, *lanes).tolist())
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("vadd.s32.u32.s32", (0xFFFFFFFF, -1), 0xFFFFFFFE),
        ("vadd.s32.u32.s32.sat", (0xFFFFFFFF, -1), 0x7FFFFFFF),
        ("vadd.u32.s32.s32.sat", (-3, 1), 0),
        ("vsub.s32.s32.u32.sat", (-(2**31), 5), 0x80000000),
        ("vabsdiff.u32.s32.s32", (-3, 4), 7),
        ("vabsdiff.u32.s32.s32.add", (-3, 4, 10), 17),
        ("vmin.s32.s32.u32", (-3, 0xFFFFFFFF), 0xFFFFFFFD),
        ("vmax.u32.s32.u32", (-3, 0xFFFFFFFF), 0xFFFFFFFF),
        ("vmax.s32.s32.s32.min", (-3, 4, -7), 0xFFFFFFF9),
        ("vshl.u32.u32.u32.clamp", (3, 40), 0),
        ("vshl.u32.u32.u32.wrap", (3, 33), 6),
        ("vshl.u32.u32.u32.sat.clamp", (3, 40), 0xFFFFFFFF),
        ("vshr.s32.s32.u32.clamp", (-8, 40), 0xFFFFFFFF),
        ("vshr.u32.u32.u32.wrap.add", (8, 33, 1), 5),
        ("vset.s32.u32.lt", (-1, 0), 1),
        ("vset.u32.u32.lt.add", (-1, 0, 5), 5),
        ("vmad.u32.u32.u32", (3, 4, 5), 17),
        ("vmad.s32.s32.s32.sat", (2**31 - 1, 2, 0), 0x7FFFFFFF),
        ("vmad.u32.u32.u32.shr15", (2**20, 2**10, 0), 2**15),
        ("vmad.u32.u32.u32.po", (3, 4, 5), 18),
        ("vadd4.u32.u32.u32", (0xFF010203, 0x01010101, 0), 0x00020304),
        ("vadd4.u32.u32.u32.sat", (0xFF010203, 0x01010101, 0), 0xFF020304),
        ("vsub4.s32.s32.s32.sat", (0x80000000, 0x01000000, 0), 0x80000000),
        ("vavrg4.u32.u32.u32", (0x00FF0103, 0x02FF0204, 0), 0x01FF0204),
        ("vavrg2.s32.s32.s32", (0x0000FFFF, 0x0000FFFE, 0), 0x0000FFFE),
        ("vabsdiff4.u32.u32.u32", (0x10203040, 0x40302010, 0), 0x30101030),
        ("vabsdiff4.u32.u32.u32.add", (0x10203040, 0x40302010, 1), 0x81),
        ("vmin2.s32.s32.s32", (0x0001FFFF, 0x00020000, 0), 0x0001FFFF),
        ("vmax2.u32.u32.u32", (0x0001FFFF, 0x00020000, 0), 0x0002FFFF),
        ("vset4.u32.u32.eq", (0x01020304, 0x01000300, 0), 0x01000100),
        ("vset2.s32.s32.lt.add", (0xFFFFFFFF, 0, 7), 9),
    ],
)
def test_results(opcode, operands, expected):
    assert one(opcode, *operands) == expected


# The carry flag is of each lane; sums, differences and products with it are in `tests.silicon`.


def test_lanes_that_do_not_execute_keep_their_carry():
    load, store = kernel_run.load("%r1", "a"), kernel_run.store("y", "%r3")
    body = f"""{kernel_run.TID} setp.lt.u32 %p1, %r0, 20; {load} add.cc.u32 %r2, %r1, %r1;
@%p1 add.cc.u32 %r2, 0, 0; addc.u32 %r3, 0, 0; {store}"""
    a = np.where(np.arange(32) % 3, 1 << 31, 1).astype(np.uint32)
    expected = np.where(np.arange(32) < 20, 0, np.arange(32) % 3 > 0)
    np.testing.assert_array_equal(kernel_run.run(body, a=a, y=32).y, expected)
