"""The shim that stands between compiled kernels and CUDA: objects linked with it run on ptxemu.

What the emulator answers to the shim are the functions that it answers to CuTe DSL's own library.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
tvm_ffi = pytest.importorskip("tvm_ffi")
if shutil.which("gcc") is None:
    pytest.skip("needs gcc", allow_module_level=True)

import flashdsa  # noqa: E402
from flashdsa.backends.emulated import runner  # noqa: E402
from flashdsa.backends.emulated.devices import SMALL  # noqa: E402
from flashdsa.backends.emulated.runner import compiled, emulation  # noqa: E402
from flashdsa.jit.cuda_library import FUNCTIONS, bind_functions  # noqa: E402
from flashdsa.jit.elf import exported_symbols, undefined_symbols  # noqa: E402
from flashdsa.jit.loader import compile_plan  # noqa: E402
from flashdsa.jit.shared_object import build_shared_object  # noqa: E402
from flashdsa.kernels.catalog import PREFILL_LOGITS, WRITE_INDEX_K_CACHE  # noqa: E402
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan  # noqa: E402
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan  # noqa: E402
from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs  # noqa: E402
from ptxemu.cutedsl import c_functions  # noqa: E402
from ptxemu.cutedsl.host_function import host_function  # noqa: E402

WRITE = WRITE_INDEX_K_CACHE, QuantizePlan("bfloat16")
SCORES = PREFILL_LOGITS, PrefillPlan(16, scores_only=True)
INVALID_VALUE, UNKNOWN_DEVICE = 1, 101


def emulated_functions() -> dict[str, int]:
    """The emulator's, by the names that the shim wants; it has no cudaGetErrorString."""
    names = {name: f"_{name}" for name in FUNCTIONS}
    names["cudaLaunchKernelExC"] = "_cudaLaunchKernelEx"
    addresses = {name: c_functions.address_of(own) for name, own in names.items()}
    return {name: address for name, address in addresses.items() if address is not None}


class Linked:
    """Functions of one shared object in the place of those that the emulator would run."""

    def __init__(self, path: Path, variants: list[tuple[Any, Any]]) -> None:
        functions = {plan.name: compiled(spec, plan) for spec, plan in variants}
        build_shared_object(path, functions, "a test")
        self.path = path
        module = tvm_ffi.load_module(str(path))
        self.own: list[tuple[Any, Any]] = []
        for name, function in functions.items():
            runnable: Any = host_function(function)
            self.own.append((runnable, runnable._function))
            runnable._function = module[name]

    def restore(self) -> None:
        for runnable, function in self.own:
            runnable._function = function


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    variants: list[tuple[Any, Any]] = [WRITE, SCORES]
    compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compile_plan", compile_plan)  # the compiler's own, to be exported
        made = Linked(tmp_path_factory.mktemp("objects") / "linked.so", variants)
    bind_functions(made.path, emulated_functions())
    yield made
    made.restore()


def keys() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cache = torch.full((2, 64, 1, 132), 7, dtype=torch.uint8)
    return torch.randn(9, 128).bfloat16(), torch.randperm(128)[:9], cache


def written(backend: str) -> Tensor:
    k, slots, cache = keys()
    flashdsa.write_index_k_cache(k, slots, cache, backend=backend)
    return cache


def test_an_object_needs_nothing_of_cuda_and_offers_its_functions_only(linked: Linked) -> None:
    needed = undefined_symbols(linked.path)
    assert needed and all(name.startswith("TVMFFI") for name in needed)
    offered = exported_symbols(linked.path)
    assert [name for name in offered if not name.startswith("__tvm_ffi_")] == [
        "flashdsa_bind",
        "flashdsa_function",
        "flashdsa_sources",
    ]
    assert f"__tvm_ffi_{WRITE[1].name}" in offered


def test_a_kernel_runs_through_the_shim(linked: Linked) -> None:
    assert torch.equal(written("emulate-sm90"), written("cpu"))
    assert torch.equal(written("emulate-sm90"), written("cpu"))  # its library is there


def scores(backend: str) -> Tensor:
    """By a kernel with tensor maps."""
    x = make_prefill_inputs(PrefillCase("shim", causal(5, 90), 20, 16), 0)
    with emulation(SMALL):
        return flashdsa.prefill_logits(*x.operands, **x.options, backend=backend)


def test_a_kernel_with_tensor_maps_runs_through_the_shim(linked: Linked) -> None:
    torch.testing.assert_close(scores("emulate-sm90"), scores("cpu"), rtol=1e-3, atol=1e-3)


@pytest.fixture
def rebound(linked: Linked) -> Iterator[Callable[..., None]]:
    """Replaces some of the shim's functions, and puts the emulator's back."""
    kept: list[Any] = []

    def replace(**functions: Any) -> None:
        for name, function in functions.items():
            kept.append(function)
            address = ctypes.cast(function, ctypes.c_void_p).value if function else None
            ctypes.CDLL(str(linked.path)).flashdsa_bind(name.encode(), ctypes.c_void_p(address))

    yield replace
    bind_functions(linked.path, emulated_functions())


def test_a_refused_launch_is_an_error_with_cudas_words(
    linked: Linked, rebound: Callable[..., None]
) -> None:
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(lambda *_: INVALID_VALUE)
    words = ctypes.create_string_buffer(b"what CUDA says")
    explain = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32)(lambda _: ctypes.addressof(words))
    rebound(cudaLaunchKernelExC=refuse)
    with pytest.raises(RuntimeError, match=r"launching a kernel: CUDA error 1$"):
        written("emulate-sm90")
    rebound(cudaGetErrorString=explain)
    with pytest.raises(RuntimeError, match="CUDA error 1, what CUDA says"):
        written("emulate-sm90")
    rebound(cudaGetErrorString=None)


def test_a_function_that_cuda_has_not_is_named(
    linked: Linked, rebound: Callable[..., None]
) -> None:
    rebound(cudaLaunchKernelExC=None)
    with pytest.raises(RuntimeError, match=r"the CUDA runtime of this process has no cudaLaunchKe"):
        written("emulate-sm90")


def test_without_cuda_arguments_are_checked_and_a_launch_is_an_error(tmp_path: Path) -> None:
    """As on a machine without CUDA: nothing is bound."""
    other = Linked(tmp_path / "unbound.so", [WRITE])
    try:
        with pytest.raises(RuntimeError, match="the CUDA runtime of this process has no cudaGetDe"):
            written("emulate-sm90")
        function: Any = other.own[0][0]._function
        with pytest.raises(TypeError, match="Expects"):
            function()
    finally:
        other.restore()


def test_a_tensor_map_that_failed_launches_nothing(
    linked: Linked, rebound: Callable[..., None]
) -> None:
    launches: list[int] = []

    def launch(*_: Any) -> int:
        launches.append(1)
        return 0

    arguments = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, *[ctypes.c_void_p] * 5]
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32, *arguments, *[ctypes.c_int32] * 4)(
        lambda *_: INVALID_VALUE
    )
    counting = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(launch)
    rebound(cuTensorMapEncodeTiled=refuse, cudaLaunchKernelExC=counting)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        scores("emulate-sm90")
    assert not launches
    written("emulate-sm90")
    assert launches == [1]


def test_each_device_is_given_the_kernels_once(
    linked: Linked, rebound: Callable[..., None]
) -> None:
    """By its first call there, whether the device was current or the tensors lie on it."""
    loaded: list[int] = []
    current = [3]

    def get(address: int) -> int:
        ctypes.c_int32.from_address(address).value = current[0]
        return 0

    def select(device: int) -> int:
        if device > 5:
            return UNKNOWN_DEVICE
        current[0] = device
        return 0

    def set_attribute(kernel: int, attribute: int, value: int, device: int) -> int:
        loaded.append(device)
        return 0

    number = ctypes.c_int32
    rebound(
        cudaGetDevice=ctypes.CFUNCTYPE(number, ctypes.c_void_p)(get),
        cudaSetDevice=ctypes.CFUNCTYPE(number, number)(select),
        cudaKernelSetAttributeForDevice=ctypes.CFUNCTYPE(
            number, ctypes.c_void_p, number, number, number
        )(set_attribute),
    )
    written("emulate-sm90")  # tensors on device 0, device 3 is the current one
    assert set(loaded) <= {0, 3} and 3 in loaded
    loaded.clear()
    written("emulate-sm90")
    assert loaded == [] and current == [3]
    current[0] = 4
    written("emulate-sm90")
    assert set(loaded) == {4}
