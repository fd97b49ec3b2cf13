"""A cubin's own records of its kernels: an ELF file with NVIDIA's sections, read without tools."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flashdsa.errors import ArgumentValueError

_ELF64 = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MACHINE_CUDA = 190
_TYPE_SYMTAB = 2
# .nv.info holds records (format, attribute, value): format 4 has a size and bytes, 1 no value,
# 2 a byte and 3 two bytes in place of the size. Numbers as `cuobjdump -elf` names them.
_SIZED, _HALF, _BYTE = 4, 3, 2
_MAX_THREADS, _REQNTID, _FRAME_SIZE, _MIN_STACK = 0x05, 0x10, 0x11, 0x12
_MAXREG_COUNT, _REGCOUNT, _NUM_BARRIERS = 0x1B, 0x2F, 0x4C


@dataclass(frozen=True)
class KernelRecord:
    """What the cubin says of one kernel.

    Attributes:
        registers: of each thread at launch. register_cap: at most, by .maxnreg, .reqntid or
            .minnctapersm; None: not recorded.
        threads: of a CTA, by .reqntid or .maxntid; None: not fixed.
        stack_bytes, local_bytes: of each thread. shared_bytes: static, dynamic is the launch's.
        barriers: named barriers (bar.sync); mbarriers are shared memory.
    """

    name: str
    registers: int
    register_cap: int | None
    threads: int | None
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    barriers: int
    code_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


def read_cubin(image: bytes) -> list[KernelRecord]:
    """Every kernel, in the file's order.

    Raises:
        ArgumentValueError: no ELF file, none of CUDA, or none with a kernel.
    """
    if not is_elf(image):
        raise ArgumentValueError("not a cubin: no ELF file (fatbins: cuobjdump -xelf all FILE)")
    try:
        return _read(image)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, ArgumentValueError):
            raise
        raise ArgumentValueError(f"not a cubin: damaged ELF file ({error})") from error


def is_elf(image: bytes) -> bool:
    """Whether it starts as one."""
    return image[:4] == b"\x7fELF"


def _read(image: bytes) -> list[KernelRecord]:
    header = _ELF64.unpack_from(image)
    if header[0][4] != 2 or header[2] != _MACHINE_CUDA:
        raise ArgumentValueError(
            "not a cubin: an ELF file for another machine; `cuobjdump -xelf all FILE` extracts "
            "the cubins of an object file or a program"
        )
    sections = _sections(image, header[6], header[12], header[13])
    symbols = _symbol_names(image, sections)
    common = _common(image, sections)
    records = []
    for section in sections:
        if section.name.startswith(".text."):
            name = section.name.removeprefix(".text.")
            if name in {s.name.removeprefix(".nv.info.") for s in sections}:
                records.append(_record(image, sections, section, symbols, common))
    if not records:
        raise ArgumentValueError("the cubin has no kernel")
    return records


def _sections(image: bytes, start: int, count: int, names: int) -> list[_Section]:
    raw = [_SECTION.unpack_from(image, start + i * _SECTION.size) for i in range(count)]
    strings = raw[names][4]
    return [
        _Section(_string(image, strings + r[0]), r[1], r[2], r[4], r[5], r[6], r[7]) for r in raw
    ]


def _string(image: bytes, start: int) -> str:
    return image[start : image.index(b"\0", start)].decode(errors="replace")


def _symbol_names(image: bytes, sections: list[_Section]) -> list[str]:
    for section in sections:
        if section.kind == _TYPE_SYMTAB:
            strings = sections[section.link].offset
            return [
                _string(image, strings + _SYMBOL.unpack_from(image, at)[0])
                for at in range(section.offset, section.offset + section.size, _SYMBOL.size)
            ]
    return []


def _attributes(image: bytes, section: _Section) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, value of one or two bytes, bytes) of each record."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", image, at)
        at += 4
        data = b""
        if form == _SIZED:
            data = image[at : at + value]
            at += value
        elif form == _BYTE:
            value &= 0xFF
        elif form != _HALF:
            value = 0
        yield attribute, value, data


def _common(image: bytes, sections: list[_Section]) -> dict[tuple[int, int], int]:
    """(attribute, symbol) -> value, of what .nv.info says of each function."""
    known = {}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, _, data in _attributes(image, section):
                if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK) and len(data) == 8:
                    symbol, value = struct.unpack("<II", data)
                    known[attribute, symbol] = value
    return known


def _record(
    image: bytes,
    sections: list[_Section],
    text: _Section,
    symbols: list[str],
    common: dict[tuple[int, int], int],
) -> KernelRecord:
    name = text.name.removeprefix(".text.")
    index = symbols.index(name)
    own: dict[int, tuple[int, bytes]] = {}
    for section in sections:
        if section.name == f".nv.info.{name}":
            own = {
                attribute: (value, data) for attribute, value, data in _attributes(image, section)
            }
    threads = None
    for attribute in (_MAX_THREADS, _REQNTID):
        if attribute in own:
            x, y, z = struct.unpack("<III", own[attribute][1])
            threads = x * y * z
    cap = own[_MAXREG_COUNT][0] if _MAXREG_COUNT in own else 0
    sizes = {section.name: section.size for section in sections}
    # NOTE: older layouts keep both counts in the section header: registers in the upper byte of
    # sh_info, barriers in bits 20 to 26 of sh_flags.
    barriers = own[_NUM_BARRIERS][0] if _NUM_BARRIERS in own else text.flags >> 20 & 0x7F
    return KernelRecord(
        name=name,
        registers=common.get((_REGCOUNT, index), text.info >> 24),
        register_cap=cap if 0 < cap <= 255 else None,
        threads=threads,
        stack_bytes=common.get((_MIN_STACK, index), 0),
        local_bytes=sizes.get(f".nv.local.{name}", 0),
        shared_bytes=sizes.get(f".nv.shared.{name}", 0),
        barriers=barriers,
        code_bytes=text.size,
    )
