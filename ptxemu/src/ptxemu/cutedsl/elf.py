"""The undefined symbols of an ELF object, so that linking fails by name instead of aborting."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile


def undefined_symbols(elf: bytes) -> list[str]:
    """Names that a 64-bit little-endian object expects from elsewhere.

    Raises:
        ValueError: not such an object.
    """
    try:
        file: Any = ELFFile(BytesIO(elf))
    except ELFError as error:
        raise ValueError(f"elf: expected an ELF object: {error}") from error
    if file.elfclass != 64 or not file.little_endian:
        raise ValueError("elf: expected a 64-bit little-endian ELF object")
    return [
        symbol.name
        for table in file.iter_sections("SHT_SYMTAB")
        for symbol in table.iter_symbols()
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] != "STB_LOCAL"
        and symbol.name
    ]
