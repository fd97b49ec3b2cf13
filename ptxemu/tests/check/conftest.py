"""Fixtures of the checker's tests."""

from importlib.util import find_spec

import pytest

from ptxemu import machine_code


@pytest.fixture(params=["python", "machine code"])
def judged_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who judges the accesses of checkers, machine code from the first one on."""
    if request.param == "python":
        monkeypatch.setenv("PTXEMU_CORE", "numpy")
    elif find_spec("llvmlite") is None:
        pytest.skip("needs llvmlite")
    else:
        monkeypatch.setattr(machine_code, "NUMPY_SCANS", 0)
        monkeypatch.setattr("ptxemu.check.shadow_memory.ACCESSES_AT_ONCE", 1)
    return str(request.param)
