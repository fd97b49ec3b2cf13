"""What a GPU can do, each number with where it comes from.

No number here belongs to a kernel. MEASURED: on the H200 by this project's probes. PUBLISHED: a
data sheet or a paper. ASSUMED: nobody here measured it; the source says what it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Basis(StrEnum):
    """How far a constant can be trusted."""

    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Constant:
    """A number with its unit and its source."""

    value: float
    unit: str
    basis: Basis
    source: str


@dataclass(frozen=True)
class GpuModel:
    """One GPU. Rates "of an SM" are per clock, rates of the chip per second.

    Attributes:
        clock, busy_clock: of the SMs; busy: with the tensor cores at work for long.
        bf16_rate, fp8_rate: dense FLOP per clock of an SM. half_rate_m: MMAs of so few rows keep
            half of the tensor core idle; 0: none do.
        operand_rate: bytes per clock that shared memory gives, to MMAs and everything else.
        bulk_read_rate: bytes per clock of that time when bulk copies and reductions read.
        dsmem_starved, bulk_starved: shares of the rates of st.async (and, assumed, of red) and of
            bulk reads that are left while MMAs take all that shared memory gives.
        dsmem_rate: of st.async into the peer. tmem_rate: loads and stores of tensor memory.
        red_rate: of `red.global` v4, leaving an SM. red_scalar_rate: one fp32 a lane.
        store_rate: of stores of 32 bytes a lane.
        issue_rate: warp instructions per clock. exp_rate: ex2 per clock.
        l2_read, l2_reduce: of the chip, resident. reduce_miss: where the row is not resident.
        hbm: of the chip. l2_bytes: capacity.
        alu_latency: clocks from an instruction to the next one of a warp that needs its result.
        shared_latency, shuffle_latency, barrier_latency, mma_latency, dsmem_latency, l2_latency,
        hbm_latency, release_latency: clocks until the result is there: a load of shared memory, a
            shuffle, a barrier of the CTA or an mbarrier, an MMA's completion seen by a waiting
            warp, a write into the peer seen there, a load that hits L2, one that misses, a fence
            of device scope behind the CTA's writes.
        launch: from one event to the other around a kernel that does nothing.
    """

    name: str
    sms: Constant
    clock: Constant
    busy_clock: Constant
    bf16_rate: Constant
    fp8_rate: Constant
    half_rate_m: Constant
    operand_rate: Constant
    bulk_read_rate: Constant
    dsmem_starved: Constant
    bulk_starved: Constant
    dsmem_rate: Constant
    tmem_rate: Constant
    red_rate: Constant
    red_scalar_rate: Constant
    store_rate: Constant
    issue_rate: Constant
    exp_rate: Constant
    l2_read: Constant
    l2_reduce: Constant
    reduce_miss: Constant
    hbm: Constant
    l2_bytes: Constant
    alu_latency: Constant
    shared_latency: Constant
    shuffle_latency: Constant
    barrier_latency: Constant
    mma_latency: Constant
    dsmem_latency: Constant
    l2_latency: Constant
    hbm_latency: Constant
    release_latency: Constant
    launch: Constant

    def constants(self) -> dict[str, Constant]:
        """All numbers by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    @property
    def peak(self) -> float:
        """Dense bf16 FLOP per second."""
        return self.sms.value * self.clock.value * self.bf16_rate.value


def _measured(value: float, unit: str, source: str) -> Constant:
    return Constant(value, unit, Basis.MEASURED, source)


def _published(value: float, unit: str, source: str) -> Constant:
    return Constant(value, unit, Basis.PUBLISHED, source)


def _assumed(value: float, unit: str, source: str) -> Constant:
    return Constant(value, unit, Basis.ASSUMED, source)


_RATES = "a probe of one H200, 2026-11-20"
_PEERS = "a stream and its clock on one H200, 2026-11-20"
_HOPPER_PAPER = "Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU (arXiv 2402.13499)"
_GUIDE = "CUDA C++ Programming Guide, arithmetic throughput, compute capability 9.0 and 10.0"
_SHEET_B200 = "NVIDIA B200 data sheet: 2.25 PFLOPS dense bf16, 4.5 dense fp8, 8 TB/s"
_CARRIED = "carried over from the H200"
_ORDER = "the order of magnitude of the latencies beside it; nobody measured it"

H200 = GpuModel(
    name="H200",
    sms=_measured(132, "", _PEERS),
    clock=_measured(1.98e9, "1/s", _PEERS),
    busy_clock=_measured(1.56e9, "1/s", "1520 to 1600 MHz under pure wgmma, 700 W; " + _RATES),
    bf16_rate=_measured(4096, "FLOP/clk/SM", "N/2 clocks for m64nNk16; " + _RATES),
    fp8_rate=_measured(8192, "FLOP/clk/SM", "1785 TFLOPS in a burst; " + _RATES),
    half_rate_m=_published(0, "rows", "wgmma has M = 64 only (PTX ISA)"),
    operand_rate=_measured(128, "B/clk/SM", "m64n32k16 SS at 24 clocks; " + _RATES),
    bulk_read_rate=_measured(32, "B/clk/SM", "bulk reads beside wgmma; " + _RATES),
    dsmem_starved=_measured(5.5 / 19.7, "", "st.async beside m64n64k16 SS; " + _RATES),
    bulk_starved=_measured(0.84 / 25, "", "bulk reads beside m64n64k16 SS; " + _RATES),
    dsmem_rate=_measured(19.7, "B/clk/SM", "st.async.v4; " + _RATES),
    tmem_rate=_published(0, "B/clk/SM", "Hopper has no tensor memory"),
    red_rate=_measured(21, "B/clk/SM", "red.v4, one SM alone; " + _RATES),
    red_scalar_rate=_measured(16, "B/clk/SM", "red.v2, the narrowest measured; " + _RATES),
    store_rate=_assumed(32, "B/clk/SM", "a sector a clock"),
    issue_rate=_published(4, "warp instructions/clk/SM", _GUIDE),
    exp_rate=_published(16, "1/clk/SM", _GUIDE),
    l2_read=_measured(8.9e12, "B/s", "cp.async of rows, the best measured; " + _RATES),
    l2_reduce=_measured(3.714e12, "B/s", "2304-byte rows, 8,192 of them; " + _RATES),
    reduce_miss=_measured(
        1.29e12,
        "B/s",
        "32,768 and 131,072 rows at 2.205 and 1.518 TB/s, the resident share taken out (1.23 and "
        "1.36); " + _RATES,
    ),
    hbm=_measured(4.47e12, "B/s", _PEERS),
    l2_bytes=_published(50e6, "B", "NVIDIA H100 architecture white paper"),
    alu_latency=_published(4, "clk", _HOPPER_PAPER),
    shared_latency=_published(29, "clk", _HOPPER_PAPER),
    shuffle_latency=_assumed(23, "clk", "as on Volta and later (Jia et al., arXiv 1804.06826)"),
    barrier_latency=_assumed(60, "clk", _ORDER),
    mma_latency=_assumed(120, "clk", _ORDER),
    dsmem_latency=_published(180, "clk", _HOPPER_PAPER),
    l2_latency=_published(297, "clk", "263 at 1.755 GHz; " + _HOPPER_PAPER),
    hbm_latency=_published(540, "clk", "479 at 1.755 GHz; " + _HOPPER_PAPER),
    release_latency=_measured(
        1500, "clk", "fence.acq_rel.gpu (workbench/results/indexer/NOTES.md)"
    ),
    launch=_measured(4.0e-6, "s", "3.9 to 4.1 us (workbench/results/indexer/NOTES.md)"),
)

B200 = GpuModel(
    name="B200",
    sms=_published(148, "", "torch.cuda device properties of B200; chipsandcheese.com, B200"),
    clock=_published(1.85e9, "1/s", "what makes 2.25 PFLOPS of 148 SMs; " + _SHEET_B200),
    busy_clock=_assumed(1.85e9, "1/s", "no fall under load is modelled: none was measured here"),
    bf16_rate=_published(8192, "FLOP/clk/SM", _SHEET_B200),
    fp8_rate=_published(16384, "FLOP/clk/SM", _SHEET_B200),
    half_rate_m=_assumed(64, "rows", "layout F uses half of the lanes (PTX ISA, tcgen05.mma)"),
    operand_rate=_published(
        128,
        "B/clk/SM",
        "SS with N < 128 is bound by 128 B/clk (SemiAnalysis, Dissecting Blackwell)",
    ),
    bulk_read_rate=_assumed(32, "B/clk/SM", _CARRIED),
    dsmem_starved=_assumed(5.5 / 19.7, "", _CARRIED),
    bulk_starved=_assumed(0.84 / 25, "", _CARRIED),
    dsmem_rate=_assumed(19.7, "B/clk/SM", _CARRIED),
    tmem_rate=_assumed(512, "B/clk/SM", "four warps of 32 lanes of 4 bytes a clock"),
    red_rate=_assumed(21, "B/clk/SM", _CARRIED),
    red_scalar_rate=_assumed(16, "B/clk/SM", _CARRIED),
    store_rate=_assumed(32, "B/clk/SM", "a sector a clock"),
    issue_rate=_published(4, "warp instructions/clk/SM", _GUIDE),
    exp_rate=_published(16, "1/clk/SM", _GUIDE),
    l2_read=_assumed(9.32e12, "B/s", "34 B/clk/SM as on the H200"),
    l2_reduce=_assumed(3.89e12, "B/s", "14.2 B/clk/SM as on the H200"),
    reduce_miss=_assumed(2.3e12, "B/s", "the H200's share of its HBM"),
    hbm=_published(8e12, "B/s", _SHEET_B200),
    l2_bytes=_published(126e6, "B", "cudaDeviceProp::l2CacheSize; chipsandcheese.com, B200"),
    alu_latency=_assumed(4, "clk", _CARRIED),
    shared_latency=_assumed(29, "clk", _CARRIED),
    shuffle_latency=_assumed(23, "clk", _CARRIED),
    barrier_latency=_assumed(60, "clk", _ORDER),
    mma_latency=_assumed(120, "clk", _ORDER),
    dsmem_latency=_assumed(300, "clk", _ORDER),
    l2_latency=_assumed(277, "clk", "the H200's 150 ns"),
    hbm_latency=_assumed(505, "clk", "the H200's 273 ns"),
    release_latency=_assumed(1500, "clk", _CARRIED),
    launch=_assumed(4.0e-6, "s", _CARRIED),
)

MACHINES = {machine.name: machine for machine in (H200, B200)}
