"""An engine's start: what serves, kernels that are loaded, lines of the log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor

from flashdsa.backends import registry
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.sm90.sparse_mla_ways import Call, choose
from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start
from flashdsa.ops import bound
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.launch_list import Recorder
from tests.support.stubs import forget_starts


@pytest.fixture(autouse=True)
def _first_time() -> None:
    forget_starts()


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, (1,)), (2, (1, 2)), (7, (1, 2, 3, 4, 6, 7)), (16, (1, 2, 3, 4, 6, 8, 12, 16))],
)
def test_counts_have_two_in_each_octave_and_the_largest(most: int, counts: tuple[int, ...]) -> None:
    assert start.counts_up_to(most) == counts


@pytest.mark.parametrize(
    ("form", "lengths", "warmed", "keys"),
    [
        ("bf16", True, (2**17,), (2**14, 2**20)),
        ("v32", True, (2**17,), (2**14, 2**20)),
        ("bf16", False, (2**11, 2**16), (100, 5000, 160_000)),
    ],
)
def test_a_start_loads_every_kernel_that_later_calls_choose(
    form: str, lengths: bool, warmed: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    """On an H200, by any number of queries: decodes of bf16 and packed rows, and prompts whose rows
    are unpacked, with the numbers of rows that vLLM's backend warms up."""
    runner, lists, most = Recorder(H200), (2048, 0), 2**13

    def chosen(queries: int, heads: int, rows: int) -> set[str]:
        call = Call(
            queries, heads, 576, lists, lists, rows, ROW_FORMATS.get(form), lengths=lengths,
            lacks_lengths=not lengths,
        )  # fmt: skip
        way = choose(runner, call)
        plans = [one.name for one in (way.plan, way.instead) if one is not None]
        return {*plans, *["used slots"] * way.finds_ends}

    later = [*range(1, 600, 3), *range(600, most, 150)]
    for heads in (8, 16, 32, 64, 128):
        loaded = {
            name for n in start.counts_up_to(most) for x in warmed for name in chosen(n, heads, x)
        }
        needed = {name for n in later for x in keys for name in chosen(n, heads, x)}
        assert needed <= loaded, heads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this a machine with a GPU of a compute capability, whose tensors have no data."""

    def become(capability: tuple[int, int]) -> None:
        zeros = bound._zeros

        def fake(*given: Any) -> list[Any]:
            with fake_tensor.FakeTensorMode():
                return list(zeros(*given))

        monkeypatch.setattr(bound, "_zeros", fake)
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)
        monkeypatch.setattr(registry, "is_installed", lambda _: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return become


@pytest.mark.parametrize("operation", ["dsa_topk_indexer", "dsa_topk_prefill"])
@pytest.mark.parametrize(
    ("capability", "named", "heads", "topk", "served"),
    [
        ((9, 0), "auto", 64, 2048, "sm90"),
        ((9, 0), "auto", 48, 2048, ""),
        ((9, 0), "auto", 64, 4096, ""),
        ((9, 0), "triton", 48, 2048, "triton"),
        ((8, 0), "auto", 48, 2048, "triton"),
    ],
)
def test_sizes_that_only_triton_has_beside_a_gpus_own_kernels_are_refused(
    machine: Any, monkeypatch: pytest.MonkeyPatch, operation: str, capability: tuple[int, int],
    named: str, heads: int, topk: int, served: str,
) -> None:  # fmt: skip
    """Unless Triton is asked for, or serves alone on this GPU."""
    machine(capability)
    monkeypatch.setenv("FLASHDSA_BACKEND", named)
    monkeypatch.setattr(start, "warm_up", lambda operation, **choices: None)
    calls = {operation: {"H": heads, "topk": topk}}
    if served:
        assert start.load_own(calls, "NAME") == {operation: served}
        return
    said = f"NAME: {operation} of this GPU's own kernels does not take H {heads}, topk {topk}; FLAS"
    with pytest.raises(NotImplementedError, match=said):
        start.load_own(calls, "NAME")


def test_kernels_are_loaded_once_outside_of_the_threads_memory_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def noted(operation: str, **choices: Any) -> None:
        calls.append((operation, choices, threading.current_thread()))

    monkeypatch.setattr(start, "warm_up", noted)
    for _ in range(2):
        assert start.load("sparse_mla_fwd", S=(1, 3), H=4) == ("cpu",)
    ((operation, choices, thread),) = calls
    assert operation == "sparse_mla_fwd" and choices["S"] == (1, 3) and choices["H"] == 4
    assert thread is not threading.current_thread()


def test_missing_kernels_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise UnsupportedError("compiling kernels needs CuTe DSL")

    monkeypatch.setattr(start, "warm_up", missing)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
            start.load("sparse_mla_fwd", S=1)
    monkeypatch.setattr(start, "require_kernels", lambda backend: missing())
    with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
        start.require_kernels_of((9, 0))
    start.require_kernels_of((8, 9))
    monkeypatch.setenv("FLASHDSA_BACKEND", "triton")
    start.require_kernels_of((9, 0))


def test_a_line_is_said_once_by_the_first_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "loaded_origins", lambda: Counter(installed=3, compiled=1))
    served = (("sparse_mla_fwd", "sm90"), ("dsa_topk_indexer", "vLLM"))
    line = start.described(served, "kv cache auto", "vLLM's: RoPE")
    assert line.startswith("flashdsa ") and line.split(": ", 1)[1] == (
        "sparse_mla_fwd by sm90, dsa_topk_indexer by vLLM; kernels: 3 installed with the package, "
        "1 compiled now; kv cache auto; vLLM's: RoPE"
    )
    start.say("engine.flashdsa", line)  # nobody would see it yet
    with caplog.at_level(logging.INFO, logger="engine.flashdsa"):
        for _ in range(2):
            start.say("engine.flashdsa", line)
        assert caplog.messages == [line]
        forget_starts()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        start.say("engine.flashdsa", line)
    assert caplog.messages == [line]
