"""The demands of one unit of a kernel's main loop on an SM and on the chip: the roofline."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import UmmaProduct
from workbench.model.machine import GpuModel

QUERIES, TOPK, S_KV = 4096, 2048, 8192
D_QK, D_V = 576, 512
FORWARD_DIMS = D_QK + D_V
BACKWARD_DIMS = 3 * D_QK + 2 * D_V
"""Multiply-adds of a (head, key) pair: P, dP, dQ and the two halves of dKV."""
ROW_BYTES, GRADIENT_ROW_BYTES = 2 * D_QK, 4 * D_QK


@dataclass(frozen=True)
class Matmul:
    """`count` MMA instructions of one shape.

    Attributes:
        m, n, k: of one instruction, this CTA's share of them.
        a_in_shared: A comes from shared memory, as B always does.
        shared_n: columns of B that this CTA reads; None: all n (cta_group::2 reads half).
        half_rate: the shape leaves half of the tensor core idle.
    """

    name: str
    count: float
    m: int
    n: int
    k: int = 16
    a_in_shared: bool = True
    element_bytes: int = 2
    shared_n: int | None = None
    half_rate: bool = False

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def operand_bytes(self) -> float:
        """Bytes that shared memory gives."""
        columns = self.n if self.shared_n is None else self.shared_n
        rows = self.m * self.a_in_shared + columns
        return float(rows * self.k * self.element_bytes * self.count)

    def tensor_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of the tensor core alone."""
        rate = machine["bf16_rate" if self.element_bytes == 2 else "fp8_rate"]
        return self.flop / rate * (2 if self.half_rate else 1)

    def port_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of shared memory alone."""
        return self.operand_bytes / machine["operand_rate"]

    def cycles(self, machine: GpuModel) -> float:
        """Count clocks with nothing else at work: the slower of the two."""
        return max(self.tensor_cycles(machine), self.port_cycles(machine))


def matmul_of(name: str, product: UmmaProduct, share: float = 1) -> Matmul:
    """Count a CTA's share of a tcgen05 product of a plan."""
    return Matmul(
        name,
        count=product.k // product.element.step_k * share,
        m=product.rows,
        n=product.n,
        a_in_shared=not product.a_in_tmem,
        shared_n=product.b.extent,
        half_rate=product.data_path == "F",
    )


@dataclass(frozen=True)
class Traffic:
    """One unit of work of one CTA, e.g. a block of keys of a query.

    Attributes:
        useful_flop: of the operation, whatever the kernel computes. matmuls: the kernel's.
        shared_bytes: that reach or leave shared memory otherwise: loads and stores of threads,
            arriving gathers, the peer's writes. bulk_read_bytes: that bulk copies read there.
        dsmem_bytes: written into the peer. tmem_bytes: loads and stores of threads.
        read_bytes: of device memory through L2. reduce_bytes: added there.
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
    exps: float = 0
    instructions: float = 0

    @property
    def operand_bytes(self) -> float:
        """Bytes of all MMAs' operands."""
        return sum(matmul.operand_bytes for matmul in self.matmuls)

    def tensor_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of all MMAs on the tensor core."""
        return sum(matmul.tensor_cycles(machine) for matmul in self.matmuls)

    def other_port_cycles(self, machine: GpuModel) -> float:
        """Count the clocks of shared memory for all but MMA operands."""
        bulk = self.bulk_read_bytes / machine["bulk_read_rate"]
        return self.shared_bytes / machine["operand_rate"] + bulk

    def demands(self, machine: GpuModel) -> dict[str, float]:
        """Count the clocks of one SM that each of its resources is busy for."""
        operands = self.operand_bytes / machine["operand_rate"]
        demands = {
            "tensor core": sum(matmul.cycles(machine) for matmul in self.matmuls),
            "shared memory port": operands + self.other_port_cycles(machine),
            "DSMEM": self.dsmem_bytes / machine["dsmem_rate"],
            "exponentials": self.exps / machine["exp_rate"],
            "issue slots": self.instructions / machine["issue_rate"],
        }
        if machine["tmem_rate"]:
            demands["tensor memory"] = self.tmem_bytes / machine["tmem_rate"]
        return demands


@dataclass(frozen=True)
class Footprint:
    """Bytes of device memory that a kernel comes back to, which compete for L2."""

    reduced: float = 0
    read: float = 0

    def miss(self, machine: GpuModel) -> float:
        """Compute the share of uniformly random accesses that L2 cannot keep."""
        total = self.reduced + self.read
        return max(0.0, 1 - machine["l2_bytes"] / total) if total else 0.0


def chip_seconds(
    machine: GpuModel, read_bytes: float, reduce_bytes: float, footprint: Footprint
) -> float:
    """Add up L2 and HBM byte by byte: reductions and reads share L2's time."""
    miss = footprint.miss(machine)
    read = (1 - miss) / machine["l2_read"] + miss / machine["hbm"]
    reduce = (1 - miss) / machine["l2_reduce"] + miss / machine["reduce_miss"]
    return read_bytes * read + reduce_bytes * reduce


def l2_cycles(machine: GpuModel, size: float) -> float:
    """Count the clocks in which an SM gets its share of L2's reads."""
    return size / (machine["l2_read"] / machine["sms"] / machine["busy_clock"])
