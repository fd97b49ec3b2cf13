"""Extensions with code for one GPU: what other GPUs run is cut out of their fat binaries."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<HHQ")
"""Version, bytes of the header and bytes of the entries, behind the magic number."""
FIRST_ENTRY = 16
ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of the entry's header and bytes of its code."""
ARCHITECTURE_AT = 28
SMALLEST_ENTRY = 64
MACHINE_CODE = 2


class Entry(NamedTuple):
    """Code for one architecture in a fat binary: where it begins and ends, and its header."""

    begin: int
    end: int
    kind: int
    architecture: int
    header: int


def keep_architecture(data: bytearray, architecture: int) -> None:
    """Leave machine code of one architecture, in place: zeros are packed to nothing.

    A fat binary with such code begins with it and ends after it. One without keeps its entries,
    whose code is zeros: it is loaded, and never launched.
    """
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        version, header, size = HEADER.unpack_from(data, at + len(MAGIC))
        begin, end = at + FIRST_ENTRY, at + FIRST_ENTRY + size
        if version != 1 or header != FIRST_ENTRY or end > len(data):
            at += len(MAGIC)  # these bytes happen to be something else
            continue
        entries = list(_entries(data, begin, end))
        kept = b"".join(
            data[one.begin : one.end]
            for one in entries
            if one.kind == MACHINE_CODE and one.architecture == architecture
        )
        if kept:
            data[begin:end] = kept + bytes(size - len(kept))
            struct.pack_into("<Q", data, at + 8, len(kept))
        else:
            for one in entries:
                code = one.begin + one.header
                data[code : one.end] = bytes(one.end - code)
        at = end


def _entries(data: bytearray, begin: int, end: int) -> Iterator[Entry]:
    """Entries between two places, up to what is none."""
    while begin + SMALLEST_ENTRY <= end:
        kind, _, header, code = ENTRY.unpack_from(data, begin)
        if header < 32 or code > end - begin - header:
            return
        (architecture,) = struct.unpack_from("<I", data, begin + ARCHITECTURE_AT)
        yield Entry(begin, begin + header + code, kind, architecture, header)
        begin += header + code
