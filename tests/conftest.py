"""Fixtures of every test: the seed, the backends that can run on this machine, their device."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

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
from flashdsa.backends.emulated.packages import missing_packages
from flashdsa.errors import UnsupportedError
from flashdsa.jit.sources import package_hash
from flashdsa.ops import OPERATIONS
from tests.support.subtests import CaseLoop

# One profile everywhere: the same examples on every machine, and no clock in a verdict.
settings.register_profile("flashdsa", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("flashdsa")
# Compilations make objects by the million, and a process keeps those of dozens of kernels: by
# Python's own thresholds all of them, seconds' work, are looked through again and again.
gc.set_threshold(20_000, 20, 20)
package_hash()  # before kernels are imported: it is remembered, and compared with a later one


HAS_GPU = torch.cuda.is_available()
CAPABILITY_HERE = torch.cuda.get_device_capability() if HAS_GPU else None
BACKENDS = {
    one.backend: one.features
    for one in registry.implementations()
    if one.automatic and one.backend != "torch"
}
"""Features of every backend but those that have tests of their own: the emulated ones, which are
slow, and torch, most of whose code is the CPU's (tests/backends/test_torch.py)."""


def _device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


def _missing_backends() -> list[str]:
    """The backends whose GPU is not here."""
    here = CAPABILITY_HERE
    return [name for name, one in BACKENDS.items() if one.gpus and not (here and one.runs_on(here))]


@pytest.fixture(scope="session")
def compiled_kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels, which outlasts the run if pytest has its cache."""
    from tests.support.compilations import remove_old

    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels")
    remove_old(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def shared_compilations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where processes share the tests out, each kernel is compiled by one of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ or missing_packages():
        yield
        return
    from tests.support.compilations import shared_in

    temporary: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    folder: Path = request.getfixturevalue("compiled_kernels")
    locks = temporary.getbasetemp().parent / "locks"
    with shared_in(folder, locks):
        yield


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.gpu if _device_of(name) == "cuda" else ())
        for name in BACKENDS
    ],
)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend to test."""
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU that this machine lacks: such tests would hide real skips.

    Files that compile and emulate kernels come first: `make test` deals files out in this order,
    and a process that ended with one of them would keep the others waiting.
    """
    kept, left_out = [], []
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") is not None and not HAS_GPU
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend")
        (left_out if needs_gpu or backend in _missing_backends() else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: "kernels" not in item.path.parts)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Let what is left go with the process: pytest collects five times now, two seconds each."""
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure at once: pytest does at the end, which a run with a time limit may not see."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ and HAS_GPU:
        text = f"\nFAILED {report.nodeid}\n{report.longreprtext[-2000:]}\n"
        os.write(2, text.encode(errors="replace"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out (`-q`, which is the default here, hides pytest's header), and the cost.

    Wall time follows who else has the cores; processor time is of this one, xdist's workers, whom
    it has waited for by now, and all that they started.
    """
    missing = f"left out, no such device: backends {', '.join(_missing_backends())}"
    terminalreporter.write_line(missing + "; tests marked gpu" * (not HAS_GPU))
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    terminalreporter.write_line(f"{seconds:.0f} CPU seconds")


@pytest.fixture(scope="session")
def device(backend: str) -> str:
    """The device whose tensors `backend` takes."""
    return _device_of(backend)


@pytest.fixture
def new_calls() -> Generator[Callable[[], None]]:
    """No operation remembers a call, neither the test's nor, after it, those of the test.

    A loop calls what this gives before each case.
    """
    _forget_calls()
    yield _forget_calls
    _forget_calls()


def _forget_calls() -> None:
    for spec in OPERATIONS.values():
        spec.cache.clear()


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of random inputs; FLASHDSA_TEST_SEED sets another one."""
    return int(os.environ.get("FLASHDSA_TEST_SEED", "0"))


def _backend_of(function: pytest.Function) -> str:
    return str(getattr(getattr(function, "callspec", None), "params", {}).get("backend", "cpu"))


@pytest.fixture
def subtests(subtests: pytest.Subtests, request: pytest.FixtureRequest) -> CaseLoop:
    """pytest's subtests; a case that a kernel backend declares it lacks is a skip."""
    return CaseLoop(subtests, _backend_of(request.node))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that a kernel backend declares it lacks is a skip with that reason, but on the CPU."""
    try:
        result = yield
    except UnsupportedError as error:
        if _backend_of(pyfuncitem) == "cpu":
            raise
        pytest.skip(str(error))
    loop = pyfuncitem.funcargs.get("subtests")
    if isinstance(loop, CaseLoop) and loop.lacks_every_case:
        pytest.skip(f"every case: {loop.reasons[0]}")
    return result
