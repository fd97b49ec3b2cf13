"""Symbols of an object that a compiler made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashdsa.jit.elf import exported_symbols, undefined_symbols

SOURCE = """
#include <stdlib.h>
extern int supplied_by_others(int);
extern int perhaps(int) __attribute__((weak));
static int local(int x) { return supplied_by_others(x) + (perhaps ? perhaps(x) : 0); }
__attribute__((visibility("hidden"))) int hidden(int x) { return local(x); }
__attribute__((weak)) int weak(int x) { return hidden(x); }
int offered(int x) { return weak(x) + abs(atoi("1")); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_symbols_that_an_object_needs_and_offers(tmp_path: Path) -> None:
    """No symbol of libc, which has versions, none that is weak, none that is local or hidden."""
    source, made = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    assert undefined_symbols(made) == ["supplied_by_others"]
    assert exported_symbols(made) == ["offered", "weak"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"no ELF")
    with pytest.raises(ValueError, match="expected an ELF file"):
        undefined_symbols(path)
