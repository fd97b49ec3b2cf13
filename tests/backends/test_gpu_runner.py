"""The runner of a GPU: its memory, its functions, and what it does without a compiler."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import pkgutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa.backends
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.gpu import occupancy, runner, workspaces
from flashdsa.backends.gpu.empty_kernel import cubin
from flashdsa.backends.gpu.runner import Gpu
from flashdsa.backends.gpu.workspaces import Workspace, Workspaces
from flashdsa.backends.indexer.choice import clusters_for, gpu_of
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.catalog import INDEXER

PLAN = INDEXER.plans[0]


def test_the_driver_is_asked_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pretended(device: int, *_: int) -> Mapping[int, int]:
        asked.append(device)
        return {1: 4, 2: 2, 3: 1, 4: 1} if device else H200.clusters

    monkeypatch.setattr(runner, "clusters_at_once", pretended)
    monkeypatch.setattr(Gpu, "num_sms", H200.num_sms)
    first, second = Gpu(0), Gpu(1)
    for gpu, sizes in ((first, [13, 13, 8]), (second, [4, 4, 2])):
        assert [clusters_for(gpu_of(gpu, PLAN), rows)[1] for rows in (1, 2, 10)] == sizes
    assert asked == [0, 1]


class Driver:
    """libcuda, as far as it is asked: returns codes, notes calls, answers about clusters."""

    def __init__(self, codes: Mapping[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.calls: list[str] = []
        self.attributes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu") or self.codes.get(name) == -1:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuFuncSetAttribute":
                self.attributes[arguments[1]] = arguments[2]
            if name == "cuOccupancyMaxActiveClusters":
                return self.count(*arguments)
            return self.codes.get(name, 0)

        return call

    def count(self, count: Any, _: Any, launch: Any) -> int:
        """As the H200 does, up to the portable size."""
        asked = launch._obj
        attribute = asked.attributes.contents
        size = attribute.value[0]
        assert (asked.block[0], asked.shared_bytes) == (PLAN.threads, PLAN.smem_bytes)
        assert (attribute.id, tuple(attribute.value[1:3]), asked.num_attributes) == (4, (1, 1), 1)
        count._obj.value = H200.clusters[size]
        return 912 if size > 8 else self.codes.get("cuOccupancyMaxActiveClusters", 0)


def pretend_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError("cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    new = cache(occupancy.context_and_kernel.__wrapped__)
    monkeypatch.setattr(occupancy, "context_and_kernel", new)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def capacity() -> Mapping[int, int]:
    """As a new process asks."""
    return Gpu(0).cluster_capacity(PLAN.threads, PLAN.smem_bytes)


def test_capacities_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    pretend_driver(monkeypatch, driver)
    said = capacity()
    assert said == {size: H200.clusters[size] if size <= 8 else 0 for size in range(1, 17)}
    assert set(Indexer.SIZES) < set(said)
    assert driver.attributes == {8: PLAN.smem_bytes, 14: 1}
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2")


def test_a_question_during_a_capture_unloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA invalidates the capture if a module is unloaded; the empty kernel is loaded once."""
    driver = Driver()
    pretend_driver(monkeypatch, driver)
    assert capacity() == capacity()
    assert driver.calls.count("cuModuleLoadData") == 1
    assert "cuModuleUnload" not in driver.calls


class LaterDriver(Driver):
    """Of a GPU that takes no code for Hopper, but PTX."""

    def cuModuleLoadData(self, _: Any, image: bytes) -> int:  # noqa: N802
        """CUDA_ERROR_NO_BINARY_FOR_GPU for the first one."""
        self.calls.append("cuModuleLoadData")
        return 209 if image.startswith(b"\x7fELF") else 0


def test_later_gpus_than_hopper_get_the_empty_kernel_as_ptx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = LaterDriver()
    pretend_driver(monkeypatch, driver)
    assert capacity()[8] == H200.clusters[8]
    assert driver.calls.count("cuModuleLoadData") == 2


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (None, "cannot open"),
        (Driver({"cuOccupancyMaxActiveClusters": -1}), "cuOccupancyMaxActiveClusters"),
        (Driver({"cuModuleLoadData": 218}), "cuModuleLoadData returned 218"),
        (Driver({"cuOccupancyMaxActiveClusters": 1}), "returned 1 for 1 CTAs"),
    ],
    ids=["no driver", "an old one", "refused PTX", "refused question"],
)
def test_without_an_answer_pairs_share_rows_and_the_log_says_why(
    driver: Driver | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pretend_driver(monkeypatch, driver)
    with caplog.at_level(logging.WARNING, "flashdsa.gpu"):
        assert capacity() == {1: 132, 2: 66}
    (record,) = caplog.records
    assert said in record.getMessage()
    if driver is not None and "cuCtxPushCurrent_v2" in driver.calls:
        pushed = driver.calls.count("cuCtxPushCurrent_v2")
        assert driver.calls.count("cuCtxPopCurrent_v2") == pushed


@pytest.mark.parametrize("way", ["launching", "on_device"])
@pytest.mark.parametrize("has_one", [False, True])
def test_a_new_thread_gets_a_context_once(
    way: str, has_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary one, unless it has another, which stays."""

    class Contexts(Driver):
        def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
            """Of the thread."""
            context._obj.value = 5 if has_one else None
            return 0

    driver = Contexts()
    pretend_driver(monkeypatch, driver)
    monkeypatch.setattr(runner, "_current_device", lambda: 0)

    def launch_twice() -> None:
        for _ in range(2):
            if way == "launching":
                with Gpu(0).launching():
                    driver.calls.append("launch")
            else:
                Gpu(0).on_device(driver.calls.append)("launch")

    thread = threading.Thread(target=launch_twice)
    thread.start()
    thread.join()
    gets = [] if has_one else ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.calls == [*gets, "launch", "launch"]


def test_the_empty_kernel_is_a_module_for_hopper() -> None:
    """64-bit ELF of a CUDA machine, architecture 90, with the function that is asked for."""
    module = cubin()
    elf_class, machine, flags = module[4], module[18:20], int.from_bytes(module[48:52], "little")
    assert (module[:4], elf_class, machine) == (b"\x7fELF", 2, b"\xbe\0")
    assert 90 in (flags & 0xFF, flags >> 8 & 0xFF)
    assert b".text.k\0" in module


STREAM = 7


def make(counters: Tensor | None) -> Workspace:
    """A workspace of counters alone."""
    return (torch.zeros(4) if counters is None else counters,)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Workspaces:
    """Two spare counters, and a driver that begins a new capture at each question."""
    captures = itertools.count(1)
    monkeypatch.setattr(workspaces, "capture_id", lambda _: next(captures))
    made = Workspaces()
    made.spare = list(torch.zeros(2, 4))
    return made


def test_counters_of_a_graph_stay_when_later_graphs_are_captured(known: Workspaces) -> None:
    alive = [weakref.ref(x) for x in known.spare]
    addresses = {x.data_ptr() for x in known.spare}
    given = {known.of_capture(STREAM, make)[0].data_ptr() for _ in range(2)}
    assert given == addresses
    for _ in range(3):
        assert known.of_capture(STREAM, make)[0].data_ptr() not in addresses
    assert all(counters() is not None for counters in alive)


def test_launches_of_one_capture_share_a_workspace(
    known: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "capture_id", lambda _: 5)
    first = known.of_capture(STREAM, make)
    assert known.of_capture(STREAM, make) is first
    assert known.of_capture(STREAM + 1, make) is not first


RECORDED = json.loads((Path(__file__).parents[1] / "adapters/signatures.json").read_text())
PROGRAM = """
import importlib, sys
for name in ("cutlass", "tvm_ffi"):
    sys.modules[name] = None  # an import of it is an error
import flashdsa
flashdsa.sparse_mla
names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
assert not any(name.startswith("flashdsa.adapters") for name in sys.modules)
for name in {adapters}:
    importlib.import_module(f"flashdsa.adapters.{{name}}")
assert not {{"flash_mla", "deep_gemm", "cudnn", "flashinfer", "tilelang"}} & set(sys.modules)
"""


def test_no_backend_needs_the_compiler_before_it_compiles_nor_an_adapter_its_peer() -> None:
    """Nor does anything import an adapter, or load a kernel."""
    found = pkgutil.walk_packages(flashdsa.backends.__path__, "flashdsa.backends.")
    names = [one.name for one in found if ".gpu.empty_kernel" not in one.name]
    assert "flashdsa.backends.sm90.mla_bwd" in names
    program = PROGRAM.format(adapters=[*RECORDED, "tilelang"])
    command = [sys.executable, "-c", program, "flashdsa.ops", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


class _Kernel:
    """A kernel of Triton's with parameters x, n and BLOCK, which notes its launches."""

    def __init__(self) -> None:
        self.searched: list[Any] = []
        self.launched: list[Any] = []
        self.params = [SimpleNamespace(name=name) for name in ("x", "n", "BLOCK")]

    def __getitem__(self, grid: Any) -> Any:
        def search(*given: Any, **options: Any) -> Any:
            self.searched.append((grid, given, options))
            return {other: lambda *all: self.launched.append(all) for other in (grid, (2, 1, 1))}

        return search


def test_triton_searches_once_for_each_specialization() -> None:
    kernel, runner, x = _Kernel(), Gpu(0), torch.zeros(64)
    sizes = (32, 48, 33, 1, 1, 2**40, 2**40)
    for n in sizes:
        runner.launch_triton(kernel, (2, 1, 1), (x, n), BLOCK=8, num_warps=4)
    assert [given[1] for _, given, _ in kernel.searched] == [32, 33, 1, 2**40]
    assert kernel.launched == [(x, 48, 8), (x, 1, 8), (x, 2**40, 8)]
    others = (x[1:], {"BLOCK": 8}), (x.int(), {"BLOCK": 8}), (x, {"BLOCK": 16})
    for tensor, constants in others:
        runner.launch_triton(kernel, (2, 1, 1), (tensor, 32), **constants, num_warps=4)
    assert len(kernel.searched) == 4 + len(others)
