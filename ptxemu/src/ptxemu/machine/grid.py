"""The clusters of a launch: which start, in what order, and how time passes where nobody moves."""

from __future__ import annotations

from collections.abc import Iterator

from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.register_file import register_files
from ptxemu.machine.state import Cluster, Cta, Machine, Warp

FIRST_SKIP = 1000
MOST_SKIPS = 50
"""Skips of time, each twice as long, after which a wait for a clock is one that never ends."""


def start_clusters(machine: Machine) -> Iterator[Cluster]:
    """Give the grid's clusters in launch order, each with its CTAs and warps ready to run."""
    launch = machine.launch
    cx, cy, cz = launch.cluster
    while (where := _take_cluster(machine)) is not None:
        cluster = Cluster(machine.next_cluster - 1, launch.cluster, where)
        for rank in range(cx * cy * cz):
            ctaid = (
                where[0] * cx + rank % cx,
                where[1] * cy + rank // cx % cy,
                where[2] * cz + rank // (cx * cy),
            )
            cluster.ctas.append(Cta(machine, cluster, rank, ctaid))
        for cta in cluster.ctas:
            threads = cta.num_threads
            files = register_files(machine.program.layout, -(-threads // WARP_SIZE))
            for warp, registers in enumerate(files):
                lanes = min(WARP_SIZE, threads - warp * WARP_SIZE)
                cta.warps.append(Warp(machine.new_agent_id(), cta, warp, lanes, registers))
            if machine.observer is not None:
                machine.observer.cta_started(cta)
        yield cluster


def cancel_cluster(machine: Machine) -> tuple[int, int, int] | None:
    """Keep the next cluster from starting: the ctaid of its first CTA; None: all have."""
    where = _take_cluster(machine)
    if where is None:
        return None
    machine.cancelled_clusters += 1
    x, y, z = (a * b for a, b in zip(where, machine.launch.cluster, strict=True))
    return x, y, z


def _take_cluster(machine: Machine) -> tuple[int, int, int] | None:
    """%clusterid of the next cluster in launch order, which whoever asks now owns."""
    nx, ny, nz = machine.launch.clusters
    while (machine.next_cluster - machine.dealt_from) % machine.shares != machine.share:
        machine.next_cluster += 1  # another process has it
    index = machine.next_cluster
    if index >= nx * ny * nz:
        return None
    machine.next_cluster += 1
    return index % nx, index // nx % ny, index // (nx * ny)


def clusters_left(machine: Machine) -> int:
    """Count the clusters that nobody has started or cancelled, those of other processes too."""
    nx, ny, nz = machine.launch.clusters
    return max(nx * ny * nz - machine.next_cluster, 0)


def deal(machine: Machine, share: int, shares: int) -> None:
    """Start only every `shares`-th of the clusters that are left, from number `share` on."""
    machine.share, machine.shares, machine.dealt_from = share, shares, machine.next_cluster


def skip_time(machine: Machine) -> bool:
    """Let time pass where warps only look at a clock; False where it would help nobody."""
    if machine.progress != machine.skips_since:
        machine.skips, machine.skips_since = 0, machine.progress
    if not machine.clock_was_read or machine.skips == MOST_SKIPS:
        return False
    machine.clock_was_read = False
    machine.skips += 1
    machine.skipped_time = 2 * machine.skipped_time + FIRST_SKIP
    return True
