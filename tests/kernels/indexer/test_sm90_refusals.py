"""What the compiled function refuses before it launches: what is known is not checked by us again.

Tensors say that they are on a GPU and lie on the CPU; a call that is not refused finds no driver.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import tvm_ffi

from flashdsa.jit.loader import compile_plan
from flashdsa.jit.shared_object import build_shared_object, load_shared_object
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.verify.layouts import pages_apart
from tests.kernels.indexer.inputs import make_inputs
from tests.support.subtests import CaseLoop

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver it would be launched"),
]

CPU, CUDA = 1, 2
INT, UINT, FLOAT, BFLOAT, E4M3, E5M2 = 0, 1, 2, 4, 10, 12
CODES = {
    torch.float8_e4m3fn: (E4M3, 8),
    torch.float8_e5m2: (E5M2, 8),
    torch.float32: (FLOAT, 32),
    torch.bfloat16: (BFLOAT, 16),
    torch.int64: (INT, 64),
    torch.int32: (INT, 32),
    torch.uint32: (UINT, 32),
    torch.int8: (INT, 8),
    torch.uint8: (UINT, 8),
}


class Dl(ctypes.Structure):
    """DLPack's DLManagedTensor, of a tensor that its maker keeps."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Pretended:
    """A CPU tensor that says it is on another device, or some bytes further."""

    def __init__(self, tensor: torch.Tensor, device: tuple[int, int] = (CUDA, 0), by: int = 0):
        self.tensor, self.device = tensor, device
        self.sizes, self.strides = (
            (ctypes.c_int64 * tensor.dim())(*numbers) for numbers in (tensor.shape, tensor.stride())
        )
        address = tensor.data_ptr() + by
        layout = (tensor.dim(), *CODES[tensor.dtype], 1, self.sizes, self.strides)
        self.dl = Dl(address, device, *layout, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: object) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self.dl), b"dltensor", None)


INPUTS = make_inputs([600, 700], num_heads=16)
RIGHT = {
    **INPUTS._asdict(),
    "topk_indices": INPUTS.output(512),
    "words": torch.zeros(0, 0, dtype=torch.int32),
}
Q, CACHE, W, LENS, TABLE, OUT, _ = RIGHT.values()
E4M3_ZEROS = torch.zeros(2, 32, 128).to(torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    path: Path = tmp_path_factory.mktemp("object") / "indexer.so"
    compiled = compile_plan(INDEXER, IndexerPlan(num_heads=16))
    build_shared_object(path, {"indexer": compiled}, "of this test")
    function: Callable[..., Any] = load_shared_object(path)("indexer")
    return function


def call(function: Callable[..., Any], changed: dict[str, Any]) -> None:
    operands = [
        Pretended(x) if isinstance(x, torch.Tensor) else x for x in {**RIGHT, **changed}.values()
    ]
    held = [tvm_ffi.from_dlpack(x) if isinstance(x, Pretended) else x for x in operands]
    function(*held, 1, 2, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"k_index_cache_fp8": CACHE.view(torch.int8)},
        {"block_table": torch.zeros(2, 99, dtype=torch.int32)[:, :11]},
        {"block_table": torch.zeros(2, 5, dtype=torch.int32)[:, :1]},
        {"block_table": TABLE[:1]},
        {"k_index_cache_fp8": pages_apart(CACHE)},
        {"topk_indices": OUT.repeat(1, 2)[:, :512]},
        {"topk_indices": OUT[:, :256].contiguous()},
        # These are wrong: what is left to check.
        {"seq_lens": LENS.view(torch.uint32)},
        {"block_table": TABLE.view(torch.uint32)},
        {"block_table": TABLE[:0]},
        {"topk_indices": OUT.view(torch.uint32)},
        {"k_index_cache_fp8": CACHE[:0]},
    ],
    ids=[
        *("right", "int8 cache", "rows apart", "one page", "one request", "pages apart"),
        *("ids apart", "fewer ids"),
        *("lens", "table", "no table", "ids", "no pages"),
    ],
)
def test_what_would_be_launched(function: Callable[..., Any], changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"cudaError|CUDA error"):
        call(function, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_index_fp8": Q.view(torch.uint8)}, "#0 .* expected dtype=float8_e4m3fn"),
        ({"q_index_fp8": Q.view(torch.float8_e5m2)}, "#0 .* expected dtype=float8_e4m3fn"),
        ({"weights": W.bfloat16()}, "#2 .* expected dtype=float32"),
        ({"weights": W.view(torch.int32)}, "#2 .* expected dtype=float32"),
        ({"seq_lens": LENS.long()}, "#3 .* expected dtype=int32"),
        ({"block_table": TABLE.long()}, "#4 .* expected dtype=int32"),
        ({"topk_indices": OUT.float()}, "#5 .* expected dtype=int32"),
        ({"k_index_cache_fp8": CACHE.int()}, "#1 .* expected dtype=uint8"),
        ({"q_index_fp8": E4M3_ZEROS}, r"q_index_fp8.shape\[1\] .*#0 .* expected to be 16"),
        ({"q_index_fp8": Q[:, :, None]}, "#0 .* expected ndim=3"),
        ({"q_index_fp8": Q[:1]}, r"\.shape\[0\] .*expected to match q_index_fp8.shape\[0\]"),
        ({"weights": torch.zeros(2, 32)}, r"weights.shape\[1\] .*#2 .* expected to be 16"),
        ({"weights": torch.zeros(16, 2).t()}, r"weights.strides\["),
        ({"seq_lens": LENS[:1]}, r"seq_lens.shape\[0\] .*expected to match q_index_fp8.shape"),
        ({"seq_lens": LENS.repeat(2)[::2]}, r"seq_lens.strides\[0\]"),
        ({"block_table": TABLE.t().contiguous().t()}, r"block_table.strides\[1\]"),
        ({"topk_indices": OUT[:1]}, r"topk_indices.shape\[0\] .*to match q_index_fp8.shape"),
        ({"topk_indices": OUT.repeat(1, 2)[:, ::2]}, r"topk_indices.strides\[1\]"),
        ({"k_index_cache_fp8": pages_apart(CACHE, gap=8)}, r"k_index_cache_fp8.strides\[0\]"),
        ({"k_index_cache_fp8": CACHE[:, :32]}, r"k_index_cache_fp8.shape\[1\]"),
        ({"k_index_cache_fp8": CACHE[:, :, 0]}, "#1 .* expected ndim=4"),
    ],
)
def test_refused_layouts(
    function: Callable[..., Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(function, changed)


def test_refused_places(subtests: CaseLoop, function: Callable[..., Any]) -> None:
    """Every tensor is on the first one's GPU, and at an address that the kernel can read."""
    for name in RIGHT:
        with subtests.test(name):
            number = list(RIGHT).index(name)
            for by in (1, 4 if number < 3 else 2):
                with pytest.raises(
                    ValueError, match=rf"Misaligned Tensor data on argument #{number}"
                ):
                    call(function, {name: Pretended(RIGHT[name], by=by)})
            with pytest.raises(ValueError, match=rf"#{number} .* expected device_type=cuda"):
                call(function, {name: Pretended(RIGHT[name], (CPU, 0))})
            with pytest.raises(ValueError, match="Mismatched device index on argument"):
                call(function, {name: Pretended(RIGHT[name], (CUDA, 1))})
            with pytest.raises(TypeError, match=rf"Mismatched type on argument #{number}"):
                call(function, {name: None})
