"""ldmatrix, stmatrix and movmatrix against the manual's element maps, element by element."""

import numpy as np
import pytest
from tests.kernel_run import TID, run

from ptxemu.errors import UnsupportedInstructionError

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
