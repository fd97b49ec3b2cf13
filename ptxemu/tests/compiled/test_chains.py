"""Machine code of products, and chains of blocks and accesses."""

import itertools

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from tests.compiled.random_loops import Author, text
from tests.kernel_run import source

from ptxemu import api, machine_code
from ptxemu.compiled import products
from ptxemu.compiled.chain import Chain
from ptxemu.engines.wgmma import _fragment_d
from ptxemu.errors import ExecutionError
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.numerics import dot

# Blocks and weak accesses in a row as threaded code: the interpreter's results, bit for bit.


CTAS, THREADS = 2, 48


@pytest.fixture
def ends(monkeypatch):
    """How each chain ended, from the first instruction on: True at its end."""
    found = []
    run = Chain.run

    def noted(*arguments):
        found.append(run(*arguments))
        return found[-1]

    monkeypatch.setattr(Chain, "run", noted)
    monkeypatch.setattr(machine_code, "COLD_INSTRUCTIONS", 0)
    monkeypatch.setattr(machine_code, "WARM_INSTRUCTIONS", 0)
    return found


def outcome(ptx, core, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", core)
    out = np.zeros(64 * CTAS * 8, np.uint32)
    own = np.arange(64 * CTAS * 64, dtype=np.uint32) * np.uint32(2654435761)
    result = api.load(ptx).launch("k", CTAS, THREADS, args=[out, own])
    return out, own, result.warp_instructions


@pytest.mark.parametrize("seed", range(100, 108))
def test_random_programs_give_the_same_bits_and_counts(seed, ends, monkeypatch):
    ptx = text(Author(seed).body())
    expected = outcome(ptx, "numpy", monkeypatch)
    assert not ends
    found = outcome(ptx, "llvm", monkeypatch)
    assert any(ends)
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)


ROWS = """
mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 16; add.u64 %rd0, %rd0, %rd_out;
mov.u32 %r1, 7; mov.u32 %r2, %r0; mov.u32 %r3, 9; mov.u32 %r4, 11; st.global.u32 [%rd0], %r1;
{step}
add.u64 %rd0, %rd0, 512; add.u32 %r1, %r1, 1; st.global.v4.u32 [%rd0], {{%r1, %r2, %r3, %r4}};
"""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("add.u64 %rd0, %rd0, 2;", "not aligned to 16 bytes"),
        ("add.u64 %rd0, %rd0, 131072;", "illegal global address"),
    ],
)
def test_wrong_addresses_are_named_as_the_interpreter_names_them(step, message, ends, monkeypatch):
    messages, arrays = [], []
    for core in ("numpy", "llvm"):
        monkeypatch.setenv("PTXEMU_CORE", core)
        out = np.zeros(512, np.uint32)
        with pytest.raises(ExecutionError, match=message) as error:
            api.load(source(ROWS.format(step=step), ["out"])).launch("k", 1, 32, args=[out])
        messages.append(str(error.value))
        arrays.append(out)
    assert ends == [False]
    strip = [text.split("0x")[0] + text.split(":")[-1] for text in messages]
    assert strip[0] == strip[1]
    np.testing.assert_array_equal(*arrays)
    assert (arrays[1][::4][:32] == 7).all()


def test_who_listens_hears_every_access(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    module = api.load(source(ROWS.format(step=""), ["out"]))
    result = module.launch("k", 2, 32, args=[np.zeros(512, np.uint32)], check=True)
    assert not ends
    assert {"same-value-race"} <= {finding.code for finding in result.findings}
    module.launch("k", 2, 32, args=[np.zeros(512, np.uint32)])
    assert ends == [True, True]


def test_memory_without_bounds_is_left_to_the_interpreter(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out = np.zeros(512, np.uint32)
    memory = GlobalMemory(allow_unregistered=True)
    address = int(out.ctypes.data).to_bytes(8, "little")
    module = api.load(source(ROWS.format(step=""), ["out"]))
    module.launch("k", 1, 32, args=[address], memory=memory)
    assert not ends
    assert out[128] == 8


def test_read_only_memory_is_not_written(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out = np.zeros(512, np.uint32)
    out.flags.writeable = False
    with pytest.raises(ExecutionError, match="read-only"):
        api.load(source(ROWS.format(step=""), ["out"])).launch("k", 1, 32, args=[out])
    assert ends == [False]


def test_a_launch_knows_no_memory_of_the_one_before(ends, monkeypatch):
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out = np.zeros(512, np.uint32)
    text = source(ROWS.format(step=""), ["out"])
    api.load(text).launch("k", 1, 32, args=[out])
    assert ends == [True]
    with pytest.raises(ExecutionError, match="illegal global address"):
        api.load(text).launch("k", 1, 32, args=[out[:128]])


def test_lanes_that_take_a_lock_in_turn_get_it(ends, monkeypatch):
    body = """
mov.u32 %r0, 0; mov.u32 %r3, 0;
AGAIN: atom.global.cas.b32 %r1, [%rd_lock], 0, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra AGAIN;
ld.volatile.global.u32 %r2, [%rd_out]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd_out], %r2;
atom.global.exch.b32 %r1, [%rd_lock], 0; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 3;
@%p1 bra AGAIN;
"""
    monkeypatch.setenv("PTXEMU_CORE", "llvm")
    out, lock = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    api.load(source(body, ["out", "lock"])).launch("k", 1, 32, args=[out, lock])
    assert out[0] == 3 * 32


# Products in machine code give the bits that NumPy's give.


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, 3e38, -3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("type_", products.KNOWN_TYPES)
def test_every_number_is_read_as_numpy_reads_it(type_):
    words = np.arange(1 << 16, dtype=np.uint16)
    chunks = np.random.default_rng(0).permutation(words.nbytes // 16)
    out = np.empty(len(words))
    read = products.chunk_reader(type_)
    read(words.ctypes.data, chunks.ctypes.data, len(chunks), out.ctypes.data)
    with np.errstate(invalid="ignore"):
        expected = dot.numbers(words.view(np.uint8).reshape(-1, 16)[chunks], type_)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(out), is_nan.ravel())
    same = out.view(np.uint64)[~is_nan.ravel()] == expected.view(np.uint64)[~is_nan]
    assert same.all()


@pytest.mark.parametrize("type_", products.KNOWN_TYPES)
def test_a_matrix_goes_to_where_its_elements_lie_apart(type_):
    random = np.random.default_rng(2)
    words = random.integers(0, 1 << 14, (24, 16)).astype(np.uint16)
    chunks = random.permutation(48).reshape(24, 2)
    out = np.full((16, 40), -1.0)
    read = products.matrix_reader(type_)
    to = out.ctypes.data + 8 * 8
    read(words.ctypes.data, chunks.ctypes.data, 24, 2, to, 8, 8 * 8 * 40, 8 * 40)
    expected = dot.numbers(words.view(np.uint8).reshape(-1, 16)[chunks.ravel()], type_)
    np.testing.assert_array_equal(out[:, 8:32], expected.reshape(24, 16).T)
    assert (out[:, :8] == -1).all() and (out[:, 32:] == -1).all()


@pytest.mark.parametrize(("reads", "negates"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("b_is_k_major", [False, True])
def test_products_have_numpys_bits(reads, negates, b_is_k_major):
    random = np.random.default_rng(1)
    n, k = 24, 16
    a = random.integers(-64, 64, (16, k)) / 8
    b = random.integers(-64, 64, (n, k)) / 8
    d = random.standard_normal((n // 2, 32)).astype(np.float32)
    a[3, 5:8], b[:10, 2], d[2, :10] = 0.0, SPECIAL, SPECIAL
    stored = np.ascontiguousarray(b if b_is_k_major else b.T)
    places = 128 * random.permutation(n // 2)
    registers = np.zeros((n // 2, 32), np.float32)
    registers[places // 128] = d
    with np.errstate(invalid="ignore", over="ignore"):
        sums = _fragment_d(dot.product(a, b))
        sums = -sums if negates else sums
        expected = dot.accumulated(d.view(np.uint32) if reads else None, sums, "f32")
    products.fragment_product(k)(
        a.ctypes.data, 8 * k, 8, stored.ctypes.data, 8 * k if b_is_k_major else 8,
        8 if b_is_k_major else 8 * n, n, registers.ctypes.data, places.ctypes.data, reads, negates,
    )  # fmt: skip
    np.testing.assert_array_equal(registers.view(np.uint32)[places // 128], expected)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (16, 8), (32, 40)])
def test_rows_of_products_have_numpys_bits(rows, columns, reads):
    random = np.random.default_rng(rows + columns)
    k = 16
    a = random.integers(-64, 64, (rows, k)) / 8
    b = np.full((k, products.MOST_COLUMNS), np.nan)
    b[:, :columns] = random.integers(-64, 64, (k, columns)) / 8
    d = random.standard_normal((rows, 512)).astype(np.float32)
    a[3, 5:8], b[2, :8], d[2, :8] = 0.0, SPECIAL[2:], SPECIAL[2:]
    expected = d.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        sums = a @ b[:, :columns]
        before = np.ascontiguousarray(d[:, :columns]).view(np.uint32) if reads else None
        expected[:, :columns] = dot.accumulated(before, sums, "f32").view(np.float32)
    multiply = products.row_product(k)
    multiply(a.ctypes.data, b.ctypes.data, columns, rows, d.ctypes.data, 2048, reads)
    np.testing.assert_array_equal(d.view(np.uint32), expected.view(np.uint32))
