"""Kernels that tests keep: found again, run as compiled ones, and not where anything is other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
pytest.importorskip("llvmlite", reason="ptxemu catches launches with it")

from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.jit.loader import compile_plan
from flashdsa.kernels.catalog import QUANTIZE_INDEX
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.plan import Barrier
from ptxemu.cutedsl import retention
from tests.kernels import kept_kernels
from tests.kernels.kept_kernels import KeptKernel, keeping

PLAN = QuantizePlan("bfloat16", slot_bits=0)


class Compiler:
    """`compile_plan`, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *what: Any) -> Any:
        self.calls += 1
        return compile_plan(*what)


def quantized(function: Any) -> list[torch.Tensor]:
    """Keys and scales of one launch, in which nothing may be found."""
    emulator = Emulator(SMALL)
    keys = torch.randn(70, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = emulator.empty(70, 128, dtype=torch.uint8), emulator.empty(70, dtype=torch.float32)
    with emulator.launching():
        function(keys, *results)
    assert len(emulator.setups) == 1
    return [*results]


def test_a_kernel_is_compiled_once_and_does_the_same_from_its_file(tmp_path: Path) -> None:
    compiler = Compiler()
    compiled = keeping(tmp_path, compiler)(QUANTIZE_INDEX, PLAN)
    kept = keeping(tmp_path, compiler)(QUANTIZE_INDEX, PLAN)
    assert isinstance(kept, KeptKernel) and not isinstance(compiled, KeptKernel)
    expected = quantized(compiled)
    for _ in range(2):
        assert all(map(torch.equal, quantized(kept), expected))
    assert compiler.calls == 1
    assert kept.__ptx__ == str(compiled.__ptx__).rstrip("\0")
    assert kept.function_name == compiled.function_name  # which no file has
    assert compiler.calls == 2


def test_what_is_other_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, the plan, the compiler, line information, and counts that a test has replaced."""
    compiler = Compiler()
    find = keeping(tmp_path, compiler)
    find(QUANTIZE_INDEX, PLAN)
    find(QUANTIZE_INDEX, QuantizePlan("float32", slot_bits=0))
    assert compiler.calls == 2
    for owner, name, other in (
        (kept_kernels, "source_hash", lambda _: "other sources"),
        (kept_kernels, "version", lambda _: "0.0"),
        (retention._Settings, "line_info", not retention._Settings.line_info),
        (Barrier, "arrivals", property(lambda _: 1)),
    ):
        before = compiler.calls
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            find(QUANTIZE_INDEX, PLAN)
        assert compiler.calls == before + 1, name
        assert isinstance(find(QUANTIZE_INDEX, PLAN), KeptKernel)


def test_the_kernels_that_were_used_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_kernels, "MOST_KERNELS", 1)
    find = keeping(tmp_path, Compiler())
    find(QUANTIZE_INDEX, PLAN)
    (first,) = tmp_path.glob("*.kernel")
    find(QUANTIZE_INDEX, QuantizePlan("float32", slot_bits=0))
    (second,) = tmp_path.glob("*.kernel")
    assert first != second
