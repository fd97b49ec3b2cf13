"""The tools that make machine code and read it, or a skip that says what to install."""

from __future__ import annotations

import pytest

from flashdsa.toolchain import nvdisasm, ptxas


@pytest.fixture
def assembler() -> ptxas.Assembler:
    """ptxas, or skip."""
    found = ptxas.find_assembler()
    if found is None:
        pytest.skip(ptxas.MISSING)
    return found


@pytest.fixture
def disassembler() -> nvdisasm.Disassembler:
    """nvdisasm, or skip."""
    found = nvdisasm.find_disassembler()
    if found is None:
        pytest.skip(nvdisasm.MISSING)
    return found
