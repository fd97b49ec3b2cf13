"""The undefined symbols of an ELF object, so that linking fails by name instead of aborting."""

from __future__ import annotations

import struct

_SYMBOL_TABLE = 2
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_BINDING_LOCAL = 0
_UNDEFINED_SECTION = 0


def undefined_symbols(elf: bytes) -> list[str]:
    """Names that a 64-bit little-endian object expects from elsewhere.

    Raises:
        ValueError: not such an object.
    """
    if elf[:4] != b"\x7fELF" or elf[4] != 2 or elf[5] != 1:
        raise ValueError("elf: expected a 64-bit little-endian ELF object")
    (table_offset,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count = struct.unpack_from("<HH", elf, 58)
    sections = [
        _SECTION_HEADER.unpack_from(elf, table_offset + index * entry_size)
        for index in range(count)
    ]
    names: list[str] = []
    for _, kind, _, _, offset, size, link, _, _, entry in sections:
        if kind != _SYMBOL_TABLE:
            continue
        strings = sections[link][4]
        for at in range(offset, offset + size, entry):
            name, info, _, section, _, _ = _SYMBOL.unpack_from(elf, at)
            if section == _UNDEFINED_SECTION and info >> 4 != _BINDING_LOCAL and name:
                end = elf.index(b"\0", strings + name)
                names.append(elf[strings + name : end].decode())
    return names
