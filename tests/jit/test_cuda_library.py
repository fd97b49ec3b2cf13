"""Which CUDA runtime compiled kernels get: torch's, if it is new enough."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flashdsa.errors import UnsupportedError
from flashdsa.jit import cuda_library


class Library:
    """A library with some functions, at addresses of its own."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 0))


RUNTIME = [name for name in cuda_library.FUNCTIONS if name.startswith("cuda")]
DRIVER = [name for name in cuda_library.FUNCTIONS if not name.startswith("cuda")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Libraries by their names; those that were opened are under "opened"."""
    libraries: dict[str, Any] = {"opened": []}

    def open_library(name: str) -> Any:
        libraries["opened"].append(name)
        return libraries.get(name)

    monkeypatch.setattr(cuda_library, "_open", open_library)
    cuda_library._functions.cache_clear()
    yield libraries
    cuda_library._functions.cache_clear()


def _torch_of(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.8", "libcudart.so.12"), ("13.0", "libcudart.so.13"), (None, "libcudart.so.13")],
)
def test_the_runtime_is_of_torchs_cuda(
    cuda: str | None, expected: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though both are on the machine."""
    machine |= {name: Library(*RUNTIME) for name in cuda_library.RUNTIMES}
    machine[cuda_library.DRIVER] = Library(*DRIVER)
    _torch_of(cuda, monkeypatch)
    assert set(cuda_library.cuda_functions()) == set(cuda_library.FUNCTIONS)
    assert [name for name in machine["opened"] if "cudart" in name] == [expected]


def test_the_other_runtime_serves_where_torchs_is_not_there(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["libcudart.so.13"] = Library(*RUNTIME)
    _torch_of("12.9", monkeypatch)
    assert set(cuda_library.cuda_functions()) == set(RUNTIME)


def test_an_old_runtime_is_refused_by_its_version(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["libcudart.so.12"] = Library(*[name for name in RUNTIME if "Library" not in name][1:])
    _torch_of("12.6", monkeypatch)
    with pytest.raises(UnsupportedError, match=r"need the CUDA 12.8 runtime or newer; .* has 12.6"):
        cuda_library.cuda_functions()


def test_a_machine_without_cuda_has_none(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_of(None, monkeypatch)
    assert cuda_library.cuda_functions() == {}
