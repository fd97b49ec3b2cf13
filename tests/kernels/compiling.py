"""How tests have kernels compiled for ptxemu."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec


def without_lines() -> Iterator[None]:
    """Where processes share the tests out, kernels are compiled without line information.

    It takes a quarter to a third of a compilation, and the instructions are the same. A test that
    runs in a process alone has it: run one that failed again so, and findings name Python lines.
    """
    shared_out = "PYTEST_XDIST_WORKER" in os.environ
    if not shared_out or find_spec("cutlass") is None or find_spec("llvmlite") is None:
        yield
        return
    from ptxemu.cutedsl import retention

    retention.install(line_info=False)
    yield
    retention.install()
