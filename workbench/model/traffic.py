"""What one unit of a kernel's main loop asks of a streaming multiprocessor, and of the chip."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from workbench.model.machine import GpuModel


class Source(StrEnum):
    """Where an MMA's A comes from. B always comes from shared memory."""

    SHARED = "shared memory"
    TMEM = "tensor memory"
    REGISTERS = "registers"


@dataclass(frozen=True)
class Matmul:
    """`count` MMA instructions of one shape.

    Attributes:
        m, n, k: of one instruction, this CTA's share of them. k_bytes: bytes of a row along k.
        shared_n: columns of B that this CTA reads; None: all n (cta_group::2 reads half).
        half_rate: the shape leaves half of the tensor core idle.
    """

    name: str
    count: float
    m: int
    n: int
    k: int = 16
    a: Source = Source.SHARED
    element_bytes: int = 2
    shared_n: int | None = None
    half_rate: bool = False

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def operand_bytes(self) -> float:
        """That shared memory gives."""
        rows = self.m if self.a is Source.SHARED else 0
        columns = self.n if self.shared_n is None else self.shared_n
        return float((rows + columns) * self.k * self.element_bytes * self.count)

    def tensor_cycles(self, machine: GpuModel) -> float:
        """Of the tensor core alone."""
        rate = machine.bf16_rate if self.element_bytes == 2 else machine.fp8_rate
        return self.flop / rate.value * (2 if self.half_rate else 1)

    def port_cycles(self, machine: GpuModel) -> float:
        """Of shared memory alone."""
        return self.operand_bytes / machine.operand_rate.value

    def cycles(self, machine: GpuModel) -> float:
        """With nothing else at work: every instruction waits for the slower of the two."""
        return max(self.tensor_cycles(machine), self.port_cycles(machine))


@dataclass(frozen=True)
class Traffic:
    """One unit of work of one CTA, e.g. a block of keys of a query.

    Attributes:
        useful_flop: of the operation, whatever the kernel computes. matmuls: what it computes.
        shared_bytes: that reach or leave shared memory otherwise: loads and stores of threads,
            arriving gathers, what the peer writes. bulk_read_bytes: that bulk copies read there.
        dsmem_bytes: written into the peer. tmem_bytes: loads and stores of threads.
        read_bytes: of device memory through L2, gathered or streamed. reduce_bytes: added there.
        red_bytes: of reduce_bytes those that leave by `red` of threads; red_width: bytes a lane.
        exps: ex2 of all threads. instructions: of all warps, other than waiting.
    """

    useful_flop: float
    matmuls: tuple[Matmul, ...] = ()
    shared_bytes: float = 0
    bulk_read_bytes: float = 0
    dsmem_bytes: float = 0
    tmem_bytes: float = 0
    read_bytes: float = 0
    reduce_bytes: float = 0
    red_bytes: float = 0
    red_width: int = 16
    exps: float = 0
    instructions: float = 0

    @property
    def operand_bytes(self) -> float:
        """Of all MMAs."""
        return sum(matmul.operand_bytes for matmul in self.matmuls)

    def tensor_cycles(self, machine: GpuModel) -> float:
        """Of all MMAs on the tensor core."""
        return sum(matmul.tensor_cycles(machine) for matmul in self.matmuls)

    def other_port_cycles(self, machine: GpuModel) -> float:
        """Of shared memory for all but MMA operands."""
        bulk = self.bulk_read_bytes / machine.bulk_read_rate.value
        return self.shared_bytes / machine.operand_rate.value + bulk

    def demands(self, machine: GpuModel) -> dict[str, float]:
        """Clocks of one SM that each of its resources is busy for."""
        red = machine.red_rate if self.red_width == 16 else machine.red_scalar_rate
        operands = self.operand_bytes / machine.operand_rate.value
        demands = {
            "tensor core": sum(matmul.cycles(machine) for matmul in self.matmuls),
            "shared memory port": operands + self.other_port_cycles(machine),
            "DSMEM": self.dsmem_bytes / machine.dsmem_rate.value,
            "red port": self.red_bytes / red.value,
            "exponentials": self.exps / machine.exp_rate.value,
            "issue slots": self.instructions / machine.issue_rate.value,
        }
        if machine.tmem_rate.value:
            demands["tensor memory"] = self.tmem_bytes / machine.tmem_rate.value
        return demands


@dataclass(frozen=True)
class Footprint:
    """Of device memory that a kernel comes back to, in bytes: what competes for L2."""

    reduced: float = 0
    read: float = 0

    def miss(self, machine: GpuModel) -> float:
        """Share of its accesses that L2 cannot keep, when they are uniformly random."""
        total = self.reduced + self.read
        return max(0.0, 1 - machine.l2_bytes.value / total) if total else 0.0


def chip_seconds(
    machine: GpuModel, read_bytes: float, reduce_bytes: float, footprint: Footprint
) -> float:
    """L2 and HBM, one after the other byte by byte: reductions and reads share L2's time."""
    miss = footprint.miss(machine)
    hit = 1 - miss
    read = hit / machine.l2_read.value + miss / machine.hbm.value
    reduce = hit / machine.l2_reduce.value + miss / machine.reduce_miss.value
    return read_bytes * read + reduce_bytes * reduce
