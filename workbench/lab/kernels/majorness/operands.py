"""Operand tiles, their descriptors and their image, which the kernels of both machines share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int64, Uint8, Uint16, Uint32, cute
from cutlass.cute.nvgpu import tcgen05

from workbench.lab.kernels.majorness.plan import CUTS, NUM_PARTS, MajornessPlan


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


THREADS = 128
CARRIERS = {1: Uint8, 2: Uint16}
"""Types that carry elements of 1 and 2 bytes."""
BuildDescriptor = Callable[[Any, Strides, str], Any]
"""Function of a shared address, strides and a swizzle ("INTER", "SW128"...) to the 64 bits."""
Descriptors = dict[str, Any]
"""Descriptors by cut: [part][step]."""


def tile_a(arena: Any, plan: MajornessPlan) -> Any:
    """A (m, k) at the start of the arena."""
    atom = plan.swizzle_name(plan.a_major)
    return operand_tile(arena, plan.m, plan.k, atom, CARRIERS[plan.element_bytes])


def tile_b(arena: Any, plan: MajornessPlan) -> Any:
    """B (n, k) after A."""
    atom = plan.swizzle_name(plan.b_major)
    return operand_tile(arena + plan.b_offset, plan.n, plan.k, atom, CARRIERS[plan.element_bytes])


@cute.jit
def fill_operands(
    s: cute.Tensor, do: cute.Tensor, arena: cute.Pointer, plan: cutlass.Constexpr
) -> None:
    """Copy S^T and dO^T from row-major s (k, m), do (k, n) to shared memory, by all threads."""
    tid, _, _ = cute.arch.thread_idx()
    s_b = tile_b(arena, plan)
    for i in cutlass.range(tid, plan.n * plan.k, THREADS):
        s_b[i % plan.n, i // plan.n] = do[i // plan.n, i % plan.n]
    s_a = tile_a(arena, plan)
    for i in cutlass.range(tid, plan.m * plan.k, THREADS):
        s_a[i % plan.m, i // plan.m] = s[i // plan.m, i % plan.m]


@cute.jit
def erase_b(arena: cute.Pointer, plan: cutlass.Constexpr, first: cutlass.Constexpr) -> None:
    """Write zeros over B from head `first` on, by all threads."""
    tid, _, _ = cute.arch.thread_idx()
    s_b = tile_b(arena, plan)
    for i in cutlass.range(tid, plan.n * (plan.k - first), THREADS):
        s_b[i % plan.n, first + i // plan.n] = CARRIERS[plan.element_bytes](0)


@cute.jit
def copy_image(image: cute.Tensor, arena: cute.Pointer, plan: cutlass.Constexpr) -> None:
    """Copy the operands' shared memory to global memory, as it is."""
    tid, _, _ = cute.arch.thread_idx()
    words = cute.make_tensor(
        cute.recast_ptr(arena, dtype=Uint32), cute.make_layout(plan.smem_bytes // 4)
    )
    for i in cutlass.range(tid, plan.smem_bytes // 4, THREADS):
        image[i] = words[i]


def step_descriptors(
    arena: Any, plan: MajornessPlan, build: BuildDescriptor
) -> tuple[Descriptors, Descriptors]:
    """Make those of A and of B for every cut, part and k-step, each from its own piece."""
    a: Descriptors = {}
    b: Descriptors = {}
    for cut in CUTS:
        b[cut] = descriptors_of_tile(tile_b(arena, plan), plan.n, plan, plan.b_major, cut, build)
        a[cut] = descriptors_of_tile(tile_a(arena, plan), plan.m, plan, plan.a_major, cut, build)
    return a, b


def descriptors_of_tile(
    tile: Any, rows: int, plan: MajornessPlan, major: str, cut: str, build: BuildDescriptor
) -> list[list[Any]]:
    """Make the descriptors of a tile (rows, k), [part][step], each from its own piece."""
    atom = plan.swizzle_name(major)
    parts = pieces(tile, rows, plan.part_k, cut)
    found: list[list[Any]] = []
    for part in range(NUM_PARTS):
        steps = pieces(parts[None, None, 0, part], rows, plan.step_k, cut)
        found.append([])
        for step in range(plan.steps):
            piece = steps[None, None, 0, step]
            strides = descriptor_strides(piece, atom)
            found[part].append(build(piece.iterator.toint(), strides, atom.partition("_")[2]))
    return found


def write_descriptors(out: Any, plan: MajornessPlan, a: Descriptors, b: Descriptors) -> None:
    """Write all of them to out (2 cuts, 2 parts, steps, 2: A and B)."""
    for number, cut in enumerate(CUTS):
        for part in range(NUM_PARTS):
            for step in range(plan.steps):
                out[number, part, step, 0] = Int64(a[cut][part][step])
                out[number, part, step, 1] = Int64(b[cut][part][step])
