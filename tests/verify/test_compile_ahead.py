"""Triton's kernels of checks are compiled in threads before the checks run."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdsa.backends.emulated.devices import small_device
from flashdsa.backends.emulated.runner import running_on
from flashdsa.verify import check
from flashdsa.verify.check_list import Check, checks_of
from flashdsa.verify.compile_ahead import compile_ahead
from flashdsa.verify.launch_list import Recorder

triton = pytest.importorskip("triton")
CASES = {"one score", "140 rows", "1000 of 6000"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """Names of the threads that compiled a kernel, and whether it came from the disk. Triton
    compiles for an A100 that is not here."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    found: list[tuple[str, bool]] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append((threading.current_thread().name, cache_hit))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 80, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    return found


def test_each_kernel_is_compiled_once_and_none_is_launched(
    compiled: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashdsa.kernels.triton.selection import select

    monkeypatch.setattr(select, "device_caches", type(select.device_caches)(select.create_binder))
    runner, told = Recorder(small_device((8, 0))), list[str]()
    wanted = [one for one in checks_of(0, "emulate-triton", "cpu") if one.case in CASES]
    assert {one.case for one in wanted} == CASES
    broken = Check("topk_indices", "broken", call=lambda: 1 / 0, judge=list)
    with running_on(runner):
        compile_ahead([broken, *wanted], runner, told.append)
        assert len(compiled) > 1 and runner.of_triton == {}
        assert not any(name == threading.main_thread().name or hit for name, hit in compiled)
        assert told[-1].startswith(f"compiled {len(compiled)} of {len(compiled)} kernels on ")
        before = len(compiled)
        compile_ahead(wanted, runner, told.append)
        assert len(compiled) == before
        for one in wanted:
            one.call()
    assert runner.of_triton.keys() == {"select"}


def test_a_check_of_triton_compiles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    one = Check("topk_indices", "a case", call=int, judge=lambda: done.append("judged") or [])
    monkeypatch.setattr(check, "checks_of", lambda *_: [one])
    monkeypatch.setattr(check, "gpu", lambda device: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def ahead(checks: list[Check], runner: Any, tell: Any) -> None:
        assert (checks, runner) == ([one], torch.device("cuda", 3))
        tell("compiled 1 of 1")
        done.append("compiled")

    monkeypatch.setattr(check, "compile_ahead", ahead)
    told: list[Any] = []
    check.run_checks("triton", ["topk_indices"], 0, lambda *event: told.append(event))
    assert done == ["compiled", "judged"] and told[0] == (0, 1, "compiled 1 of 1")
    check.run_checks("triton", ["topk_indices"], 0, quick=True)
    assert done == ["compiled", "judged", "judged"]
