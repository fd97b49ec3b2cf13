"""Operand tiles in shared memory: layouts, cuts through them, and the strides of descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import tcgen05


@dataclass(frozen=True)
class Strides:
    """The byte offsets of a matrix descriptor."""

    leading: int
    stride: int


def operand_tile(pointer: Any, rows: int, depth: int, atom_kind: str, dtype: Any) -> Any:
    """The tensor (rows, depth) over shared memory at `pointer`, in a canonical layout.

    Args:
        pointer: aligned to 1024 bytes. rows: of A or columns of B. depth: along K.
        atom_kind: "K_SW128", "MN_INTER"...: CuTe's SmemLayoutAtomKind, the same on both machines.
        dtype: any type of the right width; elements are moved, not interpreted.
    """
    atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, atom_kind), dtype)
    order = (0, 1) if atom_kind.startswith("K_") else (1, 0)
    layout = cute.tile_to_shape(atom, (rows, depth), order=order)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def pieces(tile: Any, rows: int, depth: int, cut: str) -> Any:
    """A tile (rows, K) cut along K into pieces of `depth`: mode 3 numbers them.

    Args:
        cut: "tile": by a Tile, a tuple of layouts; "shape": by a Shape, a tuple of extents.
    """
    if cut == "tile":
        return cute.flat_divide(tile, (cute.make_layout(rows), cute.make_layout(depth)))
    return cute.flat_divide(tile, (rows, depth))


def descriptor_strides(piece: Any, atom_kind: str) -> Strides:
    """LBO and SBO of a piece (rows, K of one MMA), read off its layout.

    PTX ISA, "Leading dimension byte offset" and "Stride dimension byte offset". A stride along
    which the piece has one atom only, and that of the leading dimension of swizzled K-major
    layouts, have no meaning and are 16.
    """
    size = int(piece.element_type.width) // 8
    major, _, swizzle = atom_kind.partition("_")
    span = {"INTER": 16, "SW32": 32, "SW64": 64}.get(swizzle, 128) // size
    lines = 4 if swizzle == "SW128_32B" else 8
    rows, depth = (cute.size(piece, mode=[mode]) for mode in (0, 1))

    def offset(row: int, column: int) -> int:
        if row >= rows or column >= depth:
            return 16
        return int(size) * int(cute.crd2idx((row, column), piece.layout))

    if major == "K":
        leading = offset(0, span) if swizzle == "INTER" else 16
        return Strides(leading, offset(8, 0))
    if swizzle == "INTER":
        return Strides(offset(0, 8), offset(span, 0))
    return Strides(offset(span, 0), offset(0, lines))
