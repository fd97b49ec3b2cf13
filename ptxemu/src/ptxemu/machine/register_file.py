"""A warp's registers in one block of memory, where NumPy and machine code both find them.

To Python it is a list by slot: an array that is read is a copy, one that is assigned is copied in,
so that arrays of lanes never change in place there either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.lanes import STORAGE, WARP_SIZE, Lanes

ROW_BYTES = 128
"""Bytes of a row: a register of 32 bits or less; wider registers take two rows or four."""
SPARE_ROWS = 128
"""Rows for other values that machine code needs: special registers and addresses of variables."""
_BOOL, _16, _32, _64, _128 = range(5)
_KINDS = {1: _BOOL, 2: _16, 4: _32, 8: _64}
_ROWS = {_BOOL: 1, _16: 1, _32: 1, _64: 2, _128: 4}


class RegisterLayout:
    """Locations of a kernel's registers.

    Attributes:
        offsets: first byte of each register, by slot; spare: first byte of the first spare row.
        places: kind of array and index into it, by slot.
        rows: rows in all.
    """

    def __init__(self, types: Sequence[str]) -> None:
        """`types`: the registers' PTX types, by slot."""
        kinds = [_128 if type_ == "b128" else _KINDS[STORAGE[type_].itemsize] for type_ in types]
        self.offsets = [0] * len(kinds)
        self.places = [(0, 0)] * len(kinds)
        row = 0
        for wanted in (_128, _64, _32, _16, _BOOL):  # wide ones first: all are aligned
            for slot, kind in enumerate(kinds):
                if kind == wanted:
                    self.offsets[slot] = row * ROW_BYTES
                    self.places[slot] = (kind, row // _ROWS[kind])
                    row += _ROWS[kind]
        self.spare = row * ROW_BYTES
        self._indices: dict[tuple[int, ...], NDArray[np.intp]] = {}
        self._offsets: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self.rows = -(-(row + SPARE_ROWS) // 4) * 4

    def word_indices(self, slots: tuple[int, ...]) -> NDArray[np.intp]:
        """Return the rows of registers of 32 bits."""
        found = self._indices.get(slots)
        if found is None:
            found = np.array([self.places[slot][1] for slot in slots], np.intp)
            self._indices[slots] = found
        return found

    def byte_offsets(self, slots: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the first bytes of registers, as an array that stays."""
        found = self._offsets.get(slots)
        if found is None:
            found = self._offsets[slots] = np.array([self.offsets[s] for s in slots], np.int64)
        return found


class RegisterFile:
    """The registers of one warp."""

    __slots__ = ("_arrays", "_bytes", "_places", "address", "layout", "num_spare")

    def __init__(
        self,
        layout: RegisterLayout,
        data: NDArray[np.uint8],
        arrays: tuple[Lanes, ...],
        address: int,
    ) -> None:
        self._bytes = data
        self._arrays = arrays
        self.layout = layout
        self._places = layout.places
        self.address = address
        self.num_spare = 0
        """Spare values that have been filled in."""

    def __getitem__(self, slot: int) -> Lanes:
        """A register's lanes."""
        kind, index = self._places[slot]
        lanes: Lanes = self._arrays[kind][index].copy()
        return lanes

    def item(self, slot: int, lane: int) -> int:
        """A register of up to 64 bits in one lane."""
        kind, index = self._places[slot]
        return int(self._arrays[kind].item(index, lane))

    def __setitem__(self, slot: int, lanes: Lanes) -> None:
        kind, index = self._places[slot]
        array = self._arrays[kind]
        array[index] = lanes if lanes.dtype == array.dtype else lanes.view(array.dtype)

    def __len__(self) -> int:
        return len(self._places)

    def fill_spare(self, offset: int, lanes: Lanes) -> None:
        """Put a spare value where it belongs."""
        self._bytes[offset : offset + lanes.nbytes] = lanes.view(np.uint8)

    def spare(self, start: int, end: int) -> NDArray[np.uint8]:
        """Spare values that have been filled in, as bytes."""
        return self._bytes[start:end].copy()

    def words(self, slots: tuple[int, ...]) -> NDArray[np.uint32]:
        """Registers of 32 bits as rows (n, 32)."""
        found: NDArray[np.uint32] = self._arrays[_32].take(self.layout.word_indices(slots), axis=0)
        return found

    def set_words(self, slots: tuple[int, ...], words: NDArray[np.uint32]) -> None:
        """Write registers of 32 bits, given as rows (n, 32)."""
        self._arrays[_32][self.layout.word_indices(slots)] = words

    def tobytes(self) -> bytes:
        """All bytes."""
        return self._bytes.tobytes()


def register_files(layout: RegisterLayout, count: int) -> list[RegisterFile]:
    """The registers of `count` warps, zeroed."""
    size = layout.rows * ROW_BYTES
    block = np.zeros(count * size + ROW_BYTES, np.uint8)
    start = -int(block.ctypes.data) % ROW_BYTES
    address = int(block.ctypes.data) + start
    data = block[start : start + count * size].reshape(count, size)
    rows = data.reshape(count, layout.rows, ROW_BYTES)
    arrays = (
        rows.view(np.bool_)[..., :WARP_SIZE],
        rows.view(np.uint16)[..., :WARP_SIZE],
        rows.view(np.uint32),
        data.view(np.uint64).reshape(count, -1, WARP_SIZE),
        data.view(np.uint64).reshape(count, -1, WARP_SIZE, 2),
    )
    return [
        RegisterFile(layout, data[warp], tuple(one[warp] for one in arrays), address + warp * size)
        for warp in range(count)
    ]
