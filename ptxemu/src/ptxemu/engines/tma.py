"""Tiles as sources and targets of copies: boxes of a tensor in global memory, rows in shared."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.matrix_layout import CHUNK
from ptxemu.descriptors.swizzle import PERIOD
from ptxemu.descriptors.tensor_map import INTERLEAVES, TensorMap, decode_map
from ptxemu.descriptors.tensor_map_bits import TENSOR_MAP_BYTES
from ptxemu.engines.copy_operation import holds, readable, report_async, writable
from ptxemu.errors import ExecutionError, UnsupportedInstructionError, fault
from ptxemu.events import AccessKind, Proxy
from ptxemu.machine.regions import report
from ptxemu.memory.address import CONST_WINDOW, PARAM_WINDOW, in_window
from ptxemu.memory.tile import Landing, Tile, box_shape, clip, clip_rows, landing
from ptxemu.numerics import tf32

if TYPE_CHECKING:
    from ptxemu.engines.copy_operation import Combine
    from ptxemu.machine.state import AsyncOperation, Cta, Warp
    from ptxemu.syntax.ast import Instruction

Bytes = NDArray[np.uint8]

SHARED_ALIGNMENT = 128
"""Alignment of a tile in shared memory, in bytes."""
GATHERED_ROWS = 4
_NAN_FILL = np.frombuffer(b"\xf7\x7f", dtype=np.uint8)
"""Bytes that NaN fill puts into every 16 bits, whatever the type."""
_TF32_NAN = np.uint32(0x7FFFE000)


def fetch_map(warp: Warp, address: int, instruction: Instruction) -> TensorMap:
    """The tensor map at a generic address, if hardware of this kind can use it.

    Raises:
        ExecutionError: there is none, or it needs another architecture.
        UnsupportedInstructionError: interleaved layouts.
    """
    machine = warp.cta.machine
    if address % 64:
        fault(instruction, f"the tensor map at 0x{address:x} is not aligned to 64 bytes")
    try:
        raw = machine.memory.span(address, TENSOR_MAP_BYTES)
        tensor_map = decode_map(raw.tobytes())
    except (ExecutionError, ValueError) as error:
        fault(instruction, f"tensor map at 0x{address:x}: {error}")
    if tensor_map.interleave:
        raise UnsupportedInstructionError(
            f"{instruction.span}: {instruction.opcode}: interleaved layouts "
            f"({INTERLEAVES[tensor_map.interleave]}) are not supported"
        )
    if tensor_map.needs_sm100 and machine.device.capability < (10, 0):
        what = f"{tensor_map.dtype} with swizzle {tensor_map.swizzle.name}"
        fault(instruction, f"{machine.device.arch} has no tensor map of {what}")
    return tensor_map


def report_map_read(operation: AsyncOperation, address: int) -> None:
    """The operation has read its tensor map, through the proxy of its own."""
    if not in_window(address, PARAM_WINDOW) and not in_window(address, CONST_WINDOW):
        report(operation, None, address, TENSOR_MAP_BYTES, AccessKind.READ, proxy=Proxy.TENSORMAP)


class GlobalTile(NamedTuple):
    """The box of a tensor at some coordinates, or with `gathered` four rows of a matrix.

    Attributes:
        coordinates: innermost first; for four rows the column, then the rows.
        map_address: where the map was read.
    """

    tensor_map: TensorMap
    coordinates: tuple[int, ...]
    gathered: bool
    map_address: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, outermost dimension first, and bytes of a row."""
        if self.gathered:
            return GATHERED_ROWS, self.tensor_map.row_bytes
        return box_shape(self.tensor_map)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Bytes, those outside the tensor included."""
        return prod(self.shape)

    def check(self, instruction: Instruction, *, writes: bool) -> None:
        """Refuse coordinates that hardware refuses (recorded on an H200).

        The row must start at a multiple of 16 bytes, and a store at no negative coordinate.
        """
        expected = GATHERED_ROWS + 1 if self.gathered else self.tensor_map.rank
        if self.gathered and self.tensor_map.rank != 2:
            fault(instruction, f"needs a matrix; the tensor map's rank is {self.tensor_map.rank}")
        if len(self.coordinates) != expected:
            message = f"{len(self.coordinates)} coordinates; the tensor map's rank is {expected}"
            fault(instruction, message)
        if self.gathered and self.tensor_map.box[1] != 1:
            fault(instruction, f"needs a box of one row; got {self.tensor_map.box[1]}")
        if self.coordinates[0] * self.tensor_map.element_bits % 128:
            fault(
                instruction,
                f"the innermost coordinate {self.coordinates[0]} of {self.tensor_map.dtype} is no "
                "multiple of 16 bytes (CUDA_ERROR_ILLEGAL_INSTRUCTION)",
            )
        if writes and min(self.coordinates) < 0:
            fault(
                instruction,
                f"a store at the negative coordinates {self.coordinates} "
                "(CUDA_ERROR_ILLEGAL_INSTRUCTION)",
            )

    def read(self, operation: AsyncOperation) -> Bytes:
        """The box, filled where it is outside the tensor."""
        report_map_read(operation, self.map_address)
        if self.gathered and (starts := self._whole_rows()) is not None:
            return _read_rows(operation, starts, self.tensor_map.row_bytes)
        data = filler(self.tensor_map, self.shape)
        rounds = self.tensor_map.dtype.startswith("tf32")
        tiles = []
        for tile, part in self._tiles(data):
            for view, rows in _views(operation, tile, part):
                rows[...] = rounded_tf32(view) if rounds else view
            tiles.append(tile)
        if operation.cta.machine.observer is not None:
            _report_reads(operation, tiles)
        return data

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the elements of the box that are inside the tensor."""
        report_map_read(operation, self.map_address)
        for tile, part in self._tiles(data.reshape(self.shape)):
            is_silent = True
            for view, rows in _views(operation, tile, part, writes=True):
                is_silent = is_silent and holds(operation, view, rows)
                view[...] = rows
            _report_tile(operation, tile, AccessKind.WRITE, is_silent=is_silent)

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """Combine the elements inside the tensor with `data`."""
        report_map_read(operation, self.map_address)
        for tile, part in self._tiles(data.reshape(self.shape)):
            for view, rows in _views(operation, tile, part, writes=True):
                held, arriving = np.ascontiguousarray(view), np.ascontiguousarray(rows)
                view[...] = combine(held, arriving)
            _report_tile(operation, tile, AccessKind.ATOMIC, element=self.tensor_map.dtype)

    def _whole_rows(self) -> list[int] | None:
        """Addresses of the four rows where all of them are inside the tensor and read as they are;
        else None."""
        made = self.tensor_map
        column, *rows = self.coordinates
        if (
            not 0 <= column <= made.dims[0] - made.box[0]
            or min(rows) < 0
            or max(rows) >= made.dims[1]
            or made.dtype.startswith("tf32")
        ):
            return None
        first, stride = made.address + column * made.element_bits // 8, made.strides[0]
        return [first + row * stride for row in rows]

    def _tiles(self, data: Bytes) -> Iterator[tuple[Tile, Bytes]]:
        """Yield what is inside the tensor, with its part of `data`."""
        if not self.gathered:
            tile = clip(self.tensor_map, self.coordinates)
            if tile is not None:
                yield tile, data[tile.within]
            return
        column, *rows = self.coordinates
        for number, tile in enumerate(clip_rows(self.tensor_map, column, rows)):
            if tile is not None:
                yield tile, data[number : number + 1][tile.within]


def _read_rows(operation: AsyncOperation, starts: list[int], size: int) -> Bytes:
    """Rows of `size` bytes, reported at once."""
    data = np.empty((len(starts), size), dtype=np.uint8)
    for number, start in enumerate(starts):
        data[number] = readable(operation, start, size)
    if operation.cta.machine.observer is not None:
        found = np.array(sorted(set(starts)), dtype=np.int64)
        report_async(operation, None, found, size, AccessKind.READ)
    return data


def _views(
    operation: AsyncOperation, tile: Tile, part: Bytes, *, writes: bool = False
) -> Iterator[tuple[Bytes, Bytes]]:
    """Views of global memory with the parts of the box that belong there.

    One view, unless rows overlap that are to be written or the tile spans allocations: then one
    for each row.
    """
    span = writable if writes else readable
    if not (writes and tile.may_overlap):
        try:
            held = span(operation, tile.start, tile.extent)
        except ExecutionError:
            if prod(tile.shape[:-1]) == 1:
                raise
        else:
            yield np.ndarray(tile.shape, np.uint8, held, 0, tile.strides), part
            return
    places = np.ndindex(*tile.shape[:-1])
    for start, place in zip(tile.row_starts().tolist(), places, strict=True):
        yield span(operation, start, tile.row_bytes), part[place]


def _report_reads(operation: AsyncOperation, tiles: list[Tile]) -> None:
    """Report tiles as read: rows of one length, as of tile::gather4, at once."""
    shapes = {tile.shape for tile in tiles}
    starts = np.array(sorted({tile.start for tile in tiles}), dtype=np.int64)
    if len(tiles) < 2 or len(shapes) > 1 or not tiles[0].is_contiguous:
        for tile in tiles:
            _report_tile(operation, tile, AccessKind.READ)
        return
    size = prod(tiles[0].shape)
    report_async(operation, None, starts, size, AccessKind.READ)


def _report_tile(
    operation: AsyncOperation,
    tile: Tile,
    kind: AccessKind,
    *,
    is_silent: bool = False,
    element: str = "",
) -> None:
    if operation.cta.machine.observer is None:
        return
    if tile.is_contiguous:
        starts, size = np.array([tile.start]), prod(tile.shape)
    else:
        starts, size = tile.row_starts(), tile.row_bytes
        if tile.may_overlap:
            starts = np.unique(starts)
    report_async(operation, None, starts, size, kind, is_silent=is_silent, element=element)


def filler(made: TensorMap, shape: tuple[int, ...]) -> Bytes:
    """Return the bytes that a copy reads outside the tensor."""
    if not made.fill:
        return np.zeros(shape, dtype=np.uint8)
    return np.tile(_NAN_FILL, prod(shape) // 2).reshape(shape)


def rounded_tf32(data: Bytes) -> Bytes:
    """float32 rounded to tf32 as a load does: to nearest even, NaN canonical."""
    values = np.ascontiguousarray(data).view(np.float32)
    narrow = tf32.narrow(values, "rn")
    bits = np.where(values != values, _TF32_NAN, narrow.view(np.uint32))
    return bits.view(np.uint8)


class SharedTile(NamedTuple):
    """Rows of a tile in a CTA's shared memory, swizzled by the bits of their addresses."""

    cta: Cta
    offset: int
    tensor_map: TensorMap
    rows: int

    @property
    def _landing(self) -> Landing:
        made = self.tensor_map
        phase = self.offset % PERIOD
        return landing(made.shared_row_bytes, self.rows, made.pitch, made.swizzle, phase)

    @property
    def _base(self) -> int:
        return self.offset - self.offset % PERIOD

    def check(self, instruction: Instruction) -> None:
        """Refuse an address that is misaligned, or where the tile does not fit."""
        if self.offset % SHARED_ALIGNMENT:
            fault(
                instruction,
                f"shared address 0x{self.offset:x} is not aligned to {SHARED_ALIGNMENT} bytes "
                "(CUDA_ERROR_MISALIGNED_ADDRESS)",
            )
        end = self._base + self._landing.end
        if end > len(self.cta.shared):
            fault(
                instruction,
                f"the tile at shared 0x{self.offset:x} ends at 0x{end:x}, beyond the CTA's "
                f"0x{len(self.cta.shared):x} bytes (CUDA_ERROR_ILLEGAL_ADDRESS)",
            )

    def read(self, operation: AsyncOperation) -> Bytes:
        """The rows, without the padding of sub-byte types."""
        self._report(operation, AccessKind.READ)
        data = self._gather()
        if self.tensor_map.is_padded:
            kept = CHUNK * self.tensor_map.element_bits // 8
            return np.ascontiguousarray(data.reshape(-1, CHUNK)[:, :kept]).reshape(-1)
        return data

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the rows; the padding of sub-byte types stays as it was."""
        if self.tensor_map.is_padded:
            kept = CHUNK * self.tensor_map.element_bits // 8
            padded = self._gather()
            padded.reshape(-1, CHUNK)[:, :kept] = data.reshape(-1, kept)
            data = padded
        where = self._landing
        observed = self.cta.machine.observer is not None
        is_silent = observed and np.array_equal(self._gather().reshape(-1), data.reshape(-1))
        if where.is_linear:
            self.cta.shared[self.offset : self.offset + data.size] = data.reshape(-1)
        else:
            units, dtype = self._units(where)
            units[where.units + self._base // where.unit] = data.reshape(-1).view(dtype)
        self.cta.machine.progress += 1
        self._report(operation, AccessKind.WRITE, is_silent=is_silent)

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """No instruction reduces into a tile of shared memory."""
        raise NotImplementedError

    def _gather(self) -> Bytes:
        where = self._landing
        if where.is_linear:
            return self.cta.shared[self.offset : self.offset + where.size].copy()
        units, _ = self._units(where)
        gathered: Bytes = units[where.units + self._base // where.unit].view(np.uint8)
        return gathered

    def _units(self, where: Landing) -> tuple[NDArray[np.generic], np.dtype[np.generic]]:
        """Shared memory as units; a complex number is 16 bytes that NumPy moves at once."""
        dtype: np.dtype[np.generic] = np.dtype(np.complex128 if where.unit == CHUNK else np.uint64)
        whole = len(self.cta.shared) // CHUNK * CHUNK
        return self.cta.shared[:whole].view(dtype), dtype

    def _report(
        self, operation: AsyncOperation, kind: AccessKind, *, is_silent: bool = False
    ) -> None:
        if operation.cta.machine.observer is not None:
            where = self._landing
            starts = where.starts + self._base
            report_async(operation, self.cta, starts, where.size, kind, is_silent=is_silent)
