"""A CTA: its shared memory, TMEM, barriers and warps; and the cluster that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.sleepers import Sleepers
from ptxemu.memory.address import SHARED_BASE, SHARED_RANK_SHIFT

if TYPE_CHECKING:
    from ptxemu.machine.engine_state import EngineState
    from ptxemu.machine.grid import Machine
    from ptxemu.machine.warp import Warp

WORD_BYTES = 4
TMEM_LANES = 128
TMEM_COLUMNS = 512


@dataclass(slots=True)
class Cluster:
    """CTAs that can reach each other's shared memory; `ctas[r]` has %cluster_ctarank r."""

    index: int
    shape: tuple[int, int, int]
    ctaid: tuple[int, int, int]
    ctas: list[Cta] = field(default_factory=list)
    lanes_exited: Sleepers = field(default_factory=Sleepers)
    """Woken whenever lanes exit."""


class Cta:
    """One CTA of a launch."""

    def __init__(
        self,
        machine: Machine,
        cluster: Cluster,
        rank: int,
        ctaid: tuple[int, int, int],
    ) -> None:
        self.machine = machine
        self.cluster = cluster
        self.rank = rank
        """%cluster_ctarank"""
        self.ctaid = ctaid
        gx, gy, _ = machine.launch.grid
        self.index = ctaid[0] + gx * (ctaid[1] + gy * ctaid[2])
        """CTA number in the grid."""
        size = SHARED_BASE + machine.layout.shared_bytes
        whole = np.full(-(-size // WORD_BYTES) * WORD_BYTES, machine.fill, dtype=np.uint8)
        self.shared: NDArray[np.uint8] = whole[:size]
        """Bytes by CTA-relative shared address; the first SHARED_BASE are reserved."""
        self.shared_words: NDArray[np.uint32] = whole.view(np.uint32)
        """The same in words; the last may lie partly beyond."""
        self._tmem: NDArray[np.uint32] | None = None
        self.warps: list[Warp] = []
        self.exited = False
        self.engines: dict[EngineState[Cta, Any], Any] = {}
        """The engines' state of this CTA: mbarriers, named barriers, TMEM allocations."""
        self.exit_checks: list[Callable[[], None]] = []
        """Called when all warps have exited: engines report what was left undone."""

    @property
    def tmem(self) -> NDArray[np.uint32]:
        """Tensor memory (128 lanes, 512 columns) of 32-bit cells."""
        if self._tmem is None:
            word = self.machine.fill * 0x01010101
            self._tmem = np.full((TMEM_LANES, TMEM_COLUMNS), word, dtype=np.uint32)
        return self._tmem

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        x, y, z = self.machine.launch.block
        return x * y * z

    def symbol_address(self, name: str) -> int:
        """Address of a symbol; shared addresses carry this CTA's rank."""
        layout = self.machine.layout
        offset = layout.shared_offsets.get(name)
        if offset is not None:
            return (self.rank << SHARED_RANK_SHIFT) | (SHARED_BASE + offset)
        return layout.symbol_address(name)
