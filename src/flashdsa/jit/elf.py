"""Symbols of a shared object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_VERSION_OF_NONE = ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")


def undefined_symbols(path: Path) -> list[str]:
    """Symbols that the object expects of others and that no library it needs is known to have:
    global symbols, without a version (libc's have one), that are not weak."""
    return sorted(
        name
        for name, symbol, version in _symbols(path)
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and version in _VERSION_OF_NONE
    )


def exported_symbols(path: Path) -> list[str]:
    """Symbols of the object that others can call."""
    return sorted(
        name
        for name, symbol, _ in _symbols(path)
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    )


def _symbols(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """(name, entry, version index) of each dynamic symbol with a name."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        for number, symbol in enumerate(table.iter_symbols()):
            if symbol.name:
                version = versions.get_symbol(number)["ndx"] if versions else "VER_NDX_GLOBAL"
                yield symbol.name, symbol, version
