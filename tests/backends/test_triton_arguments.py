"""What Triton's kernels are compiled for: no number of a caller is a constant of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.backends.emulated import triton_kernels
from flashdsa.backends.emulated.devices import small_device
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.gpu.runner import _specialization
from flashdsa.kernels import triton as kernels_of_triton
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.toolchain import Disassembler
from flashdsa.verify.calls import sparse_mla_fwd
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.launch_list import Recorder
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.backends.test_triton import BACKEND, EVERY_KERNEL, PATHS, kept_kernels

pytest.importorskip("triton")
__all__ = ["kept_kernels"]
MAY_BE_CONSTANT = {
    **dict.fromkeys(
        ("stride", "extra_stride", "page_stride", "table_stride"),
        "no mask depends on it; i32 or i64, and to know multiples of 16 gives wide loads",
    ),
    **dict.fromkeys(
        ("page_rows", "extra_page_rows"),
        "no mask depends on it; of rows without pages 1, by which nothing is divided then",
    ),
    **dict.fromkeys(("slots", "extra_slots"), "a multiple of the tile's keys, or 0"),
}
"""Numbers that Triton may compile as the constant 1, and why."""
FOLDER = Path(kernels_of_triton.__file__).parent


class Launches(Recorder):
    """A GPU that keeps what it is given, and runs nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(small_device(capability))
        self.given: list[tuple[Any, Any, dict[str, Any]]] = []

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        self.given.append((kernel, arguments, options))
        super().launch_triton(kernel, grid, arguments)


@cache
def launches() -> Launches:
    """A launch of every kernel."""
    runner = Launches((9, 0))
    with running_on(runner):
        for path in PATHS:
            if path.case.name in EVERY_KERNEL:
                path.call(make_sparse_mla_inputs(path.case, seed=0), BACKEND)
        x = make_indexer_inputs(IndexerCase("", (70,), 40, num_heads=16), seed=0)
        flashdsa.dsa_topk_indexer(*x.operands, x.output_buffer(), backend=BACKEND)
        q, weights, ids = torch.zeros(2, 16, 128).bfloat16(), torch.ones(2, 16), torch.zeros(2, 9)
        operands = q, q[0], weights, ids.int()
        of_attention = torch.zeros(2, 16, 576).bfloat16(), torch.zeros(9, 576).bfloat16()
        flashdsa.attention_target(*of_attention, weights, ids.int(), backend=BACKEND)
        flashdsa.indexer_scores(*operands, backend=BACKEND)
        flashdsa.indexer_bwd(*operands, torch.zeros(2, 9), backend=BACKEND)
    return runner


def entry_functions() -> set[str]:
    """Functions of Triton that no other one calls: those that are launched."""
    defined, called = set(), set()
    for path in FOLDER.glob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                defined.add(function.name)
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                called |= {one.func.id for one in calls if isinstance(one.func, ast.Name)}
    return defined - called


def specialized(
    kernel: Any, arguments: Any, options: dict[str, Any], number: int
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """What Triton compiles each number for, by its parameter's name, if it is this one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, found, _ = bind(*(number if type(x) is int else x for x in arguments), **options)
    for parameter, value, known in zip(kernel.params, arguments, found, strict=False):
        if type(value) is int:
            yield parameter.name, known


def test_no_number_of_a_caller_becomes_a_constant() -> None:
    """One id in a list made masks false at compile time, of which ptxas made NaN."""
    constant = {
        (kernel.__name__, name)
        for kernel, arguments, options in launches().given
        for name, (kind, _) in specialized(kernel, arguments, options, 1)
        if kind == "constexpr"
    }
    assert {name for _, name in constant} == set(MAY_BE_CONSTANT), constant
    assert {kernel.__name__ for kernel, *_ in launches().given} == entry_functions()


def test_a_launch_takes_a_compiled_kernel_only_where_triton_would() -> None:
    """What the GPU's runner takes for alike is compiled alike."""
    numbers = 0, 1, 2, 7, 16, 17, 48, 2**31 - 1, -1, -16, 2**31, 2**31 + 1, 2**40, -(2**31) - 1
    alike: dict[Any, set[Any]] = {}
    for kernel, arguments, options in launches().given:
        for number in numbers:
            for name, known in specialized(kernel, arguments, options, number):
                key = kernel.__name__, name, _specialization(number)
                alike.setdefault(key, set()).add(known)
    assert {key: found for key, found in alike.items() if len(found) > 1} == {}
    assert len({known for found in alike.values() for known in found}) > 4


def test_multiplications_and_additions_are_fused_whatever_triton_s_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(options["enable_fp_fusion"] is True for *_, options in launches().given)
    from triton.backends.nvidia.compiler import CUDAOptions

    monkeypatch.setattr(CUDAOptions, "enable_fp_fusion", False)
    (merge, *_) = (one for one in launches().given if one[0].__name__ == "merge")
    made, _ = triton_kernels.compiled((9, 0), *merge[:2], **merge[2])
    assert made.metadata.enable_fp_fusion and "fma.rn.f32" in made.asm["ptx"]


def one_id(name: str) -> SparseMlaCase:
    form = ROW_FORMATS[name]
    return SparseMlaCase(
        name, 3, 64, 64, 1, d_qk=form.d_qk, packed="ue8m0", kv_format=name, page_size=64,
        batch_invariant=True,
    )  # fmt: skip


FORMATS = [pytest.param(one, marks=() if one == "v32" else pytest.mark.slow) for one in ROW_FORMATS]


@pytest.mark.parametrize("name", FORMATS)
def test_no_code_of_one_id_is_decoded_from_a_constant(name: str) -> None:
    """Of half a word that is 0, ptxas 12.8 to 13.5 makes the immediate 255: e4m3's NaN."""
    disassembler = Disassembler.find()
    if disassembler is None:
        pytest.skip("needs nvdisasm: pip install 'flashdsa[assemble]'")
    runner = Launches((9, 0))
    with running_on(runner):
        sparse_mla_fwd(make_sparse_mla_inputs(one_id(name), seed=0), BACKEND)
    ((kernel, arguments, options),) = runner.given
    made, _ = triton_kernels.compiled((9, 0), kernel, arguments, **options)
    code = disassembler.text(made.asm["cubin"], "-c")
    operands = re.findall(r"F2FP\.\S*E4M3\.UNPACK_B\S* \S+, (\S+)", code)
    assert operands or ROW_FORMATS[name].fp4
    assert [one for one in operands if not one.startswith(("R", "UR"))] == []
