"""The skeletons that share a query's work in a cluster of two CTAs, over DSMEM.

A unit is a tile of 64 keys in one CTA.
"""

from __future__ import annotations

from flashdsa.analysis.model.machine import Machine
from flashdsa.analysis.model.predict import Work
from flashdsa.analysis.model.shapes import (
    BACKWARD_DIMS,
    D_QK,
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
from flashdsa.analysis.model.timeline import DSMEM, Step, mma_step, transfer
from flashdsa.analysis.model.traffic import Footprint, Traffic

TILE = 64
TILES = TOPK // TILE
CHUNKS = 9
SLOTS = 5


def _gather(machine: Machine, name: str, size: float, *after: tuple[str, int]) -> Step:
    latency = machine.l2_latency.value + machine.barrier_latency.value
    return Step("load", name, l2_cycles(machine, size), "gather", 0, after, latency, wait=False)


def kf64(machine: Machine, rows: int, *, resident: bool = False) -> Work:
    """Backward without dQ, 64 heads a CTA; half of dKV to the peer in bf16 (fk.h).

    A ring of five chunks of K; scores wait for every chunk. Two warpgroups compute dKV, chunks of
    32 dims: half of them are sent, half are received, added and leave by red.v4.
    """
    bar = machine.barrier_latency.value
    chunk_bytes = TILE * ROW_BYTES / CHUNKS
    loads, scores = [], []
    for chunk in range(CHUNKS):
        ago = (f"S {chunk - SLOTS}", 0) if chunk >= SLOTS else (f"S {chunk + CHUNKS - SLOTS}", 1)
        loads.append(_gather(machine, f"K {chunk}", chunk_bytes, ago))
        width = 128 if chunk < CHUNKS - 1 else 64
        product = ss("S, dP", 4, TILE, width)
        scores.append(mma_step(machine, "wg1", f"S {chunk}", (product,), (f"K {chunk}", 0)))
    softmax = softmax_cycles(machine, 32, 260)
    received = tuple((f"dKV {wg} read", 1) for wg in ("a", "b"))
    steps = [*loads, *scores, Step("wg1", "P", softmax, after=received, latency=bar)]
    sent = TILE * D_QK  # bf16, half of the dims
    out = TILE * GRADIENT_ROW_BYTES / 2
    passes = 4.5  # pairs of chunks of one warpgroup
    shared_trip = machine.shared_latency.value
    for wg in ("a", "b"):
        rounds = passes * (
            machine.mma_latency.value + machine.dsmem_latency.value + bar + shared_trip
        )
        size = sent / 2 / machine.dsmem_rate.value
        steps += [
            Step(f"wg {wg}", f"dKV {wg} read", 2 * shared_trip, after=(("P", 0),)),
            mma_step(machine, f"wg {wg}", f"dKV {wg}", (rs("dKV", 68, TILE, 32),)),
            Step(f"wg {wg}", f"exchange {wg}", size, DSMEM),
            Step(f"wg {wg}", f"rounds {wg}", rounds),
            Step(f"wg {wg}", f"adds {wg}", out / 2 / machine.red_rate.value, "way out"),
        ]
    scores_bytes = TILE * TILE * 2
    traffic = Traffic(
        useful_flop=2.0 * TILE * TILE * (BACKWARD_DIMS - D_QK),
        matmuls=(ss("S, dP", 32, TILE, 128), ss("S", 4, TILE, 64), rs("dKV", 136, TILE, 32)),
        shared_bytes=TILE * ROW_BYTES + 6 * scores_bytes + 2 * sent,
        dsmem_bytes=sent,
        read_bytes=TILE * ROW_BYTES + scores_bytes,
        reduce_bytes=out,
        red_bytes=out,
        exps=TILE * TILE,
        instructions=4 * 350 + 8 * 500,
    )
    kind = "correlated" if resident else "random"
    footprint = Footprint(reduced=rows * GRADIENT_ROW_BYTES, read=rows * ROW_BYTES)
    return Work(
        f"KF64 H=128, {rows} {kind} rows",
        traffic,
        2.0 * QUERIES * TILES,
        tuple(steps),
        Footprint() if resident else footprint,
    )


def forward_dims_split(machine: Machine) -> Work:
    """Forward, 128 heads and half of the dims a CTA; fp32 partial scores to the peer (fd.h)."""
    half_row = TILE * ROW_BYTES / 2
    partial = TILE * TILE * 4
    heard = machine.dsmem_latency.value + machine.barrier_latency.value
    softmax = softmax_cycles(machine, 32, 200) + 2 * machine.shuffle_latency.value
    send = partial / machine.dsmem_rate.value
    freed = tuple((f"O {wg}", 3) for wg in ("wg1", "wg2"))  # three stages
    steps = [_gather(machine, "K", half_row, *freed)]
    for wg in ("wg1", "wg2"):
        steps += [
            # S of the next tile, under P of this one
            mma_step(machine, wg, f"S {wg}", (ss("S", 18, TILE, 64),), ("K", 0), wait=False),
            Step(wg, f"P {wg}", softmax + machine.shared_latency.value, after=((f"sent {wg}", 1),)),
            mma_step(machine, wg, f"O {wg}", (rs("O", 4, TILE, 256),), (f"S {wg}", 0), wait=False),
            *transfer(
                wg,
                f"sent {wg}",
                send,
                DSMEM,
                (f"S {wg}", 0),
                (f"P {wg}", 0),
                latency=heard,
            ),
            Step(wg, f"O {wg} done", 0, after=((f"O {wg}", 0),)),
        ]
    traffic = Traffic(
        useful_flop=2.0 * 128 * TILE * FORWARD_DIMS / 2,
        matmuls=(ss("S", 36, TILE, 64), rs("O", 8, TILE, 256)),
        shared_bytes=half_row + 4 * partial,
        dsmem_bytes=2 * partial,
        read_bytes=half_row,
        exps=2 * TILE * TILE,
        instructions=8 * 320,
    )
    units = 2.0 * QUERIES * TILES
    return Work("FD: dims split", traffic, units, tuple(steps), Footprint(read=8192 * ROW_BYTES))
