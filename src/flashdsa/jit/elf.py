"""Symbols of a shared object, read without a package for ELF: servers load kernels, too."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"
"""First bytes of a file of 64 bits, little-endian, as hosts of kernels have them."""
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNSYM, _VERSYM = 11, 0x6FFFFFFF
_UNDEFINED = 0
_LOCAL, _GLOBAL = 0, 1
_FIRST_VERSION = 2
"""Smaller indices say that a symbol has no version."""


class _Symbol(NamedTuple):
    name: str
    binding: int
    section: int
    version: int


def undefined_symbols(path: Path) -> list[str]:
    """List the symbols that the object expects of a library that it does not name.

    These are global symbols without a version (libc's have one) that are not weak.

    Raises:
        ValueError: not an ELF file of 64 bits.
    """
    return sorted(
        one.name
        for one in _symbols(path)
        if one.section == _UNDEFINED and one.binding == _GLOBAL and one.version < _FIRST_VERSION
    )


def exported_symbols(path: Path) -> list[str]:
    """List the symbols of the object that others can call.

    Raises:
        ValueError: not an ELF file of 64 bits.
    """
    return sorted(
        one.name for one in _symbols(path) if one.section != _UNDEFINED and one.binding != _LOCAL
    )


def _symbols(path: Path) -> Iterator[_Symbol]:
    """Yield each dynamic symbol that has a name."""
    image = path.read_bytes()
    if not image.startswith(_MAGIC):
        raise ValueError(f"{path}: expected an ELF file of 64 bits")
    (first,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [_SECTION.unpack_from(image, first + number * size) for number in range(count)]
    versions = next((at for _, kind, _, _, at, *_ in sections if kind == _VERSYM), None)
    for _, kind, _, _, at, length, link, *_ in sections:
        if kind != _DYNSYM:
            continue
        names = sections[link][4]
        for number in range(length // _SYMBOL.size):
            offset, info, _, section, *_ = _SYMBOL.unpack_from(image, at + number * _SYMBOL.size)
            start = names + offset
            name = image[start : image.index(b"\0", start)].decode()
            version = 0
            if versions is not None:
                (version,) = struct.unpack_from("<H", image, versions + 2 * number)
            if name:
                yield _Symbol(name, info >> 4, section, version)
