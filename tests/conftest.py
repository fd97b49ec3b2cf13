"""Fixtures of every test: the seed, the backends that can run on this machine, their device."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

# Read when torch is imported, hence before it. Threads that wait must sleep: if other work shares
# the cores, spinning ones slow the tests many times over. With a process for each core
# (`make test`) a process has one thread.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# What commands print is as wide as in a pipe, whatever the terminal of the tests is.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import settings

from flashdsa.backends.catalog import registry
from flashdsa.errors import UnsupportedError
from flashdsa.ops import autograd, registration
from flashdsa.ops.table import OPERATIONS

# One profile everywhere: the same examples on every machine, and no clock in a verdict.
settings.register_profile("flashdsa", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("flashdsa")


def _device_of(backend: str) -> str:
    return "cuda" if backend.startswith("sm") else "cpu"


def _backends() -> list[Any]:
    """Every backend with an implementation; one whose device is missing is skipped and says so.

    Emulated kernels are slow: they have tests of their own.
    """
    names = {i.backend: None for i in registry.implementations() if i.automatic}
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return [
        pytest.param(name, marks=[pytest.mark.gpu, missing] if _device_of(name) == "cuda" else [])
        for name in names
    ]


@pytest.fixture(scope="session", params=_backends())
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend to test."""
    return str(request.param)


@pytest.fixture(scope="session")
def device(backend: str) -> str:
    """The device whose tensors `backend` takes."""
    return _device_of(backend)


@pytest.fixture
def new_calls() -> Generator[None]:
    """No operation remembers a call, neither the test's nor, after it, those of the test."""
    _forget_calls()
    yield
    _forget_calls()


def _forget_calls() -> None:
    registration._served.clear()
    autograd._with_backward.clear()
    for spec in OPERATIONS:
        spec.memory.clear()


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of random inputs; FLASHDSA_TEST_SEED sets another one."""
    return int(os.environ.get("FLASHDSA_TEST_SEED", "0"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A case that a kernel backend declares it lacks is a skip with that reason, but on the CPU."""
    try:
        return (yield)
    except UnsupportedError as error:
        name = getattr(getattr(pyfuncitem, "callspec", None), "params", {}).get("backend", "cpu")
        if name == "cpu":
            raise
        pytest.skip(str(error))
