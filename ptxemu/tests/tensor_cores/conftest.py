"""Which code makes the products that tests of the tensor cores look at."""

import pytest

from ptxemu import machine_code


@pytest.fixture(params=["numpy", "machine code"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with NumPy's products, and with those of machine code from the first one on."""
    is_code = request.param == "machine code"
    if is_code:
        pytest.importorskip("llvmlite")
    monkeypatch.setattr(machine_code, "NUMPY_PRODUCTS", -1 if is_code else 1 << 60)
