"""A cubin's own records of its kernels: an ELF file with NVIDIA's sections; register limits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import MAX_REGISTERS, SM100
from flashdsa.plan.roles import registers_each

# .nv.info holds records (format, attribute, value): format 4 has a size and bytes, 1 no value,
# 2 a byte and 3 two bytes in place of the size. Numbers as `cuobjdump -elf` names them.
_SIZED, _HALF, _BYTE = 4, 3, 2
_MAX_THREADS, _REQNTID, _FRAME_SIZE, _MIN_STACK = 0x05, 0x10, 0x11, 0x12
_MAXREG_COUNT, _REGCOUNT, _NUM_BARRIERS = 0x1B, 0x2F, 0x4C


@dataclass(frozen=True)
class KernelRecord:
    """Properties of one kernel in the cubin.

    Attributes:
        registers: of each thread at launch. register_cap: upper limit by .maxnreg, .reqntid or
            .minnctapersm; None: not recorded.
        threads: of a CTA, by .reqntid or .maxntid; None: not fixed.
        stack_bytes, local_bytes: of each thread. shared_bytes: static; the launch sets dynamic.
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


def read_cubin(image: bytes) -> list[KernelRecord]:
    """Every kernel, in the file's order.

    Raises:
        ArgumentValueError: no ELF file, none of CUDA, or none with a kernel.
    """
    if not is_elf(image):
        raise ArgumentValueError("not a cubin: no ELF file (fatbins: cuobjdump -xelf all FILE)")
    try:
        return _read(ELFFile(BytesIO(image)))
    except (ELFError, ConstructError, struct.error, AttributeError, KeyError) as error:
        raise ArgumentValueError(f"not a cubin: damaged ELF file ({error})") from error


def is_elf(image: bytes) -> bool:
    """Whether it starts as one."""
    return image[:4] == b"\x7fELF"


def _read(file: Any) -> list[KernelRecord]:
    if file.elfclass != 64 or file["e_machine"] != "EM_CUDA":
        raise ArgumentValueError(
            "not a cubin: an ELF file for another machine; `cuobjdump -xelf all FILE` extracts "
            "the cubins of an object file or a program"
        )
    sections = {section.name: section for section in file.iter_sections()}
    symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
    common = _common(sections)
    records = [
        _record(sections, name.removeprefix(".text."), symbols, common)
        for name in sections
        if name.startswith(".text.") and f".nv.info.{name.removeprefix('.text.')}" in sections
    ]
    if not records:
        raise ArgumentValueError("the cubin has no kernel")
    return records


def _attributes(image: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, value of one or two bytes, bytes) of each record of an .nv.info section."""
    at = 0
    while at < len(image):
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


def _common(sections: dict[str, Any]) -> dict[tuple[int, int], int]:
    """(attribute, symbol) -> value, of what .nv.info says of each function."""
    known = {}
    if ".nv.info" in sections:
        for attribute, _, data in _attributes(sections[".nv.info"].data()):
            if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK) and len(data) == 8:
                symbol, value = struct.unpack("<II", data)
                known[attribute, symbol] = value
    return known


def _record(
    sections: dict[str, Any], name: str, symbols: list[str], common: dict[tuple[int, int], int]
) -> KernelRecord:
    index, text = symbols.index(name), sections[f".text.{name}"]
    own = {
        attribute: (value, data)
        for attribute, value, data in _attributes(sections[f".nv.info.{name}"].data())
    }
    threads = None
    for attribute in (_MAX_THREADS, _REQNTID):
        if attribute in own:
            x, y, z = struct.unpack("<III", own[attribute][1])
            threads = x * y * z
    cap = own[_MAXREG_COUNT][0] if _MAXREG_COUNT in own else 0
    sizes = {key: section["sh_size"] for key, section in sections.items()}
    # NOTE: older layouts keep both counts in the section header: registers in the upper byte of
    # sh_info, barriers in bits 20 to 26 of sh_flags.
    barriers = own[_NUM_BARRIERS][0] if _NUM_BARRIERS in own else text["sh_flags"] >> 20 & 0x7F
    return KernelRecord(
        name=name,
        registers=common.get((_REGCOUNT, index), text["sh_info"] >> 24),
        register_cap=cap if 0 < cap <= 255 else None,
        threads=threads,
        stack_bytes=common.get((_MIN_STACK, index), 0),
        local_bytes=sizes.get(f".nv.local.{name}", 0),
        shared_bytes=sizes.get(f".nv.shared.{name}", 0),
        barriers=barriers,
        code_bytes=text["sh_size"],
    )


CTA_REGISTERS = SM100.registers
"""32-bit registers of an SM, and of a CTA; as many on sm_90a."""


def registers_by_threads(threads: int | None) -> int:
    """Return the most registers of each thread at launch; None: the launch sets the threads."""
    return MAX_REGISTERS if threads is None else registers_each(threads, CTA_REGISTERS)
