"""The packages that emulated backends need, and whether they are installed."""

from __future__ import annotations

from importlib.util import find_spec

from flashdsa.errors import UnsupportedError

PACKAGES = ("ptxemu", "cutlass", "llvmlite", "tvm_ffi")
"""The emulator, the kernels' compiler, and the package that catches their launches."""


def missing_packages() -> list[str]:
    """Return the `PACKAGES` that cannot be imported.

    A folder without `__init__.py` is no package: in a checkout `ptxemu/` is one.
    """
    specs = {name: find_spec(name) for name in PACKAGES}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def require_packages() -> None:
    """Do nothing if the emulator can run.

    Raises:
        UnsupportedError: a package is missing.
    """
    missing = missing_packages()
    if missing:
        raise UnsupportedError(
            f"the emulator needs {', '.join(missing)}: pip install 'flashdsa[emulate]'"
        )
