"""Inputs of the operand-form kernels as bytes of shared memory and rows of TMEM, and what D is.

The addresses come from the plan's tiles, cell positions from its data paths; neither is read back
from the descriptors, so a descriptor that means another layout gives a wrong D.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashdsa.dsl.umma import SharedOperand, SharedTile, UmmaProduct
from flashdsa.hw import TMEM_LANES
from workbench.lab.kernels.operand_forms.sm100.plan import FormPlan

Matrix = NDArray[np.float64]
Words = NDArray[np.uint32]
INTEGERS, RANDOM = "integers", "random"
KINDS = (INTEGERS, RANDOM)


@dataclass(frozen=True)
class Inputs:
    """Of one launch of one CTA or pair.

    Attributes:
        image: (CTAs, words) of shared memory; rows: (CTAs, rows, words) of A for TMEM.
        expected: (CTAs, 128, columns) of D in float64; NaN where D has no element.
        magnitude: the same of the sum of |a| |b|.
    """

    image: Words
    rows: Words
    expected: Matrix
    magnitude: Matrix


def to_bf16(values: Matrix) -> NDArray[np.uint16]:
    """Bits of finite numbers rounded to bf16, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def from_bf16(bits: NDArray[np.uint16]) -> Matrix:
    """The numbers."""
    numbers: Matrix = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return numbers


def make_inputs(plan: FormPlan, kind: str, seed: int) -> Inputs:
    """Operands, the kernel's arguments and what it has to compute.

    Args:
        kind: "integers": of -3 to 3, so every sum is exact; "random": normal numbers in bf16, or
            where a product's D becomes A, sixteenths between -1 and 1, so that its D is exact.
    """
    generator = np.random.default_rng(seed)
    exact_source = plan.source is not None
    image = np.zeros((plan.cta_group, plan.image_bytes), dtype=np.uint8)
    product = plan.product
    groups = product.parts if getattr(product.a, "distinct", False) else 1
    rows = np.zeros((plan.cta_group, plan.a_rows, plan.a_words), dtype=np.uint32)
    left: list[list[Matrix]] = []
    right: list[Matrix] = []
    sources = None if plan.source is None else _source_values(plan, kind, generator, image)
    for cta in range(plan.cta_group):
        right.append(_values(generator, kind, (product.b.extent, product.k), exact_source))
        _write(image[cta], product.b, right[-1])
        if sources is not None:
            left.append([sources[cta]])
            continue
        left.append([_values(generator, kind, (product.rows, product.k)) for _ in range(groups)])
        if isinstance(product.a, SharedOperand):
            _write(image[cta], product.a, left[-1][0])
        else:
            rows[cta] = to_bf16(np.concatenate(left[-1])).view(np.uint32)
    b = np.concatenate(right)
    expected = np.stack([_cells(product, [a @ b.T for a in of_cta]) for of_cta in left])
    absolute = [[abs(a) @ abs(b).T for a in of_cta] for of_cta in left]
    magnitude = np.stack([_cells(product, of_cta) for of_cta in absolute])
    return Inputs(np.ascontiguousarray(image).view(np.uint32), rows, expected, magnitude)


def _values(
    generator: np.random.Generator, kind: str, shape: tuple[int, int], sixteenths: bool = False
) -> Matrix:
    if kind == INTEGERS:
        return generator.integers(-3, 4, shape).astype(np.float64)
    if sixteenths:
        return generator.integers(-16, 17, shape) / 16.0
    return from_bf16(to_bf16(generator.standard_normal(shape)))


def _source_values(
    plan: FormPlan, kind: str, generator: np.random.Generator, image: NDArray[np.uint8]
) -> list[Matrix]:
    """Writes the source's operands; A of the product in each CTA."""
    source = plan.source
    assert source is not None and isinstance(source.a, SharedOperand)
    left, right = [], []
    for cta in range(plan.cta_group):
        left.append(_values(generator, kind, (source.rows, source.k), sixteenths=True))
        right.append(_values(generator, kind, (source.b.extent, source.k), sixteenths=True))
        _write(image[cta], source.a, left[-1])
        _write(image[cta], source.b, right[-1])
    b = np.concatenate(right)
    rounded = [from_bf16(to_bf16(a @ b.T)) for a in left]
    return rounded if plan.route == "exchange" else [values.T.copy() for values in rounded]


def addresses(
    tile: SharedTile, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`SharedTile.address` of many elements."""
    box, inside = np.divmod(columns, tile.width)
    offset = tile.at + box * tile.box_bytes + rows * tile.swizzle + inside * 2
    found: NDArray[np.int64] = offset ^ (offset >> 3 & (tile.swizzle - 16))
    return found


def operand_addresses(operand: SharedOperand) -> NDArray[np.int64]:
    """Byte offset in the arena of every element (mn, k)."""
    mn = np.arange(operand.extent, dtype=np.int64)[:, None]
    parts = []
    for piece in operand.pieces:
        k = np.arange(piece.k, dtype=np.int64)[None, :]
        row, column = (mn, k) if operand.major == "K" else (k, mn)
        row, column = np.broadcast_arrays(piece.row + row, piece.column + column)
        parts.append(addresses(piece.tile, row, column))
    return np.concatenate(parts, axis=1)


def _write(memory: NDArray[np.uint8], operand: SharedOperand, values: Matrix) -> None:
    memory.view(np.uint16)[operand_addresses(operand) // 2] = to_bf16(values)


def cell_index(product: UmmaProduct) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row in the CTA and column of D in each cell (lane, column); -1 where there is no element."""
    row = np.full((TMEM_LANES, product.columns), -1, dtype=np.int64)
    column = row.copy()
    for lane in range(TMEM_LANES):
        first = product.cell(lane, product.column)
        if first is not None:
            row[lane] = first[0]
            column[lane] = first[1] + np.arange(product.columns)
    return row, column


def _cells(product: UmmaProduct, of_groups: list[Matrix]) -> Matrix:
    """D (rows, N) as cells (128, columns); group g of the lanes shows the g-th of several D's."""
    row, column = cell_index(product)
    group = np.arange(TMEM_LANES) * len(of_groups) // TMEM_LANES
    cells: Matrix = np.stack(of_groups)[group[:, None], row, column]
    cells[row < 0] = np.nan
    return cells
