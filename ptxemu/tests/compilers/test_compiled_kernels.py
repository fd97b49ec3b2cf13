"""PTX that nvcc and Triton made of our own kernels: right results, no finding.

record.py makes the recordings from cuda_kernels.cu and triton_kernels.py.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernel_run import aligned

from ptxemu import api
from ptxemu.numerics.minifloat import E4M3, E5M2

RECORDINGS = Path(__file__).parent / "recordings"
CUDA = RECORDINGS / "cuda_kernels.sm_90a.ptx"
TRITON: dict[str, dict[str, int]] = json.loads((RECORDINGS / "triton.json").read_text())
RNG = np.random.default_rng(5)


def run_cuda(kernel: str, grid: int, block: int, *args: Any, **options: Any) -> api.LaunchResult:
    """Launch a kernel of the CUDA file; nothing may be found."""
    result = api.load(CUDA).launch(kernel, grid, block, args=args, check=True, **options)
    assert [f.message for f in result.findings if f.level != "note"] == []
    return result


def run_triton(name: str, arch: str, grid: api.Dim3, *args: Any) -> api.LaunchResult:
    """Launch a Triton kernel as Triton does, with its two scratch buffers; no error is found."""
    needs = TRITON[f"{name}.{arch}"]
    ctas = math.prod(grid) if isinstance(grid, tuple) else grid
    scratch = aligned(np.zeros(needs["scratch_bytes"] * ctas + 128, np.uint8))
    result = api.load(RECORDINGS / f"{name}.{arch}.ptx").launch(
        name,
        grid,
        needs["threads"],
        args=[*args, scratch, np.zeros(16, np.uint8)],
        smem=needs["shared_bytes"],
        check=True,
    )
    assert [f.message for f in result.findings if f.level == "error"] == []
    return result


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_tiles_of_a_cooperative_group_reduce_and_scan() -> None:
    x = RNG.integers(-9, 10, 96).astype(np.int32)
    sums, scans = np.zeros(3, np.int32), np.zeros(96, np.int32)
    run_cuda("tile_sums", 1, 96, x, sums, scans)
    np.testing.assert_array_equal(sums, x.reshape(3, 32).sum(1))
    np.testing.assert_array_equal(scans, np.cumsum(x.reshape(3, 32), 1).ravel())


def test_a_grid_barrier_holds_every_cta() -> None:
    counter, seen = np.zeros(1, np.int32), np.zeros(128, np.int32)
    run_cuda("grid_barriers", 4, 32, counter, seen)
    assert (seen == 128 + 1000).all()


def test_malloc_gives_every_thread_its_own_memory() -> None:
    out = np.zeros(32, np.int32)
    run_cuda("device_heap", 1, 32, out)
    other = 31 - np.arange(32)
    np.testing.assert_array_equal(out, other + other**2)


def test_fragments_of_wmma_multiply_and_scale() -> None:
    a, b = (RNG.integers(-5, 6, (16, 32)).astype(np.float16) for _ in "ab")
    d = np.zeros((16, 16), np.float32)
    run_cuda("fragments", 1, 32, a, b, d)
    np.testing.assert_array_equal(d.T, 2 * (a.astype(np.float32) @ b.astype(np.float32).T + 1))


def test_module_variables_are_the_callers_arrays() -> None:
    which = (np.arange(32) % 7).astype(np.int32)
    x = RNG.standard_normal(32).astype(np.float32)
    c, count = np.array([2, 3, 5, 7], np.float32), np.zeros(1, np.int32)
    options = [c[1] * x, x + c[2], c[3] - x, x * x, -x, c[0] / x, x]
    expected = np.choose(which, options)
    symbols = {"coefficients": c, "launches": count}
    result = run_cuda("choices", 1, 32, which, x, symbols=symbols)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    assert count[0] == 1
    assert result.printed == [f"{thread}: no choice 6\n" for thread in (6, 13, 20, 27)]


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [("coefficient", np.zeros(4, np.float32), "expected one of"), ("launches", np.zeros(2), "16")],
)
def test_module_variables_that_do_not_fit_are_refused(
    name: str, array: np.ndarray, match: str
) -> None:
    with pytest.raises(api.LaunchError, match=match):
        run_cuda("choices", 1, 32, np.zeros(32, np.int32), np.zeros(32), symbols={name: array})


def test_triton_softmax() -> None:
    x, out = RNG.standard_normal((3, 100)).astype(np.float32), np.zeros((3, 100), np.float32)
    run_triton("softmax", "sm_90a", 3, x, out, 100)
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, powers / powers.sum(1, keepdims=True), rtol=1e-5)


def test_triton_product_whose_scratch_becomes_an_mbarrier() -> None:
    a, b = RNG.standard_normal((64, 32)), RNG.standard_normal((32, 32))
    out = np.zeros((64, 32), np.float32)
    operands = (aligned(x.astype(np.float32)) for x in (a, b))
    run_triton("product", "sm_100a", 1, *operands, out)
    np.testing.assert_allclose(out, a @ b.T, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_triton_product_through_tensor_maps_that_the_kernel_makes(arch: str) -> None:
    m, n, k = 128, 32, 96
    a, b = (aligned(to_bf16(RNG.integers(-3, 4, (rows, k)))) for rows in (m, n))
    out = aligned(np.zeros((m, n), np.uint16))
    run_triton("descriptors", arch, (m // 64, n // 32), a, b, out, m, n, k)
    expected = from_bf16(a) @ from_bf16(b).T
    np.testing.assert_array_equal(out, to_bf16(expected))


def test_triton_conversions_of_eight_bit_floats() -> None:
    x, out = (RNG.standard_normal(128) * 50).astype(np.float16), np.zeros((2, 128), np.uint16)
    run_triton("conversions", "sm_90a", 1, x, out)
    for row, kind in zip(out, (E4M3, E5M2), strict=True):
        codes = kind.encode(x.astype(np.float64), "rn", satfinite=True)
        np.testing.assert_array_equal(from_bf16(row), kind.decode(codes))
