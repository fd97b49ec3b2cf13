"""q, dO, O and lse with padding behind their heads: zeros, and an lse of +inf, with which a head
adds nothing.

A warp copies the rows of a head of a query, all of which it loads before it stores the first.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.gmem import load4, store4
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.smem import VECTOR
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.problem import D_QK, D_V

WARPS = 8
"""Warps of a CTA, each with the rows of a head."""
UNIT_DIMS = 8
"""Elements of a lane's move."""


class Rows(NamedTuple):
    """Operands of the backward that have heads."""

    q: cute.Tensor  # (S, H, 576) or (S, H, 512) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32


class Place(NamedTuple):
    """Rows of a head of a query in both tensors."""

    source: Int64
    to: Int64
    exists: Int32  # 0: padding


class Move(NamedTuple):
    """16 bytes of a row that each lane copies, if the row has them."""

    tensor: int  # of `Rows`
    first: int  # unit, of lane 0
    units: Any  # of the row


@cute.kernel
def padded_heads_kernel(given: Rows, padded: Rows, first: Int32, count: Int32):
    """A warp a head of a query; arguments as in `launch_padded_heads`."""
    follow_grid()
    thread, block, _ = place_in_grid()
    queries, heads = padded.lse.shape
    row = block * WARPS + thread // WARP_SIZE
    if row < queries * heads:
        query, head = row // heads, row % heads
        source = Int64(query) * given.lse.shape[1] + (first + head)
        place = Place(source, Int64(row), Int32(head < count))
        copy_head(given, padded, place, thread % WARP_SIZE)


@cute.jit
def copy_head(given: Rows, padded: Rows, place: Place, lane: Int32) -> None:
    """One warp: copy the rows of a head, or write its padding."""
    # The moves of a row of q, dO and O each. Of q those of its longest rows: shorter ones have no
    # unit for the last.
    most = [size // UNIT_DIMS for size in (D_QK, D_V, D_V)]
    units = [tensor.shape[2] // UNIT_DIMS for tensor in given[:-1]]
    moves = [Move(i, at, units[i]) for i in range(len(most)) for at in range(0, most[i], WARP_SIZE)]
    words = [cute.make_rmem_tensor(VECTOR, Int32) for _ in moves]
    for number in cutlass.range_constexpr(len(moves)):
        move = moves[number]
        words[number].fill(0)
        if place.exists != 0 and move.first + lane < move.units:
            four = load4(address(given[move.tensor], place.source, move.first + lane))
            for i in cutlass.range_constexpr(VECTOR):
                words[number][i] = four[i]
    for number in cutlass.range_constexpr(len(moves)):
        move = moves[number]
        if move.first + lane < move.units:
            to = address(padded[move.tensor], place.to, move.first + lane)
            store4(to, [words[number][i] for i in range(VECTOR)])
    if lane == 0:
        lse = Float32(float("inf"))
        if place.exists != 0:
            lse = (given.lse.iterator + place.source).load()
        (padded.lse.iterator + place.to).store(lse)


def address(tensor: cute.Tensor, row: Int64, unit: Int32) -> Any:
    """Pointer to a move of a row; rows of heads follow each other."""
    return tensor.iterator + (row * tensor.shape[2] + unit * UNIT_DIMS)


@cute.jit
def launch_padded_heads(stream: Any, *arguments: Any):
    """Launch on `stream`. `arguments`: the given `Rows`, without gaps; the padded ones, written;
    the first head that is taken, and how many are."""
    count = len(Rows._fields)
    given, padded = Rows(*arguments[:count]), Rows(*arguments[count : 2 * count])
    queries, heads = padded.lse.shape
    made = padded_heads_kernel(given, padded, *arguments[2 * count :])
    ctas = (queries * heads + WARPS - 1) // WARPS
    launch_ctas(made, ctas, WARPS * WARP_SIZE, stream, use_pdl=True)


def compile_padded_heads(plan: Any) -> Any:
    """Compile `launch_padded_heads`."""
    del plan
    queries, heads, padded = (cute.sym_int32() for _ in range(3))
    d_qk = cute.sym_int32(divisibility=UNIT_DIMS)
    rows = []
    for each in (heads, padded):
        rows += [fake_tensor(BFloat16, (queries, each, dims)) for dims in (d_qk, D_V, D_V)]
        rows.append(fake_tensor(Float32, (queries, each), 4))
    return compile_launch(SM90, launch_padded_heads, None, *rows, Int32(0), Int32(8))
