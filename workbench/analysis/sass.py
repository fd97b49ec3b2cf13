"""Machine code as data: nvdisasm's text with its register columns and source lines, parsed.

nvdisasm marks for each instruction which registers it writes (^), reads (v) or both (x). These
marks are exact, wide operands included, except at a CALL, which it takes to write whatever the ABI
lets any callee write; those are dropped here. The signs between the marks (:) are its own
idea of what is live; `live_registers` says why it is too much, and does without it.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flashdsa.toolchain import Disassembler

_SECTION = re.compile(r"^//-+ \.text\.(\S+)")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
_FILE = re.compile(r'^\s*//## File "(.*?)", line (\d+)')
_GUARD = re.compile(r"^@(!?)(U?P[0-9T]+)\s+")
_COLUMNS = "// |"
PTX_TEXT = ".nv_debug_ptx_txt"
"""The file that nvdisasm names where lines are those of the PTX."""


@dataclass(frozen=True)
class Line:
    """A line of the source; `file` is PTX_TEXT where it is the PTX's."""

    file: str
    number: int


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        text: with its guard and labels. opcode: "LDG.E.128". guard: "@!P0" or "".
        reads, writes: general registers, as bits. live: as nvdisasm counts, of general registers.
        targets: labels that it names.
    """

    address: int
    text: str
    opcode: str
    guard: str
    reads: int
    writes: int
    live: int
    targets: tuple[str, ...]
    line: Line | None

    @property
    def base(self) -> str:
        """The opcode without its modifiers: "LDG"."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in the order of their addresses.

    Attributes:
        labels: name -> index of the instruction that follows.
        called_from: index of the first instruction of functions that the kernel calls; all of them
            lie behind the kernel's own code. None: there are none.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    called_from: int | None


def read_code(image: bytes, tool: Disassembler) -> tuple[str, dict[str, Code]]:
    """(architecture, every kernel of a cubin), with lines where the cubin has them."""
    lines: dict[tuple[str, int], Line] = {}
    if b"\0.nv_debug_line_sass\0" in image or b"\0.debug_line\0" in image:
        lines = _lines(tool.text(image, "-c", "-g", "-gp"))
    listing = tool.text(image, "-c", "-lrm", "narrow")
    target = re.search(r"^\s*\.target\s+(sm_\w+)", listing, re.MULTILINE)
    arch = target.group(1) if target else "unknown"
    return arch, {name: _code(name, rows, lines) for name, rows in _sections(listing)}


def _sections(listing: str) -> Iterator[tuple[str, list[str]]]:
    name, rows = "", list[str]()
    for row in listing.splitlines():
        found = _SECTION.match(row)
        if found:
            if name:
                yield name, rows
            name, rows = found.group(1), []
        rows.append(row)
    if name:
        yield name, rows


def _lines(listing: str) -> dict[tuple[str, int], Line]:
    """(kernel, address) -> line of the source; of the PTX where no kernel has such."""
    of_source, of_ptx = {}, {}
    for name, rows in _sections(listing):
        source: Line | None = None
        ptx: Line | None = None
        for row in rows:
            file = _FILE.match(row)
            if file:
                line = Line(file.group(1), int(file.group(2)))
                if line.file.startswith(PTX_TEXT):
                    ptx = line
                else:
                    source = None if _stands_for_none(line) else line
                continue
            found = _INSTRUCTION.match(row)
            if found and source:
                of_source[name, int(found.group(1), 16)] = source
            if found and ptx:
                of_ptx[name, int(found.group(1), 16)] = ptx
    return of_source or of_ptx


def _stands_for_none(line: Line) -> bool:
    """Whether it is what CuTe DSL says of code without one: the launching function's decorator."""
    return linecache.getline(line.file, line.number).lstrip().startswith("@")


@dataclass(frozen=True)
class _Columns:
    """Columns of general registers in a listing: (text position, register), and of their count."""

    count: slice
    registers: tuple[tuple[int, int], ...]


def _columns(rows: list[str]) -> _Columns | None:
    """Read the ruler above a kernel: rows of digits, the last of them after a '#'."""
    ruler: list[str] = []
    for row in rows:
        at = row.find(_COLUMNS)
        if at < 0 or row[:at].strip():
            ruler = []
            continue
        ruler.append(row)
        group = row[at + len(_COLUMNS) :].partition("|")[0]
        if group.lstrip().startswith("#"):
            start = at + len(_COLUMNS) + group.index("#") + 1
            end = at + len(_COLUMNS) + len(group)
            registers = tuple(
                (column, int("".join(r[column] for r in ruler if r[column : column + 1].isdigit())))
                for column in range(start, end)
                if row[column].isdigit()
            )
            first = registers[0][0] if registers else end
            return _Columns(slice(at + len(_COLUMNS), first), registers)
    return None


def _code(name: str, rows: list[str], lines: dict[tuple[str, int], Line]) -> Code:
    columns = _columns(rows)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    called_from = None
    for row in rows:
        label = _LABEL.match(row)
        if label:
            labels[label.group(1)] = len(instructions)
            if label.group(1).startswith("$") and called_from is None:
                called_from = len(instructions)
            continue
        found = _INSTRUCTION.match(row)
        if found:
            address = int(found.group(1), 16)
            line = lines.get((name, address))
            instructions.append(_instruction(address, found.group(2), row, columns, line))
    return Code(name, tuple(instructions), labels, called_from)


def _instruction(
    address: int, text: str, row: str, columns: _Columns | None, line: Line | None
) -> Instruction:
    guard = _GUARD.match(text)
    rest = text[guard.end() :] if guard else text
    opcode = rest.split()[0]
    reads = writes = live = 0
    if columns:
        count = row[columns.count].strip()
        live = int(count) if count.isdigit() else 0
        for column, register in () if opcode.startswith("CALL") else columns.registers:
            mark = row[column : column + 1]
            if mark in "vx" and mark:
                reads |= 1 << register
            if mark in "^x" and mark:
                writes |= 1 << register
    return Instruction(
        address=address,
        text=" ".join(text.split()),
        opcode=opcode,
        guard=guard.group(0).strip() if guard else "",
        reads=reads,
        writes=writes,
        live=live,
        targets=tuple(_targets(rest)),
        line=line,
    )


def _targets(text: str) -> list[str]:
    named = re.findall(r"`\((\.L_x_\d+|\$[^)\s]+)\)", text)
    table = re.search(r"BRANCH_TARGETS ([^\"]+)\"", text)
    return named + (re.findall(r"\.L_x_\d+", table.group(1)) if table else [])
