"""Whatever is changed in a cubin or a result, its reader ends clearly."""

from __future__ import annotations

import pytest
from tests.mutated_files import judge

from flashdsa.errors import UnsupportedError
from flashdsa.toolchain import Assembler, Disassembler

NUMBER = 300
KIND = "workbench.tests.mutated_results:"


def changed_cubins(seeds: range) -> list[str]:
    """What did not end clearly, or a skip where a tool is missing."""
    try:
        Assembler.required()
        Disassembler.required()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    return judge(f"{KIND}CUBINS", seeds)


def test_some_changed_results_end_clearly() -> None:
    assert judge(f"{KIND}RESULTS", range(60)) == []


def test_some_changed_cubins_end_clearly() -> None:
    assert changed_cubins(range(12)) == []


@pytest.mark.slow
def test_many_changed_results_end_clearly() -> None:
    assert judge(f"{KIND}RESULTS", range(60, NUMBER)) == []


@pytest.mark.slow
def test_many_changed_cubins_end_clearly() -> None:
    assert changed_cubins(range(12, NUMBER)) == []
