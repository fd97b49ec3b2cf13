"""Matrices of a warp: ldmatrix and its like, wmma, sparse mma."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.engines.sparse_metadata import expanded
from ptxemu.errors import ExecutionError, UnsupportedInstructionError

# ldmatrix, stmatrix and movmatrix against the manual's element maps, element by element.

RNG = np.random.default_rng(7)


def registers(count):
    return "{" + ", ".join(f"%r{10 + k}" for k in range(count)) + "}"


def fill_shared(words_per_lane=4):
    """Row l of 16 bytes of x goes to 16 * (31 - l): rows lie in no order. %r3 = this lane's."""
    return f"""{TID} mov.u32 %r1, smem; sub.u32 %r2, 31, %r0; mad.lo.u32 %r3, %r2, 16, %r1;
mul.wide.u32 %rd1, %r0, 16; add.s64 %rd2, %rd_x, %rd1;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd2]; st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
bar.warp.sync -1;
"""


def dump(count):
    """Register k of lane l goes to y[l, k]."""
    stores = "".join(f"st.global.u32 [%rd4+{4 * k}], %r{10 + k};" for k in range(count))
    return f"mul.wide.u32 %rd3, %r0, {4 * count}; add.s64 %rd4, %rd_y, %rd3; {stores}"


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_16x16_bytes_transposes(count):
    x = RNG.integers(0, 256, (32, 16), dtype=np.uint8)
    opcode = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8"
    body = fill_shared() + f"{opcode} {registers(2 * count)}, [%r3];"
    ran = run(
        body + dump(2 * count),
        shared=512,
        x=x,
        y=np.zeros((32, 8 * count), np.uint8),
        arch="sm_100a",
    )
    for lane in range(32):
        for register in range(2 * count):
            for byte in range(4):
                row = 16 * (register // 2) + 4 * (lane % 4) + byte
                column = lane // 4 + 8 * (register % 2)
                assert ran.y[lane, 4 * register + byte] == x[row, column]


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("shape", ["m8n16", "m16n16"])
def test_ldmatrix_unpacks_narrow_elements_into_bytes(bits, shape):
    elements = RNG.integers(0, 2**bits, (32, 16), dtype=np.uint8)
    rows = []
    for row in elements.tolist():
        packed = sum(value << (bits * k) for k, value in enumerate(row))
        rows.append(list(packed.to_bytes(2 * bits, "little")) + [0xEE] * (16 - 2 * bits))
    x = np.array(rows, np.uint8)
    source = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    form = "m8n16.x4" if shape == "m8n16" else "m16n16.x2.trans"
    opcode = f"ldmatrix.sync.aligned.{form}.shared.b8x16.{source}"
    body = fill_shared() + f"{opcode} {registers(4)}, [%r3];" + dump(4)
    ran = run(body, shared=512, x=x, y=np.zeros((32, 16), np.uint8), arch="sm_100a")
    for lane in range(32):
        for register in range(4):
            for byte in range(4):
                if shape == "m8n16":
                    row, column = 8 * register + lane // 4, 4 * (lane % 4) + byte
                else:
                    row = 16 * (register // 2) + 4 * (lane % 4) + byte
                    column = lane // 4 + 8 * (register % 2)
                assert ran.y[lane, 4 * register + byte] == elements[row, column]


def store_body(opcode, count):
    """Registers from x[l, k]; row l is stored at 16 * (31 - l); then all of it is dumped to y."""
    loads = "".join(f"ld.global.u32 %r{10 + k}, [%rd2+{4 * k}];" for k in range(count))
    return f"""{TID} mov.u32 %r1, smem; sub.u32 %r2, 31, %r0; mad.lo.u32 %r3, %r2, 16, %r1;
mul.wide.u32 %rd1, %r0, {4 * count}; add.s64 %rd2, %rd_x, %rd1; {loads}
stmatrix.sync.aligned.{opcode} [%r3], {registers(count)}; bar.warp.sync -1;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3]; mul.wide.u32 %rd3, %r0, 16;
add.s64 %rd4, %rd_y, %rd3; st.global.v4.u32 [%rd4], {{%r4, %r5, %r6, %r7}};"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_16x8_bytes_stores_the_transpose(count):
    x = RNG.integers(1, 256, (32, 4 * count), dtype=np.uint8)
    opcode = f"m16n8.x{count}.trans.shared.b8"
    ran = run(
        store_body(opcode, count), shared=512, x=x, y=np.zeros((32, 16), np.uint8), arch="sm_100a"
    )
    expected = np.zeros((32, 16), np.uint8)
    for lane in range(32):
        for register in range(count):
            for byte in range(4):
                m, n = lane // 4 + 8 * (byte // 2), 2 * (lane % 4) + byte % 2
                expected[8 * register + n, m] = x[lane, 4 * register + byte]
    np.testing.assert_array_equal(ran.y, expected)


def test_rows_are_reported_as_16_byte_accesses():
    body = fill_shared() + f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {registers(2)}, [%r3];"
    access = run(body, shared=512, x=np.zeros(128, np.uint32)).seen.accesses[-1]
    assert (len(access.starts), access.size, access.kind.value) == (16, 16, "read")


@pytest.mark.parametrize(
    "opcode",
    ["m16n16.x1.shared.b8", "m8n16.x1.shared.b8", "m8n8.x1.shared.b8", "m8n8.x3.shared.b16"],
)
def test_forms_that_do_not_exist_are_refused(opcode):
    with pytest.raises(UnsupportedInstructionError):
        run(f"ldmatrix.sync.aligned.{opcode} {registers(2)}, [%r3];", shared=512)


# wmma: load, multiply and store, for types that no recording in `tests.silicon` has.


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


# mma: sparsity metadata that means nothing, and combinations that are not there.

FOUR = "{%r1, %r2, %r3, %r4}"
SPARSE = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {FOUR}, {FOUR}, "
SPARSE += f"{FOUR}, {FOUR}, %r5, "
DENSE = "mma.sync.aligned.{} {{%r1}}, {{%r1}}, {{%r1}}, {{%r1}};"


@pytest.mark.parametrize(("metadata", "count"), [("0x44444444", 0), ("0x44444054", 1)])
def test_metadata_without_meaning_is_reported(metadata, count):
    ran = run(f"mov.b32 %r5, {metadata}; {SPARSE}1; st.global.u32 [%rd_y], %r1;", y=1)
    assert ran.seen.codes.count("sparsity-metadata-undefined") == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SPARSE}2;", "selector 2 is not 0 to 1"),
        (f"{SPARSE}%r6;", "must be a constant"),
        (SPARSE.replace("k32", "k64") + "0;", "combination"),
        (DENSE.format("m16n8k32.row.col.f32.f16.f16.f32"), "combination"),
        (DENSE.format("m16n8k16.row.col.f16.bf16.bf16.f16"), "combination"),
        (DENSE.format("m8n8k4.f64"), "mma"),
        (
            "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 "
            f"{FOUR}, {FOUR}, {{%r1, %r2}}, {FOUR};",
            "sm_120",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(text, message):
    with pytest.raises(UnsupportedInstructionError, match=message):
        run(text)


def test_kept_pairs_of_four_bits_go_where_the_metadata_says():
    kept = np.arange(1.0, 9.0)[None]
    dense = expanded(kept, np.array([[0b1001, 0b1100]], np.uint32), "s4")
    assert dense.tolist() == [[0, 0, 1, 2, 3, 4, 0, 0, 5, 6, 0, 0, 0, 0, 7, 8]]


def test_of_two_tf32_one_is_kept():
    dense = expanded(np.array([[1.0, 2.0]]), np.array([[0b1110, 0b0100]]), "tf32")
    assert dense.tolist() == [[0, 1, 2, 0]]
