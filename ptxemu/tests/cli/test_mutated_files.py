"""Whatever is changed in a file, a command ends clearly, with little memory and in little time."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.mutated_files import MEMORY_BYTES, Kind, judge

NUMBER, QUICK = 300, 60
KINDS = "PTX", "LAUNCHES", "FAT_BINARIES"


def _raise(path: Path) -> int:
    raise ValueError("on purpose")


def _die(path: Path) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _take_memory(path: Path) -> int:
    return len(bytes(MEMORY_BYTES))


def _talk(path: Path) -> int:
    sys.stderr.write("error: two\ntwo lines\n")
    return 2


BAD = Kind([b""], lambda draw, data: data, [_raise, _die, _take_memory, _talk], "error: ")
"""Each of its commands ends badly."""


@pytest.mark.parametrize("kind", KINDS)
def test_some_changes_end_clearly(kind: str) -> None:
    assert judge(f"tests.cli.strangers_kinds:{kind}", range(QUICK)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changes_end_clearly(kind: str) -> None:
    assert judge(f"tests.cli.strangers_kinds:{kind}", range(QUICK, NUMBER)) == []


def test_a_bad_end_is_seen() -> None:
    (raised, *rest) = judge("tests.cli.test_mutated_files:BAD", range(0))
    assert "ValueError: on purpose" in raised and len(rest) == 3
    assert "code -" in rest[0] and "MemoryError" in rest[1] and "two lines" in rest[2]
