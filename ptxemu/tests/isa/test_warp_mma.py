"""mma.sync: fragments as the manual maps them, element by element, for every type."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import UnsupportedInstructionError
from ptxemu.numerics.minifloat import E4M3, E5M2

RNG = np.random.default_rng(3)


def bf16_bits(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


ENCODE = {
    "f16": lambda v: v.astype(np.float16).view(np.uint16),
    "bf16": bf16_bits,
    "tf32": lambda v: v.astype(np.float32).view(np.uint32),
    "e4m3": lambda v: E4M3.encode(v.astype(np.float64), "rn").astype(np.uint8),
    "e5m2": lambda v: E5M2.encode(v.astype(np.float64), "rn").astype(np.uint8),
    "s8": lambda v: v.astype(np.int8).view(np.uint8),
    "u8": lambda v: np.abs(v).astype(np.uint8),
}


def a_place(i, lane, width, words):
    """(row, k) of element i of lane's fragment of A, from the manual's formulas."""
    per_word = 32 // width
    register, within = divmod(i, per_word)
    row = lane // 4 + 8 * (register % 2)
    return row, (lane % 4) * per_word + within + 4 * per_word * (register // 2)


def b_place(i, lane, width, words):
    """(k, column) of element i of lane's fragment of B."""
    per_word = 32 // width
    register, within = divmod(i, per_word)
    return (lane % 4) * per_word + within + 4 * per_word * register, lane // 4


def fragments(matrix, place, width, registers, words):
    per_word = 32 // width
    out = np.zeros((32, registers * per_word), matrix.dtype)
    for lane in range(32):
        for i in range(registers * per_word):
            out[lane, i] = matrix[place(i, lane, width, words)]
    return out.view(np.uint32)


def names(first, count):
    return "{" + ", ".join(f"%r{first + k}" for k in range(count)) + "}"


def multiply(shape, d_type, a_type, b_type, a, b, c, suffix=""):
    """D (16, 8) of the instruction, C and D given by the manual's accumulator map."""
    width = {"f16": 16, "bf16": 16, "tf32": 32}.get(a_type, 8)
    words = a.shape[1] * width // 32
    na, nb = words // 2, words // 4
    halves = 2 if d_type == "f16" else 1
    nc = 4 // halves
    c_dtype = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[d_type]
    frag_c = np.zeros((32, 4), c_dtype)
    for lane in range(32):
        for i in range(4):
            frag_c[lane, i] = c[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    x = np.concatenate(
        [
            fragments(ENCODE[a_type](a), a_place, width, na, words),
            fragments(ENCODE[b_type](b), b_place, width, nb, words),
            frag_c.view(np.uint32),
        ],
        axis=1,
    )
    total = na + nb + nc
    loads = "".join(f"ld.global.u32 %r{10 + k}, [%rd2+{4 * k}];" for k in range(total))
    stores = "".join(f"st.global.u32 [%rd4+{4 * k}], %r{40 + k};" for k in range(nc))
    body = f"""{TID} mul.wide.u32 %rd1, %r0, {4 * total}; add.s64 %rd2, %rd_x, %rd1; {loads}
mma.sync.aligned.{shape}.row.col{suffix}.{d_type}.{a_type}.{b_type}.{d_type}
{names(40, nc)}, {names(10, na)}, {names(10 + na, nb)}, {names(10 + na + nb, nc)};
mul.wide.u32 %rd3, %r0, {4 * nc}; add.s64 %rd4, %rd_y, %rd3; {stores}"""
    ran = run(body, x=x, y=np.zeros((32, nc), np.uint32))
    found = ran.y.view(c_dtype)
    d = np.zeros((16, 8), c_dtype)
    for lane in range(32):
        for i in range(4):
            d[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = found[lane, i]
    return d


@pytest.mark.parametrize(
    ("shape", "d_type", "a_type", "b_type"),
    [
        ("m16n8k16", "f32", "f16", "f16"),
        ("m16n8k8", "f32", "f16", "f16"),
        ("m16n8k16", "f16", "f16", "f16"),
        ("m16n8k16", "f32", "bf16", "bf16"),
        ("m16n8k8", "f32", "bf16", "bf16"),
        ("m16n8k8", "f32", "tf32", "tf32"),
        ("m16n8k4", "f32", "tf32", "tf32"),
        ("m16n8k32", "f32", "e4m3", "e5m2"),
        ("m16n8k16", "f32", "e4m3", "e4m3"),
        ("m16n8k32", "f16", "e5m2", "e5m2"),
        ("m16n8k32", "s32", "s8", "u8"),
        ("m16n8k16", "s32", "u8", "s8"),
    ],
)
def test_products_of_small_integers_are_exact(shape, d_type, a_type, b_type):
    depth = int(shape.rpartition("k")[2])
    a, b = RNG.integers(-4, 5, (16, depth)), RNG.integers(-4, 5, (depth, 8))
    a = np.abs(a) if a_type == "u8" else a
    b = np.abs(b) if b_type == "u8" else b
    c = RNG.integers(-9, 9, (16, 8))
    d = multiply(shape, d_type, a_type, b_type, a, b, c)
    np.testing.assert_array_equal(d, a @ b + c)


def test_integers_wrap_around_or_saturate():
    a, b = np.full((16, 32), 127), np.full((32, 8), 127)
    c = np.full((16, 8), 2**31 - 10)
    wrapped = multiply("m16n8k32", "s32", "s8", "s8", a, b, c)
    assert (wrapped == 32 * 127 * 127 - 10 - 2**31).all()
    clamped = multiply("m16n8k32", "s32", "s8", "s8", a, b, c, ".satfinite")
    assert (clamped == 2**31 - 1).all()


@pytest.mark.parametrize(
    "types",
    ["m16n8k32.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f16.bf16.bf16.f16", "m8n8k4.f64"],
)
def test_combinations_that_are_not_there_are_refused(types):
    with pytest.raises(UnsupportedInstructionError):
        run(f"mma.sync.aligned.{types} {{%r1}}, {{%r1}}, {{%r1}}, {{%r1}};")
