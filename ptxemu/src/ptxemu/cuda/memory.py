"""Emulated memory: a file without a name that the program and the emulator map."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxemu.memory.global_memory import GlobalMemory

FIRST_BASE = 0x2000_0000_0000
"""Above what programs and shared libraries use, below the emulator's windows."""
_STRIDE = 1 << 40
_DEVICE_BYTES = 1 << 39
_SHARED_BYTES = 1 << 38
VARIABLE_BYTES = 1 << 32
"""Bytes at the end of each region, for the variables of modules."""
_ALIGNMENT = 256
_MAP_NORESERVE = 0x4000
"""Linux's; the module mmap has it from Python 3.13 on."""
_KINDS = ("cudaMalloc", "pinned memory", "managed memory")
_DEVICE = 0
"""The first of these kinds."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation or variable: [base, base + size)."""

    base: int
    size: int
    name: str
    is_device: bool = False
    """Memory of the device, which holds what was written there and nothing else."""


class EmulatedMemory:
    """The memory of one program.

    Device memory lies at [base, base + device_bytes), memory that the host shares follows it.
    """

    def __init__(self, number: int = 0) -> None:
        self.base = FIRST_BASE + number * _STRIDE
        self.file = os.memfd_create("ptxemu memory")
        size = _DEVICE_BYTES + _SHARED_BYTES
        os.ftruncate(self.file, size)
        flags = mmap.MAP_SHARED | _MAP_NORESERVE
        self._map = mmap.mmap(self.file, size, flags)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._blocks: dict[int, Block] = {}
        self._count = 0
        self._next_variable = {
            False: self.base + _DEVICE_BYTES - VARIABLE_BYTES,
            True: self.base + size - VARIABLE_BYTES,
        }

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Sizes for the stand-in: base address, device bytes, shared bytes, bytes for variables."""
        return self.base, _DEVICE_BYTES, _SHARED_BYTES, VARIABLE_BYTES

    def allocated(self, base: int, size: int, kind: int) -> None:
        """The program has allocated memory."""
        name = f"{_KINDS[kind]} #{self._count} ({size} bytes)"
        self._count += 1
        self._blocks[base] = Block(base, size, name, is_device=kind == _DEVICE)

    def freed(self, base: int) -> None:
        """The program has freed memory."""
        self._blocks.pop(base, None)

    def place_variable(self, name: str, initial: bytes, size: int, *, is_managed: bool) -> int:
        """Give a variable of a module an address for the program's life; returns it."""
        address = self._next_variable[is_managed]
        taken = max(size, 1) + _ALIGNMENT  # the gap shows accesses beyond the variable
        self._next_variable[is_managed] += -(-taken // _ALIGNMENT) * _ALIGNMENT
        self._blocks[address] = Block(address, size, name)
        self.view(address, size)[: len(initial)] = np.frombuffer(initial, dtype=np.uint8)
        return address

    def view(self, base: int, size: int) -> NDArray[np.uint8]:
        """The bytes [base, base + size)."""
        start = base - self.base
        return self._bytes[start : start + size]

    def register_in(self, memory: GlobalMemory) -> None:
        """Make all that is allocated now part of a launch's memory."""
        for block in self._blocks.values():
            if block.size:
                view = self.view(block.base, block.size)
                memory.register(view, block.name, base=block.base, is_shared=True)
        memory.blank_now = self._blank
        memory.blank.extend(self._blank())

    def _blank(self) -> list[tuple[int, int]]:
        return [h for b in self._blocks.values() if b.size and b.is_device for h in self._holes(b)]

    def _holes(self, block: Block) -> Iterator[tuple[int, int]]:
        """Addresses in a block on pages that the file does not have: nobody wrote or read them."""
        at, end = block.base - self.base, block.base - self.base + block.size
        while at < end:
            hole = os.lseek(self.file, at, os.SEEK_HOLE)
            if hole >= end:
                return
            at = self._data_behind(hole, end)
            yield self.base + hole, self.base + at

    def _data_behind(self, hole: int, end: int) -> int:
        try:
            return min(os.lseek(self.file, hole, os.SEEK_DATA), end)
        except OSError as error:
            if error.errno != errno.ENXIO:  # there is none
                raise
            return end

    def close(self) -> None:
        """Give the memory back; views that are still held keep the pages they map."""
        self._blocks.clear()
        os.close(self.file)
