"""The timing skeletons of the Hopper design study, as the model sees them.

Read from their source (`shared/design/probes`): shapes of MMAs, what is staged, who waits for
whom. A unit is a tile of 64 keys and 64 heads (KB64, K1, FT, FS: a pair of tiles).
"""

from __future__ import annotations

from flashdsa.analysis.model.machine import Machine
from flashdsa.analysis.model.predict import Work
from flashdsa.analysis.model.shapes import (
    BACKWARD_DIMS,
    FORWARD_DIMS,
    GRADIENT_ROW_BYTES,
    QUERIES,
    ROW_BYTES,
    TOPK,
    l2_cycles,
    rs,
    softmax_cycles,
    ss,
)
from flashdsa.analysis.model.timeline import Step, mma_step
from flashdsa.analysis.model.traffic import Footprint, Traffic

TILE = 64
TILE_ROW_BYTES = TILE * ROW_BYTES
SCORE_BYTES = TILE * TILE * 2
Q_AND_DO = TILE * (ROW_BYTES + 1024)
TILES = TOPK // TILE


def _gather(machine: Machine, name: str, size: float, *after: tuple[str, int]) -> Step:
    latency = machine.l2_latency.value + machine.barrier_latency.value
    return Step("load", name, l2_cycles(machine, size), "gather", 0, after, latency, wait=False)


def _new_query(machine: Machine, size: float) -> float:
    """Clocks a tile for loading the next query's operands, which nothing overlaps."""
    return (l2_cycles(machine, size) + machine.l2_latency.value) / TILES


def k1(machine: Machine) -> Work:
    """S, dP and dQ of 64 heads; P and dS to device memory (b7b.cu, K1)."""
    bar = machine.barrier_latency.value
    scores = (ss("S", 18, TILE, 64),)
    gradients = (ss("dP", 16, TILE, 64),)
    steps = (
        _gather(machine, "K left", TILE_ROW_BYTES / 2, ("dQ1 left", 1), ("dQ2 left", 1)),
        _gather(machine, "K right", TILE_ROW_BYTES / 2, ("dQ1 right", 1), ("dQ2 right", 1)),
        mma_step(machine, "wg1", "S left", scores, ("K left", 0), wait=False),
        mma_step(machine, "wg1", "S right", scores, ("K right", 0)),
        # per thread 32 exponentials (ex2 with its scaling), packing, and P's way out
        Step("wg1", "P", softmax_cycles(machine, 32, 150), latency=bar),
        Step("wg1", "dS read", machine.shared_latency.value, after=(("dS", 0),)),
        mma_step(machine, "wg1", "dQ1 left", (rs("dQ", 10, TILE, 64),), wait=False),
        mma_step(machine, "wg1", "dQ1 right", (rs("dQ", 10, TILE, 64),)),
        mma_step(machine, "wg2", "dP left", gradients, ("K left", 0), wait=False),
        mma_step(machine, "wg2", "dP right", gradients, ("K right", 0)),
        Step("wg2", "dS", 130 + machine.shared_latency.value, after=(("P", 0),), latency=bar),
        mma_step(machine, "wg2", "dQ2 left", (rs("dQ", 8, TILE, 64),), wait=False),
        mma_step(machine, "wg2", "dQ2 right", (rs("dQ", 8, TILE, 64),)),
        Step("wg2", "next query", _new_query(machine, Q_AND_DO)),
    )
    traffic = Traffic(
        useful_flop=2.0 * TILE * TILE * (2 * 576 + 512),
        matmuls=(*scores * 2, *gradients * 2, rs("dQ", 36, TILE, 64)),
        shared_bytes=TILE_ROW_BYTES + 4 * SCORE_BYTES,
        read_bytes=TILE_ROW_BYTES + Q_AND_DO / TILES + 2 * SCORE_BYTES,
        exps=TILE * TILE,
        instructions=8 * 280,
    )
    return Work("K1: S, dP, dQ", traffic, 2.0 * QUERIES * TILES, steps, _rows(8192))


def k2(machine: Machine, rows: int = 8192, *, adds: bool = False) -> Work:
    """dKV from stored P and dS, 128 heads and half of the dims a CTA (b7b.cu, K2). A pair of tiles:
    one for each of two warpgroups."""
    wide = (ss("dO", 8, TILE, 192), ss("dO", 8, TILE, 64), ss("Q", 8, TILE, 192))
    tile = (*wide, ss("Q", 8, TILE, 64), ss("Q", 8, TILE, 32))
    operands = 4 * SCORE_BYTES
    part = TILE * GRADIENT_ROW_BYTES / 2
    out = part / machine.red_rate.value if adds else 0
    steps = tuple(
        step
        for wg in ("a", "b")
        for step in (
            _gather(machine, f"P and dS {wg}", operands, (f"dKV {wg}", 1)),
            mma_step(machine, f"wg {wg}", f"dKV {wg}", tile, (f"P and dS {wg}", 0)),
            Step(f"wg {wg}", f"adds {wg}", out, "way out"),
            Step(f"wg {wg}", f"next query {wg}", 2 * _new_query(machine, Q_AND_DO)),
        )
    )
    traffic = Traffic(
        useful_flop=2 * 2.0 * TILE * 128 * 544,
        matmuls=tile * 2,
        shared_bytes=2 * operands,
        read_bytes=2 * (operands + Q_AND_DO / TILES),
        reduce_bytes=2 * part if adds else 0,
        red_bytes=2 * part if adds else 0,
        instructions=8 * 150,
    )
    footprint = Footprint(reduced=rows * GRADIENT_ROW_BYTES)
    name = f"K2: dKV {f'with adds, {rows} random rows' if adds else 'without adds'}"
    return Work(name, traffic, QUERIES * TILES, steps, footprint)


def _rows(rows: int) -> Footprint:
    return Footprint(reduced=rows * GRADIENT_ROW_BYTES, read=rows * ROW_BYTES)


def kb64(
    machine: Machine,
    rows: int,
    *,
    heads: int = 64,
    adds: bool = True,
    resident: bool = False,
    tiles: float | None = None,
) -> Work:
    """One CTA for 64 (query, head) rows (bk2.h).

    Args:
        resident: neighbouring queries share their rows, so that L2 keeps what is worked on.
        tiles: of all items together; None: every query on its own.
    """
    score_half = (ss("S, dP", 32, TILE, 64), ss("S RoPE", 4, TILE, 32))
    dq1, dq2 = (ss("dQ", 8, TILE, 128),), (ss("dQ", 8, TILE, 128), ss("dQ", 4, TILE, 64))
    dkv = rs("dKV", 136, TILE, 32)
    bar = machine.barrier_latency.value
    # per thread and half: 16 exponentials; masks, products, packing
    half = softmax_cycles(machine, 16, 130)
    chunks = 8
    steps = (
        _gather(machine, "K left", TILE_ROW_BYTES / 2, ("dQ left", 1)),
        _gather(machine, "K right", TILE_ROW_BYTES / 2, ("dQ right", 1)),
        mma_step(machine, "wg1", "S 0", score_half, ("K left", 0), ("K right", 0)),
        Step("wg1", "P 0", half, after=((f"dKV {chunks - 1}", 1), ("dQ right", 1))),
        mma_step(machine, "wg1", "S 1", score_half),
        Step("wg1", "P 1", half, latency=bar),
        mma_step(machine, "wg1", "dQ left", dq1),
        mma_step(machine, "wg2", "dQ right", dq2, ("P 1", 0)),
        *(
            mma_step(
                machine,
                "wg3",
                f"dKV {chunk}",
                (rs("dKV", 136 / chunks, TILE, 32),),
                ("P 1", 0),
                wait=chunk == chunks - 1,
            )
            for chunk in range(chunks)
        ),
        Step("wg3", "next query", _new_query(machine, Q_AND_DO)),
    )
    out = TILE * GRADIENT_ROW_BYTES
    traffic = Traffic(
        useful_flop=2.0 * TILE * TILE * BACKWARD_DIMS,
        matmuls=(*score_half * 2, *dq1, *dq2, dkv),
        shared_bytes=TILE_ROW_BYTES + 4 * SCORE_BYTES,
        read_bytes=TILE_ROW_BYTES + Q_AND_DO / TILES,
        reduce_bytes=out if adds else 0,
        red_bytes=out if adds else 0,
        exps=TILE * TILE,
        instructions=4 * 300 + 4 * 700,
    )
    kind = "correlated" if resident else "random"
    name = f"KB64 H={heads}, {rows} {kind} rows{'' if adds else ', no adds'}"
    units = tiles if tiles is not None else QUERIES * TILES * max(heads / TILE, 1)
    return Work(name, traffic, units, steps, Footprint() if resident else _rows(rows))


PAIR_SCORES = 36


def forward(machine: Machine, *, gather: bool = True, symmetric: bool = False) -> Work:
    """One CTA for 64 heads, pairs of tiles (forward/ft.h; symmetric: forward/fs.h)."""
    scores = (ss("S", PAIR_SCORES, TILE, 64),)
    own, remote = (rs("O", 4, TILE, 256),), (ss("O", 4, TILE, 256),)
    bar = machine.barrier_latency.value
    # per thread 32 exponentials; maximum, scaling, sum, packing; two shuffles of the maximum
    softmax = softmax_cycles(machine, 32, 180) + 2 * machine.shuffle_latency.value
    size = TILE_ROW_BYTES if gather else 0

    def exchanged(wg: str, other: str) -> tuple[Step, ...]:
        return (
            mma_step(machine, wg, f"S {wg}", scores, (f"K {wg}", 0)),
            Step(wg, f"P {wg}", softmax, latency=bar),
            mma_step(machine, wg, f"own {wg}", own),
            mma_step(machine, wg, f"remote {wg}", remote, (f"P {other}", 0)),
        )

    if symmetric:
        roles = (*exchanged("wg1", "wg2"), *exchanged("wg2", "wg1"))
        freed = ("remote wg1", "remote wg2")
    else:
        roles = (
            *exchanged("wg1", "wg2"),
            mma_step(machine, "wg2", "S wg2", scores, ("K wg2", 0), ("S wg1", 0)),
            mma_step(machine, "wg2", "remote wg2", remote, ("P wg1", 0), wait=False),
            Step("wg2", "P wg2", softmax, latency=bar),
            mma_step(machine, "wg2", "own wg2", own),
        )
        freed = ("remote wg2", "own wg2")
    loads = (
        _gather(machine, "K wg1", size, ("own wg1", 1), (freed[0], 1)),
        _gather(machine, "K wg2", size, ("remote wg1", 1), (freed[1], 1)),
    )
    traffic = Traffic(
        useful_flop=2 * 2.0 * TILE * TILE * FORWARD_DIMS,
        matmuls=(*scores, *own, *remote) * 2,
        shared_bytes=2 * (size + SCORE_BYTES),
        read_bytes=2 * size + TILE * ROW_BYTES / TILES,
        exps=2 * TILE * TILE,
        instructions=8 * 300,
    )
    name = f"{'FS' if symmetric else 'FT'}{'' if gather else ' without gather'}"
    units = 2.0 * QUERIES * TILES / 2
    return Work(name, traffic, units, (*loads, *roles), Footprint(read=8192 * ROW_BYTES))
