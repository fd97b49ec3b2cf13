"""The tools that make machine code and read it, or a skip that says what to install."""

from __future__ import annotations

import pytest

from flashdsa.errors import UnsupportedError
from flashdsa.toolchain import Assembler, Disassembler


@pytest.fixture
def assembler() -> Assembler:
    """ptxas, or skip."""
    try:
        return Assembler.required()
    except UnsupportedError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def disassembler() -> Disassembler:
    """nvdisasm, or skip."""
    try:
        return Disassembler.required()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
