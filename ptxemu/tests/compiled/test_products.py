"""Products in machine code give the bits that NumPy's give."""

import itertools

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from ptxemu.compiled import products
from ptxemu.engines.wgmma import _fragment_d
from ptxemu.numerics import dot

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
