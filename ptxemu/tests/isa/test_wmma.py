"""wmma: load, multiply and store, for types that no recording in `tests.silicon` has."""

import numpy as np
import pytest
from tests.kernel_run import run

from ptxemu.errors import ExecutionError, UnsupportedInstructionError

RNG = np.random.default_rng(11)


def nibbles(values):
    codes = values.astype(np.int8).view(np.uint8) & 15
    return codes[:, ::2] | codes[:, 1::2] << 4


ENCODE = {
    "f16": lambda v: v.astype(np.float16),
    "f64": lambda v: v.astype(np.float64),
    "s8": lambda v: v.astype(np.int8),
    "s4": nibbles,
    "u4": nibbles,
    "b1": lambda v: np.packbits(v.astype(np.uint8), axis=1, bitorder="little"),
}
C_DTYPE = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
RANGE = {"u4": (0, 16), "s4": (-8, 8), "b1": (0, 2)}
REGISTERS = {"f16": 8, "s8": 2, "f64": 1, "s4": 1, "u4": 1, "b1": 1}
"""Of A, and of B."""


def names(prefix, first, count):
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def kernel(shape, types, layouts, strides, *, combine="", suffix=""):
    """PTX that loads A, B and C, multiplies and stores D."""
    ab_type, c_type, d_type = types
    a_layout, b_layout, d_layout = layouts
    a_count = b_count = REGISTERS[ab_type]
    c_count, d_count = (
        {"f16": 4, "f64": 2}.get(t, 2 if shape.startswith("m8n8") else 8) for t in (c_type, d_type)
    )
    prefix = "fd" if ab_type == "f64" else "r"
    a, b = names(prefix, 10, a_count), names(prefix, 20, b_count)
    c, d = names(prefix, 30, c_count), names(prefix, 40, d_count)
    inner = "" if ab_type == "f16" else f".{ab_type}.{ab_type}"
    return f"""
      wmma.load.a.sync.aligned.{a_layout}.{shape}.global.{ab_type} {a}, [%rd_a], {strides[0]};
      wmma.load.b.sync.aligned.{b_layout}.{shape}.{ab_type} {b}, [%rd_b], {strides[1]};
      wmma.load.c.sync.aligned.row.{shape}.global.{c_type} {c}, [%rd_c], {strides[2]};
      wmma.mma{combine}.sync.aligned.{a_layout}.{b_layout}.{shape}.{d_type}{inner}.{c_type}{suffix}
        {d}, {a}, {b}, {c};
      wmma.store.d.sync.aligned.{d_layout}.{shape}.global.{d_type} [%rd_d], {d}, {strides[3]};"""


def sizes(shape):
    m, _, rest = shape[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def padded(matrix, pad):
    """Rows with `pad` elements between them that must not matter."""
    out = np.full((len(matrix), matrix.shape[1] + pad), 77).astype(matrix.dtype)
    out[:, : matrix.shape[1]] = matrix
    return out


CASES = [
    ("f16", "f16", "f32", "m32n8k16"),
    ("f16", "f32", "f16", "m8n32k16"),
    ("f64", "f64", "f64", "m8n8k4"),
    ("s4", "s32", "s32", "m8n8k32"),
    ("u4", "s32", "s32", "m8n8k32"),
]


@pytest.mark.parametrize("layouts", ["row col row", "col row col"])
@pytest.mark.parametrize(("ab_type", "c_type", "d_type", "shape"), CASES)
def test_loads_product_and_store_are_a_matrix_product(ab_type, c_type, d_type, shape, layouts):
    a_layout, b_layout, d_layout = layouts.split()
    if ab_type in ("s4", "u4"):  # elements of less than a byte lie along k
        a_layout, b_layout = "row", "col"
    m, n, k = sizes(shape)
    a = RNG.integers(*RANGE.get(ab_type, (-5, 6)), (m, k))
    b = RNG.integers(*RANGE.get(ab_type, (-5, 6)), (k, n))
    c = RNG.integers(-9, 10, (m, n))
    pad = 0 if ab_type in ("s4", "u4") else 16
    encode = ENCODE[ab_type]
    a_memory = padded(encode(a if a_layout == "row" else a.T), pad)
    b_memory = padded(encode(b if b_layout == "row" else b.T), pad)
    d = np.zeros((m, n) if d_layout == "row" else (n, m), C_DTYPE[d_type])
    strides = [
        (k if a_layout == "row" else m) + pad,
        (n if b_layout == "row" else k) + pad,
        n + 8,
        d.shape[1],
    ]
    ran = run(
        kernel(shape, (ab_type, c_type, d_type), (a_layout, b_layout, d_layout), strides),
        a=a_memory,
        b=b_memory,
        c=padded(c.astype(C_DTYPE[c_type]), 8),
        d=d,
    )
    got = ran.d if d_layout == "row" else ran.d.T
    np.testing.assert_array_equal(got, a @ b + c)


@pytest.mark.parametrize("combine", ["xor", "and"])
def test_bit_products_count_common_bits(combine):
    a, b = (RNG.integers(0, 2, (8, 128)) for _ in "ab")
    c = RNG.integers(-9, 10, (8, 8)).astype(np.int32)
    ran = run(
        kernel(
            "m8n8k128",
            ("b1", "s32", "s32"),
            ("row", "col", "row"),
            (128, 128, 8, 8),
            combine=f".{combine}.popc",
        ),
        a=ENCODE["b1"](a),
        b=ENCODE["b1"](b),
        c=c,
        d=np.zeros((8, 8), np.int32),
    )
    bits = a[:, None] ^ b[None] if combine == "xor" else a[:, None] & b[None]
    np.testing.assert_array_equal(ran.d, bits.sum(-1) + c)


def test_satfinite_clamps_integers():
    big = np.full((16, 16), 127)
    ran = run(
        kernel(
            "m16n16k16",
            ("s8", "s32", "s32"),
            ("row", "col", "row"),
            (16, 16, 16, 16),
            suffix=".satfinite",
        ),
        a=ENCODE["s8"](big),
        b=ENCODE["s8"](big),
        c=np.full((16, 16), 2**31 - 5, np.int32),
        d=np.zeros((16, 16), np.int32),
    )
    assert (ran.d == 2**31 - 1).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "wmma.load.a.sync.aligned.row.m16n16k8.global.f16 {%r1,%r2,%r3,%r4}, [%rd_a];",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.bf16 {%r1,%r2}, [%rd_a];",
        "wmma.load.a.sync.aligned.col.m8n8k32.global.s4 {%r1}, [%rd_a];",
    ],
)
def test_what_the_manual_has_not_is_refused(instruction):
    with pytest.raises(UnsupportedInstructionError):
        run(instruction, a=64)


def test_rows_are_aligned():
    """16 bytes a lane at most: a stride of 17 halves is refused, one of 24 is not."""
    load = "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {}, [%rd_a], {};"
    run(load.format(names("r", 10, 8), 24), a=1024)
    with pytest.raises(ExecutionError, match="not aligned to 16 bytes"):
        run(load.format(names("r", 10, 8), 17), a=1024)
